"""A run's folder survives what runs meet: torn lines, full disks, other settings."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from levelhead.harness import runs
from levelhead.harness.runs import RunFolder, replace_text

GRID = {
    "tasks": [{"data": "digits", "steps": 7}],
    "variants": ["softmax", "quest"],
    "inits": ["default"],
    "seeds": 2,
}


def test_records_come_back_in_order_with_their_versions(tmp_path):
    run = RunFolder(tmp_path / "new" / "run")
    run.append({"cell": 1})
    run.append({"cell": 2})
    records = RunFolder(run.path).finished()
    assert [record["cell"] for record in records] == [1, 2]
    assert set(records[0]["versions"]) == {"levelhead", "commit", "torch"}
    assert records[0]["finished_at"].endswith("+00:00")


def test_a_torn_last_line_is_dropped_and_does_not_spoil_the_next(tmp_path):
    run = RunFolder(tmp_path)
    run.append({"cell": 1})
    path = tmp_path / "cells.jsonl"
    path.write_bytes(path.read_bytes() + b'{"cell": 2, "fin')
    assert [record["cell"] for record in run.finished()] == [1]
    run.append({"cell": 3})
    assert [record["cell"] for record in run.finished()] == [1, 3]


def test_a_broken_line_in_the_middle_is_refused_with_its_place(tmp_path):
    run = RunFolder(tmp_path)
    (tmp_path / "cells.jsonl").write_text('{"cell": 1}\n{"cell": 2, \n{"cell": 3}\n')
    with pytest.raises(ValueError, match=r"cells.jsonl, line 2 is not JSON; delete that line"):
        run.finished()


def test_a_full_disk_loses_only_the_line_that_did_not_fit(tmp_path, monkeypatch):
    run = RunFolder(tmp_path)
    run.append({"cell": 1})
    whole = (tmp_path / "cells.jsonl").read_bytes()

    def no_space(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(runs.os, "fsync", no_space)
        with pytest.raises(OSError, match="No space left"):
            run.append({"cell": 2})
        assert (tmp_path / "cells.jsonl").read_bytes() == whole
        run_config = tmp_path / "config.yaml"
        run_config.write_text("old")
        with pytest.raises(OSError, match="No space left"):
            replace_text(run_config, "new")
        assert run_config.read_text() == "old"
    assert not list(tmp_path.glob("*.tmp"))
    run.append({"cell": 2})
    assert [record["cell"] for record in run.finished()] == [1, 2]


def test_not_a_number_never_reaches_the_file(tmp_path):
    run = RunFolder(tmp_path)
    with pytest.raises(ValueError, match="JSON compliant"):
        run.append({"loss": float("nan")})
    assert run.finished() == []


def test_a_grid_may_grow_but_not_change(tmp_path):
    run = RunFolder(tmp_path)
    run.open_grid(GRID)
    run.open_grid(GRID | {"variants": ["softmax", "gate"], "seeds": 1})
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert config["settings"]["variants"] == ["softmax", "quest", "gate"]
    assert config["settings"]["seeds"] == 2
    assert config["environment"]["torch"] == run.environment["torch"]
    changed = GRID | {"tasks": [{"data": "digits", "steps": 9}]}
    with pytest.raises(ValueError, match=r"digits with steps=7: .* got steps=9; valid: .*--out"):
        run.open_grid(changed)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == config


def test_data_of_the_same_name_are_not_mixed_up(tmp_path):
    run = RunFolder(tmp_path)
    run.open_grid(GRID | {"tasks": [{"data": "here/text.txt", "steps": 7}]})
    with pytest.raises(ValueError, match=r"text.txt with data=here/text.txt: .* data=there/text"):
        run.open_grid(GRID | {"tasks": [{"data": "there/text.txt", "steps": 7}]})


def test_a_foreign_config_is_not_overwritten(tmp_path):
    for foreign in ("someone: else\n", "not: [yaml", "- a\n- list\n"):
        (tmp_path / "config.yaml").write_text(foreign)
        with pytest.raises(ValueError, match=r"must be the config of a run, got .*--out"):
            RunFolder(tmp_path).open_grid(GRID)
        assert (tmp_path / "config.yaml").read_text() == foreign


def test_a_folder_that_cannot_be_made_is_an_os_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        RunFolder(tmp_path / "file" / "run")


def test_one_process_at_a_time_writes_to_a_folder(tmp_path):
    first, second = RunFolder(tmp_path), RunFolder(tmp_path)
    with (
        first.held(),
        pytest.raises(ValueError, match="another process is writing to .*give another --out"),
        second.held(),
    ):
        pass
    with second.held():
        pass
    assert list(tmp_path.iterdir()) == []


def test_names_of_any_script_are_read_back_under_any_locale(tmp_path):
    """The files are UTF-8; a C locale would read them as ASCII."""
    RunFolder(tmp_path).open_grid(GRID | {"tasks": [{"data": "ünï.txt", "steps": 7}]})
    code = (
        "import sys, pathlib; from levelhead.harness.runs import RunFolder\n"
        "grid = {'tasks': [{'data': '\\xfcn\\xef.txt', 'steps': 7}], 'variants': [],"
        " 'inits': [], 'seeds': 1}\n"
        "RunFolder(pathlib.Path(sys.argv[1])).open_grid(grid)"
    )
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=ascii_only, check=True)


def test_files_are_replaced_whole(tmp_path):
    path = tmp_path / "summary.json"
    replace_text(path, json.dumps({"a": 1}))
    inode = os.stat(path).st_ino
    replace_text(path, json.dumps({"a": 2}))
    assert json.loads(path.read_text()) == {"a": 2}
    assert os.stat(path).st_ino != inode
    assert RunFolder(tmp_path).read_json("summary.json") == {"a": 2}
    assert RunFolder(tmp_path).read_json("missing.json") is None

"""The benchmark of the import runs, and its record says what it must."""

import json

import pytest

from levelhead.bench import startup


def test_a_record_says_how_the_imports_compare(tmp_path, capsys):
    path = tmp_path / "record.json"
    code = startup.main(["--repeats", "1", "--out", str(path)])
    record = json.loads(path.read_text())
    assert record["levelhead"]["ratio"] > 0.5  # levelhead imports torch
    assert code == (0 if record["levelhead"]["ratio"] <= 1.2 else 1)
    assert capsys.readouterr().out.startswith("import levelhead / import torch: ")


def test_an_import_that_fails_is_no_fast_import():
    with pytest.raises(startup.subprocess.CalledProcessError):
        startup.import_in_a_process("levelhead.no_such_module")()

"""The benchmark runs at a small size and its record says what it must."""

import json

import pytest

from levelhead.bench.measure import PARTS, main

SMALL = ["--rows", "64", "--keys", "32", "--tokens", "64", "--repeats", "1", "--nets", "3"]
FIGURES = {"sensitivity": 9, "concentration": 5, "jacobian": 3 + 4 + 3}


def test_small_run_writes_a_record_with_every_figure(tmp_path, capsys):
    path = tmp_path / "record.json"
    code = main([*SMALL, "--small", "--out", str(path)])
    record = json.loads(path.read_text())
    assert (record["options"]["rows"], record["options"]["keys"]) == (64, 32)
    results = record["results"]
    for part, count in FIGURES.items():
        names = {row["name"] for row in results if row["part"] == part}
        assert len(names) == count, part
    assert code == (0 if all(row["holds"] for row in results) else 1)
    assert len(capsys.readouterr().out.splitlines()) == len(results) == sum(FIGURES.values())
    widths = [row["largest_width"] for row in results if "largest_width" in row]
    assert len(widths) == FIGURES["sensitivity"]
    assert max(widths) <= 1e-6
    for row in results:  # times depend on the machine, errors and bounds do not
        if "error" in row["name"] or "median" in row["name"]:
            assert row["holds"], row


@pytest.mark.parametrize("part", FIGURES)
def test_parts_run_alone(part, monkeypatch, capsys):
    monkeypatch.setitem(PARTS, part, lambda options: [{"name": part, "ratio": 1, "holds": False}])
    assert main(["--only", part, "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert [row["part"] for row in record["results"]] == [part]


def test_an_unknown_part_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--only", "kappa"])
    assert stopped.value.code == 2
    assert "sensitivity" in capsys.readouterr().err

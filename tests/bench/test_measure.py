"""The benchmark runs at a small size and its record says what it must."""

import json

from levelhead.bench.measure import main, sensitivity_rows


def test_small_run_writes_a_record_with_every_figure(tmp_path, capsys):
    path = tmp_path / "record.json"
    sizes = ["--rows", "64", "--keys", "32", "--tokens", "64", "--repeats", "1"]
    code = main([*sizes, "--json", str(path)])
    record = json.loads(path.read_text())
    assert record["rows"] == [64, 32]
    names = [row["name"] for row in record["results"]]
    assert len(names) == len(set(names)) == 9 + 5
    assert code == (0 if all(row["holds"] for row in record["results"]) else 1)
    assert len(capsys.readouterr().out.splitlines()) == 14
    widths = [row["largest_width"] for row in record["results"] if "largest_width" in row]
    assert len(widths) == 9
    assert max(widths) <= 1e-6


def test_rows_are_probabilities_of_the_kinds_they_name():
    for kind, rows in sensitivity_rows(40, 16, "cpu").items():
        assert (rows.sum(-1) - 1).abs().max() < 1e-6
        if "causal" in kind:
            assert ((rows > 0).sum(-1) <= rows.new_tensor([i % 16 + 1 for i in range(40)])).all()
    assert ((sensitivity_rows(3, 16, "cpu")["uniform, odd"] > 0).sum(-1) == 15).all()

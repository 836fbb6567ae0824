"""The benchmark runs at a small size and its record says what it must."""

import json

from levelhead.bench.monitor import main


def test_small_run_writes_a_record_with_every_figure(tmp_path, capsys):
    path = tmp_path / "record.json"
    arguments = ["--layers", "1", "--tokens", "16", "--images", "0", "--repeats", "1",
                 "--steps", "30"]  # fmt: skip
    code = main([*arguments, "--out", str(path)])
    results = json.loads(path.read_text())["results"]
    assert len(results) == len({row["name"] for row in results}) == 5
    (flat,) = [row for row in results if "live tensors" in row["name"]]
    assert flat["ratio"] == 1.0
    assert code == (0 if all(row["holds"] for row in results) else 1)
    assert len(capsys.readouterr().out.splitlines()) == 5

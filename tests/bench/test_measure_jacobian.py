"""The benchmark of the Jacobian runs at a small size and its record says what it must."""

import json

from levelhead.bench.measure_jacobian import main


def test_small_run_writes_a_record_with_every_figure(tmp_path, capsys):
    path = tmp_path / "record.json"
    code = main(["--small", "--nets", "3", "--json", str(path)])
    results = json.loads(path.read_text())["results"]
    assert len({row["name"] for row in results}) == 3 + 4 + 3
    assert len(capsys.readouterr().out.splitlines()) == 10
    assert code == (0 if all(row["holds"] for row in results) else 1)
    for row in results:  # times depend on the machine, errors and bounds do not
        if "error" in row["name"] or "median" in row["name"]:
            assert row["holds"], row

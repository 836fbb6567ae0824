"""The grid's account adds up, and the command ends by its bar."""

import json

import pytest

from levelhead.bench import grid
from levelhead.harness.spent import Spent

SPENT = {
    "wall_s": 90.0,
    "workers": 2,
    "num_trained": 60,
    "worker_s": {"training": 170.0, "evaluation": 4.0, "start": 1.0, "waiting": 5.0},
}


def test_shares_are_of_all_processes_time_and_sum_to_one():
    found = grid.account(SPENT, wall_s=100.0)
    assert sum(found["shares"].values()) == pytest.approx(1.0, abs=1e-3)
    assert found["shares"]["import"] == pytest.approx(2 * 10 / 200)
    assert found["outside_with_evaluation_frac"] == pytest.approx(1 - 170 / 200)
    assert found["outside_frac"] == pytest.approx(1 - 174 / 200)


@pytest.mark.parametrize(("training", "code"), [(194.0, 0), (170.0, 1)])
def test_the_command_fails_above_the_bar(monkeypatch, tmp_path, capsys, training, code):
    spent = SPENT | {"worker_s": SPENT["worker_s"] | {"training": training}}
    monkeypatch.setattr(grid, "measure_grid", lambda *given: grid.account(spent, 100.0))
    assert grid.main(["--out", str(tmp_path / "record.json")]) == code
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["holds"] == (code == 0)
    assert "60 runs, 2 at a time, 100 s: outside training" in capsys.readouterr().out


def test_a_comparisons_account_covers_all_its_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    spent = Spent()
    now[0] = 3.0
    spent.mark("checking")
    spent.workers = 2
    spent.add({"data": 1.0, "training": 8.0, "evaluation": 0.5, "building": 0.25}, start_s=2.0)
    spent.add({"data": 0.0, "training": 6.0, "evaluation": 0.5, "building": 0.25}, start_s=0.0)
    now[0] = 13.0
    spent.mark("training")
    now[0] = 15.0
    spent.mark("timing")
    summed_up = spent.summed_up()
    assert sum(summed_up["worker_s"].values()) == pytest.approx(2 * 15.0)
    assert summed_up["worker_s"]["waiting"] == pytest.approx(20.0 - 18.5)
    assert summed_up["outside_frac"] == pytest.approx(1 - 14 / 30, abs=1e-4)
    assert Spent().summed_up()["outside_frac"] is None

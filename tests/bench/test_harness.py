"""The harness benchmark pairs its steps, leaves out what is no step, and is the same training."""

import json

import pytest
import torch

from levelhead.bench import harness
from levelhead.harness.config import Cell
from levelhead.harness.engine.engine import train
from levelhead.harness.engine.options import EngineOptions
from levelhead.harness.tasks import make_task, resolve_task
from levelhead.modes import one_thread


def test_only_steps_that_follow_a_step_are_timed(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(harness, "_clocks", lambda: (10.0 * (tick := next(now)), float(tick)))
    steps = []
    pair = harness.SideBySide(lambda: steps.append(1))
    for kind in ("step", "step", "evaluation", "step", "step", "checkpoint"):
        pair(kind, {})
    assert len(steps) == 4
    assert pair.engine == [(10.0, 1.0)] * 2
    assert pair.bare_loop == [(10.0, 1.0)] * 2


def test_the_bare_loop_is_the_engines_training(tmp_path):
    """Otherwise the ratio would compare two different things."""
    task = make_task(resolve_task("digits", steps=4, batch_size=8))
    cell = Cell(task="digits", variant="softmax", init="default", seed=0)
    losses = []
    own = task.loss
    with one_thread():
        record = train(task, cell, tmp_path / "run", EngineOptions())
        task.loss = lambda model, batch: losses.append(own(model, batch)) or losses[-1]
        step = harness.bare_loop(task, cell)
        for _ in range(4):
            step()
    found = [round(loss.item(), 6) for loss in losses]
    assert found == record["curve"]["train_loss_nats"]


@pytest.mark.slow
def test_the_command_writes_its_record(tmp_path, capsys):
    code = harness.main(["--steps", "12", "--out", str(tmp_path / "record.json")])
    record = json.loads((tmp_path / "record.json").read_text())
    assert code == (0 if all(row["holds"] for row in record["results"]) else 1)
    assert len(record["results"]) == 6
    assert record["torch"] == str(torch.__version__)
    assert all(row["ratio"] >= 0 for row in record["results"])
    assert capsys.readouterr().out.count("bar 1.03") == 4

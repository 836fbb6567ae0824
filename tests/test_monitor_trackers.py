"""Trackers for real, offline: what the monitor hands over lies in their own files."""

import json
import sqlite3
import time

import pytest
import torch

from levelhead.monitor import Monitor
from test_monitor import Net, states

pytestmark = pytest.mark.slow

NAME = "attn/layers.0/mean/entropy_nats"


def watched(writer, path):
    """Train three steps, measure the first and the last, and return what was measured."""
    torch.manual_seed(0)
    net, seen = Net(), {}
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with Monitor(net, every=2, writer=writer, jsonl=path) as monitor:
        for step in range(3):
            loss = net(states(step))
            loss.backward()
            monitor.note(loss=loss)
            optimizer.step()
            seen[step] = dict(monitor.latest)
    assert monitor.measured_steps == [0, 2]
    return seen


def eventually(holds, seconds=120):
    """Ask until it holds, or the time is over."""
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.1)
    return holds()


@pytest.mark.filterwarnings("ignore")  # of the tracker's own imports
def test_weights_and_biases_gets_the_scalars(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="levelhead", mode="offline", dir=tmp_path)
    seen = watched(run, tmp_path / "m.jsonl")
    run.log({"end": 1.0}, step=3)  # a step is committed when the next one begins
    assert run.summary[NAME] == pytest.approx(seen[2][NAME])
    run.finish()
    (stored,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    # A process of its own writes the file, some time after ``finish``.
    assert eventually(lambda: NAME.encode() in stored.read_bytes())


@pytest.mark.filterwarnings("ignore")
def test_trackio_gets_the_scalars(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio", reason="needs trackio")
    trackio.init(project="levelhead", name="run", auto_log_gpu=False)
    seen = watched(trackio, tmp_path / "m.jsonl")
    trackio.finish()
    with sqlite3.connect(tmp_path / "trackio" / "levelhead.db") as stored:
        rows = stored.execute("select step, metrics from metrics order by step").fetchall()
    read = {step: json.loads(metrics) for step, metrics in rows}
    assert sorted(read) == [0, 2]
    for step in (0, 2):
        assert read[step][NAME] == pytest.approx(seen[step][NAME])


@pytest.mark.filterwarnings("ignore")
def test_lightning_fabric(tmp_path):
    fabric_module = pytest.importorskip("lightning.fabric", reason="needs lightning")
    net = Net()
    fabric = fabric_module.Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 1e-3))
    with Monitor(model, every=1, jsonl=tmp_path / "m.jsonl") as monitor:
        for step in range(2):
            loss = model(states(step))
            fabric.backward(loss)
            monitor.note(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
    assert monitor.measured_steps == [0, 1]
    assert NAME in monitor.latest

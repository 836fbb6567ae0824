"""What the engine costs: a step of ``levelhead train`` over the same step in a bare loop.

Both train the same model with the same optimiser on the same batches, in one process, a step of
one after a step of the other; evaluations and checkpoints are left out.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from levelhead.bench.arguments import out_file, positive
from levelhead.harness.config import Cell
from levelhead.harness.runs import replace_text
from levelhead.harness.seeding import named_seed
from levelhead.harness.tasks import Task, make_task, resolve_task
from levelhead.harness.train import start_model
from levelhead.modes import one_thread

OVERHEAD_BAR, WAITING_BAR = 1.03, 0.05
CASES = {"small ViT": "digits", "small GPT": "topics"}
NUM_WARMUP = 5


def bare_loop(task: Task, cell: Cell) -> Callable[[], None]:
    """Return what anybody would write by hand: one step a call.

    Args:
        task: Data, loss and settings.
        cell: Variant, init and seed.

    Returns:
        The step.
    """
    from levelhead.harness.engine.schedule import make_schedule
    from levelhead.harness.engine.training import make_optimizer  # needs accelerate

    model = start_model(task, cell).train()
    optimizer = make_optimizer(task, model)
    schedule = make_schedule(optimizer, task.settings)
    batches = task.batches(named_seed(cell.seed, "batches"))
    clip_norm = task.settings.clip_norm
    assert clip_norm is not None

    def step() -> None:
        loss = task.loss(model, next(batches))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        loss.item()

    return step


class SideBySide:
    """Does a bare step after each of the engine's and keeps both times.

    Args:
        bare: The bare step.
    """

    def __init__(self, bare: Callable[[], None]):
        self.bare = bare
        self.engine: list[tuple[float, float]] = []
        self.bare_loop: list[tuple[float, float]] = []
        self._left: tuple[float, float] | None = None

    def __call__(self, kind: str, values: Mapping[str, Any]) -> None:
        """Hear of an event of the engine.

        Args:
            kind: Its kind; only steps that nothing but steps came between are timed.
            values: Not looked at.
        """
        now = _clocks()
        if kind != "step":
            self._left = None
            return
        self.bare()
        done = _clocks()
        if self._left is not None:
            self.engine.append(_passed(self._left, now))
            self.bare_loop.append(_passed(now, done))
        self._left = _clocks()


def _clocks() -> tuple[float, float]:
    """Time on the wall, and of this process's own work: the second one is blind to neighbours."""
    return time.perf_counter(), time.process_time()


def _passed(start: tuple[float, float], end: tuple[float, float]) -> tuple[float, float]:
    return end[0] - start[0], end[1] - start[1]


def measure(name: str, data: str, steps: int) -> list[dict[str, Any]]:
    """Time a case.

    Args:
        name: Of the case.
        data: Of the embedded default.
        steps: To train.

    Returns:
        Records of the overhead, by two clocks, and of the data's share of the time.
    """
    from levelhead.harness.engine.engine import train
    from levelhead.harness.engine.options import EngineOptions

    task = make_task(resolve_task(data, steps=steps))
    cell = Cell(task=data, variant="softmax", init="default", seed=0)
    pair = SideBySide(bare_loop(task, cell))
    with tempfile.TemporaryDirectory() as folder, one_thread():
        options = EngineOptions(save_every=steps, log_every=1)
        train(task, cell, Path(folder, "run"), options, pair)
        events = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    waits = [e["data_wait_frac"] for e in map(json.loads, events) if e["event"] == "step"]
    # The bare step stands between two of the engine's, so a share of the whole is doubled.
    waiting = 2 * statistics.median(waits[NUM_WARMUP:])
    what = f"{name}: step of levelhead train / bare step"
    return [
        {"name": f"{what}, time", "bar": OVERHEAD_BAR} | _compared(pair, 0),
        {"name": f"{what}, time of the process", "bar": OVERHEAD_BAR} | _compared(pair, 1),
        {"name": f"{name}: share of a step spent waiting for data", "bar": WAITING_BAR,
         "ratio": waiting},
    ]  # fmt: skip


def _compared(pair: SideBySide, clock: int) -> dict[str, Any]:
    engine = [times[clock] for times in pair.engine[NUM_WARMUP:]]
    bare = [times[clock] for times in pair.bare_loop[NUM_WARMUP:]]
    return {
        "ratio": statistics.median(engine) / statistics.median(bare),
        "engine_ms": 1000 * statistics.median(engine),
        "bare_ms": 1000 * statistics.median(bare),
        "num_pairs": len(engine),
    }


def run(steps: int) -> dict[str, Any]:
    """Run the whole benchmark.

    Args:
        steps: Of each training.

    Returns:
        One JSON-able record, the machine included.
    """
    results = [row for name, data in CASES.items() for row in measure(name, data, steps)]
    return {
        "benchmark": "harness",
        "torch": str(torch.__version__),
        "machine": platform.machine(),
        "threads": 1,
        "steps": steps,
        "results": [row | {"holds": row["ratio"] <= row["bar"]} for row in results],
    }


def main(argv: list[str] | None = None) -> int:
    """Run from the command line.

    Args:
        argv: Arguments, those of the process if None.

    Returns:
        0 if every figure stays below its bar, else 1.
    """
    parser = argparse.ArgumentParser(prog="levelhead bench harness", description=__doc__)
    parser.add_argument("--steps", type=positive, default=200)
    parser.add_argument("--out", type=out_file, help="write the record here as JSON")
    parser.add_argument("--json", action="store_true", help="print the record as JSON")
    chosen = parser.parse_args(argv)
    record = run(chosen.steps)
    text = json.dumps(record, indent=1)
    if chosen.json:
        print(text)
    else:
        for row in record["results"]:
            verdict = "ok" if row["holds"] else "ABOVE"
            print(f"{verdict:5} {row['ratio']:8.3f}  bar {row['bar']:.2f}  {row['name']}")
    if chosen.out is not None:
        replace_text(chosen.out, text + "\n")
    return 0 if all(row["holds"] for row in record["results"]) else 1

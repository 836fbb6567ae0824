"""Break a training with thirty times its learning rate and write down when the monitor says so.

    python benchmarks/broken_run.py --record records/broken_run.md

The small GPT of `levelhead compare` on its own text, SGD with momentum: at a learning rate of 0.1
it learns; at 3 its loss is NaN after a few steps. Both see the same batches and the same start.
"""

import argparse
import math
import sys
import tempfile
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch

from levelhead.harness.config import Cell
from levelhead.harness.seeding import named_seed
from levelhead.harness.tasks import make_task, resolve_task
from levelhead.harness.train import start_model, warmup_cosine
from levelhead.modes import one_thread
from levelhead.monitor import Monitor
from levelhead.monitor_alerts import Alert

LEARNING_RATE, MOMENTUM, FACTOR = 0.1, 0.9, 30
STEPS, WARMUP, EVERY = 250, 0.1, 5


@dataclass
class Run:
    """One training.

    Attributes:
        losses: Of every step; the last may not be finite.
        alerts: What the monitor told.
        seen: Step to the scalars of the measured steps.
    """

    losses: list[float] = field(default_factory=list)
    alerts: list[Alert] = field(default_factory=list)
    seen: dict[int, dict[str, float]] = field(default_factory=dict)

    @property
    def first_nonfinite(self) -> int | None:
        """The step at which the loss is not finite any more."""
        steps = [step for step, loss in enumerate(self.losses) if not math.isfinite(loss)]
        return steps[0] if steps else None


def train(factor: float, num_steps: int = STEPS, seed: int = 0) -> Run:
    """Train with the monitor on until the loss breaks or the steps end.

    Args:
        factor: On the learning rate.
        num_steps: Steps to take of the schedule's ``STEPS``.
        seed: Of start and batches.

    Returns:
        Losses, alerts, scalars.
    """
    task = make_task(resolve_task("topics", steps=STEPS))
    cell = Cell(task=task.settings.name, variant="softmax", init="default", seed=seed)
    model, run = start_model(task, cell).train(), Run()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=MOMENTUM)
    batches = task.batches(named_seed(seed, "batches"))
    with tempfile.TemporaryDirectory() as folder, one_thread():
        log = Path(folder) / "monitor.jsonl"
        options = {"every": EVERY, "writer": run.seen.__setitem__, "jsonl": log}
        with Monitor(model, on_alert=run.alerts.append, **options) as monitor:
            for step, batch in zip(range(num_steps), batches, strict=False):
                optimizer.param_groups[0]["lr"] = (
                    factor * LEARNING_RATE * warmup_cosine(step, STEPS, WARMUP)
                )
                loss = task.loss(model, batch)
                run.losses.append(loss.item())
                if not math.isfinite(run.losses[-1]):
                    break
                optimizer.zero_grad()
                loss.backward()
                monitor.note(loss=loss)
                optimizer.step()
    return run


def table_of(run: Run, steps: list[int]) -> str:
    """Show measured steps.

    Args:
        run: With the scalars.
        steps: Which.

    Returns:
        A table in Markdown.
    """
    columns = {
        "largest score, layer 0": "attn/blocks.0.attn/max/score_max",
        "layer 1": "attn/blocks.1.attn/max/score_max",
        "entropy / most possible, layer 0": "attn/blocks.0.attn/mean/normalized_entropy",
        "layer 1 ": "attn/blocks.1.attn/mean/normalized_entropy",
        "gradient norm": "train/grad_norm",
    }
    lines = ["| step | loss | " + " | ".join(columns) + " |", "|" + " --: |" * 7]
    for step in steps:
        numbers = " | ".join(f"{run.seen[step][name]:.4g}" for name in columns.values())
        lines.append(f"| {step} | {run.losses[step]:.4g} | {numbers} |")
    return "\n".join(lines)


def describe() -> str:
    """Run both and write about them.

    Returns:
        Markdown.
    """
    broken, healthy = train(FACTOR), train(1)
    every_fifth = [step for step in healthy.seen if step % 50 == 0]
    told = "\n".join(f"- step {a.step}, {a.kind}: {a.text}" for a in broken.alerts)
    first = next(alert for alert in broken.alerts if alert.layer)
    return "\n\n".join([
        HEADER.format(torch=version("torch"), every=EVERY, rate=LEARNING_RATE),
        f"## Learning rate x {FACTOR}",
        f"**First said at step {first.step}, of {first.layer}, head {first.head}; the loss is "
        f"not finite at step {broken.first_nonfinite}.**",
        table_of(broken, list(broken.seen)),
        told,
        "## Its healthy twin",
        f"{len(healthy.losses)} steps, {len(healthy.seen)} measured, "
        f"{len(healthy.alerts)} alerts.",
        table_of(healthy, every_fifth),
    ])  # fmt: skip


HEADER = """# A broken run, and when the monitor says so

    python benchmarks/broken_run.py --record records/broken_run.md

torch {torch}, one thread. The small GPT of `levelhead compare` on its own text, SGD with momentum
0.9, learning rate {rate} after 25 steps of warm-up, no clipping; the monitor looks every {every}
steps."""


def main() -> None:
    """Print the record, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path, help="write it here instead of printing it")
    chosen = parser.parse_args()
    text = describe()
    if chosen.record is None:
        sys.stdout.write(text + "\n")
    else:
        chosen.record.write_text(text + "\n")


if __name__ == "__main__":
    main()

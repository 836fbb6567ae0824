"""What a training shows while it runs: step, loss, speed, time left, and waiting for data."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from levelhead.harness.engine.options import OnEvent


@contextmanager
def training_bar(console: Console, num_steps: int) -> Iterator[OnEvent]:
    """Show a bar over the optimiser steps; notes stand above it.

    Args:
        console: Where to; standard error, so that standard output stays clean.
        num_steps: Of the training.

    Yields:
        The ``on_event`` of ``train``.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[shown]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    is_first = is_first_process()
    with Progress(*columns, console=console, disable=not is_first) as progress:
        bar = progress.add_task("training", total=num_steps, shown="")
        speed: dict[str, float] = {}

        def on_event(kind: str, values: Mapping[str, Any]) -> None:
            if kind == "step":
                speed.update({name: values[name] for name in SPEED if name in values})
                shown = _line(values["loss"], speed)
                progress.update(bar, completed=values["step"], shown=shown)
            elif kind == "note":
                progress.console.print(values["text"], markup=False, highlight=False)

        yield on_event


SPEED = ("samples_per_s", "data_wait_frac")


def is_first_process() -> bool:
    """Whether this is the process that talks, of those a launcher started."""
    return os.environ.get("RANK", "0") == "0"


def _line(loss: float, speed: Mapping[str, float]) -> str:
    parts = [f"loss {loss:.4f}"]
    if speed:
        parts += [f"{speed['samples_per_s']:,.0f} samples/s",
                  f"data {100 * speed['data_wait_frac']:.1f} %"]  # fmt: skip
    return "  ".join(parts)

"""Where a monitor's scalars go: JSONL always, and the trackers people use."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from levelhead.diagnosis import as_json
from levelhead.shapes import describe

Write = Callable[[int, Mapping[str, float]], object]
"""Takes the step and name to value."""


class JsonlWriter:
    """Appends one line for each event; a line is written whole and flushed.

    Args:
        path: The file; its folder is made when it is missing.

    Raises:
        OSError: It cannot be written.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a")

    def write(self, event: Mapping[str, Any]) -> None:
        """Write one event.

        Args:
            event: Plain values; NaN and infinities become text.
        """
        self._file.write(json.dumps(as_json(event), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def as_writer(writer: Any) -> Write:
    """Turn a tracker into a function of step and scalars.

    Args:
        writer: None; a function of step and scalars; a TensorBoard ``SummaryWriter``; a W&B run
            or the ``trackio`` module (anything with ``log(values, step=...)``); an
            ``Accelerator``, which hands on to all its trackers.

    Returns:
        The function.

    Raises:
        ValueError: None of these.
    """
    if writer is None:
        return lambda step, scalars: None
    if hasattr(writer, "add_scalar"):
        return lambda step, scalars: _to_tensorboard(writer, step, scalars)
    if hasattr(writer, "log") and callable(writer.log):
        return lambda step, scalars: writer.log(dict(scalars), step=step)
    if callable(writer):
        return writer
    raise ValueError(
        "writer must be a function of step and scalars, a SummaryWriter, a W&B run, the trackio "
        f"module or an Accelerator, got {describe(writer)}"
    )


def _to_tensorboard(writer: Any, step: int, scalars: Mapping[str, float]) -> None:
    for name, value in scalars.items():
        writer.add_scalar(name, value, step)

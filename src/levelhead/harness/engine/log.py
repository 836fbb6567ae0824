"""The training's own log: one JSON line for each event, cut back to the checkpoint on resume."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from levelhead.harness.runs import replace_bytes

METRICS = "metrics.jsonl"
"""Name of the file."""


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Read a log; a last line torn by a crash is left out.

    Args:
        path: The file; a missing one is empty.

    Yields:
        The events in order.
    """
    if path.exists():
        for line in path.read_bytes().rpartition(b"\n")[0].splitlines():
            yield json.loads(line)


def keep_events(path: Path, is_kept: Callable[[Mapping[str, Any]], bool]) -> None:
    """Rewrite a log without the events of steps that will be done again.

    Args:
        path: The file; a missing one stays missing.
        is_kept: Says which events stay.
    """
    if path.exists():
        kept = [json.dumps(event) + "\n" for event in read_events(path) if is_kept(event)]
        replace_bytes(path, "".join(kept).encode())

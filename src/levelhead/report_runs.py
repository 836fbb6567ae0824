"""What ``levelhead compare`` left in a folder, read without changing it."""

import json
from pathlib import Path
from typing import Any

from levelhead.report_monitor import read_monitor
from levelhead.shapes import require


def read_run(folder: Path) -> dict[str, Any]:
    """Read what ``levelhead compare`` left in a folder; nothing in it is changed.

    Args:
        folder: Of the run.

    Returns:
        ``path``, ``config``, ``cells`` (a last line torn by a crash left out), ``summary``
        (None where the comparison was never finished) and ``monitor`` (empty likewise).

    Raises:
        ValueError: Not such a folder, or a file in it that cannot be read.
    """
    import yaml

    config_path, cells_path = folder / "config.yaml", folder / "cells.jsonl"
    require(
        config_path.exists() and cells_path.exists(),
        f"{folder} must be the folder of a run, with config.yaml and cells.jsonl",
        "a folder without them",
        "what `levelhead compare` or `levelhead train` wrote",
    )
    try:
        config = yaml.safe_load(config_path.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        config = None
    require(isinstance(config, dict), f"{config_path} must hold settings", "something else")
    lines = cells_path.read_bytes().rpartition(b"\n")[0].splitlines()
    cells = [_cell(line, f"{cells_path}, line {n}") for n, line in enumerate(lines, 1)]
    require(bool(cells), f"{cells_path} must hold a finished training", "none")
    return {
        "path": str(folder), "config": config, "cells": cells,
        "summary": _summary(folder / "summary.json"), "monitor": read_monitor(folder),
    }  # fmt: skip


def _cell(line: bytes, where: str) -> dict[str, Any]:
    try:
        cell = json.loads(line)
    except ValueError:
        cell = None
    is_cell = isinstance(cell, dict) and {"task", "variant", "init", "seed", "curve"} <= set(cell)
    require(is_cell, f"{where} must hold one training", "something else")
    assert isinstance(cell, dict)
    return cell


def _summary(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        raise ValueError(
            f"{path} is not JSON; run the same `levelhead compare` command to write it again"
        ) from None

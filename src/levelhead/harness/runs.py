"""A run's folder: what it was made with, and every finished training, safe against interruption.

    config.yaml   the settings and the machine
    cells.jsonl   one line for each finished training: final metrics, curves, versions
    deaths.jsonl  one line for each training whose every attempt died; it is tried again
    timings.json  step times of all variants, measured in turn
    summary.json  the table and its reading, as of the last call

A file is replaced by writing a new one beside it and renaming; ``cells.jsonl`` grows by whole
lines, and a line that was torn by a crash is dropped when the folder is opened again.
"""

import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from levelhead.compiled import find_compiler
from levelhead.harness.config import task_name
from levelhead.shapes import require

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None

VERSIONS = ("levelhead", "commit", "torch")  # what a cell's numbers may depend on


class RunFolder:
    """One folder under ``runs/``.

    Args:
        path: The folder; made when it is missing.

    Raises:
        OSError: It cannot be made or written.
    """

    def __init__(self, path: Path):
        self.path = path
        self.environment = environment()
        path.mkdir(parents=True, exist_ok=True)
        replace_text(path / ".writable", "")
        (path / ".writable").unlink()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes out while this one trains into the folder.

        The lock is on the folder itself and goes with the process, however it ends; a file
        system without such locks goes without.

        Yields:
            Nothing.

        Raises:
            ValueError: Another process holds the folder.
        """
        if fcntl is None:
            yield
            return
        folder = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(folder)
            raise ValueError(
                f"another process is writing to {self.path}; let it end, or give another --out"
            ) from error
        except OSError:
            pass
        try:
            yield
        finally:
            os.close(folder)

    def open_grid(self, settings: Mapping[str, Any]) -> None:
        """Write ``config.yaml``; a folder that already has one must agree with it.

        Variants, inits, seeds and tasks may be added; a task's own settings may not change.

        Args:
            settings: The grid as plain values, tasks under ``"tasks"``.

        Raises:
            ValueError: The folder holds trainings of other settings.
        """
        path = self.path / "config.yaml"
        config = {"settings": dict(settings), "environment": self.environment}
        if path.exists():
            before = _read_config(path)
            _check_tasks(self.path, before["settings"]["tasks"], settings["tasks"])
            config["settings"] = _grown(before["settings"], config["settings"])
            config["environment"] = before["environment"]
        replace_text(path, yaml.safe_dump(config, sort_keys=False, allow_unicode=True))

    def finished(self) -> list[dict[str, Any]]:
        """Read all finished cells; a torn last line is cut off the file.

        Returns:
            Their records, in the order they finished.

        Raises:
            ValueError: A broken line that is not the last.
        """
        path = self.path / "cells.jsonl"
        if not path.exists():
            return []
        whole = path.read_bytes()
        kept = whole[: whole.rfind(b"\n") + 1]
        if len(kept) < len(whole):
            replace_bytes(path, kept)
        return [
            _record(line, f"{path}, line {number}")
            for number, line in enumerate(kept.splitlines(), 1)
        ]

    def append(self, record: Mapping[str, Any], name: str = "cells.jsonl") -> None:
        """Add a finished cell and wait until it is on the disk.

        Args:
            record: JSON values; NaN and infinity are refused.
            name: The file, ``"deaths.jsonl"`` for a cell that did not finish.

        Raises:
            OSError: It could not be written; the lines before it are whole.
        """
        versions = {name: self.environment[name] for name in VERSIONS}
        line = json.dumps({**record, "versions": versions, "finished_at": _now()}, allow_nan=False)
        path = self.path / name
        length = path.stat().st_size if path.exists() else 0
        try:
            with path.open("ab") as file:
                file.write(line.encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if path.exists():
                os.truncate(path, length)
            raise OSError(error.errno, error.strerror, str(path)) from error

    def read_json(self, name: str) -> Any:
        """Read a JSON file of the folder.

        Args:
            name: File name.

        Returns:
            Its content, or None where there is no such file or it is not JSON.
        """
        try:
            return json.loads((self.path / name).read_text("utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return None

    def write_json(self, name: str, content: Any) -> None:
        """Replace a JSON file of the folder.

        Args:
            name: File name.
            content: JSON values.
        """
        replace_text(self.path / name, json.dumps(content, indent=2, allow_nan=False) + "\n")


def replace_text(path: Path, content: str) -> None:
    """Write a file in one stroke: whoever reads sees the old or the new content, never a part.

    Args:
        path: The file.
        content: Its new content.
    """
    replace_bytes(path, content.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """Write a file in one stroke: whoever reads sees the old or the new content, never a part.

    Args:
        path: The file.
        content: Its new content.

    Raises:
        OSError: It could not be written; the old content is still there.
    """
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def environment() -> dict[str, Any]:
    """Say what computes: versions, commit, machine.

    Returns:
        Plain values for a record.
    """
    from importlib.metadata import version

    return {
        "levelhead": version("levelhead"),
        "commit": _commit(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "compiler": find_compiler(),  # of kernels that round otherwise than torch's operators
        "started_at": _now(),
    }


def _commit() -> str | None:
    """The commit of levelhead's own checkout, ``+`` when it has changes; None if installed."""
    package = Path(__file__).parents[1]
    if not (package.parents[1] / ".git").exists():
        return None
    command = ["git", "-C", str(package), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(path.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        config = None
    require(
        isinstance(config, dict) and {"settings", "environment"} <= set(config),
        f"{path} must be the config of a run",
        "something else; give another --out",
    )
    assert isinstance(config, dict)
    return config


def _record(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(
            f"{where} is not JSON; delete that line to train its cell again"
        ) from error
    require(isinstance(record, dict), f"{where} must hold one cell", f"{type(record).__name__}")
    return record


def _check_tasks(path: Path, before: list[dict], now: list[dict]) -> None:
    old = {_name(task): task for task in before}
    for task in now:
        name = _name(task)
        for key, value in task.items():
            past = old.get(name, task).get(key)
            require(
                past == value,
                f"{path} holds trainings of {name} with {key}={past}: one folder has one setting",
                f"{key}={value}",
                "the old setting, or another --out",
            )


def _name(task: Mapping[str, Any]) -> str:
    return task.get("name") or task_name(task["data"])


def _grown(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Join two grids; the first may be older than some of the second's settings."""
    known = {_name(task) for task in before["tasks"]}
    new = [task for task in now["tasks"] if _name(task) not in known]
    joined = {"tasks": before["tasks"] + new}
    for key, value in now.items():
        if key != "tasks":
            past = before.get(key)
            joined[key] = value if past is None else _joined(past, value)
    return joined


def _joined(past: Any, value: Any) -> Any:
    return list(dict.fromkeys([*past, *value])) if isinstance(past, list) else max(past, value)

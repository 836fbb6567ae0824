"""What stands beside a training's results: settings, their hash, versions, commit, hardware.

config.yaml      all that made it, and on what
metrics.jsonl    one line for each logged step, evaluation, checkpoint and note
monitor.jsonl    the attention's scalars, where they were watched
checkpoints/     the last two
cells.jsonl      the result, once it is finished
"""

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml

from levelhead.harness.config import Cell, Training
from levelhead.harness.runs import environment, replace_text
from levelhead.shapes import require

CONFIG = "config.yaml"
LIBRARIES = ("accelerate", "safetensors", "timm", "transformers", "datasets", "torchvision")


def training_config(settings: Training, cell: Cell, num_processes: int) -> dict[str, Any]:
    """Write down what is trained and on what.

    Args:
        settings: Of the task.
        cell: Variant, init and seed.
        num_processes: That train together.

    Returns:
        Plain values: ``settings`` in the form of a comparison's, ``training``, ``environment``.
    """
    task = settings.model_dump(mode="json")
    what = {
        "tasks": [task], "variants": [cell.variant], "inits": [cell.init], "seeds": cell.seed + 1,
    }  # fmt: skip
    hardware = {"processes": num_processes, "threads": torch.get_num_threads()} | _devices()
    return {
        "settings": what,
        "training": {"cell": cell.model_dump(), "hash": training_hash(settings, cell)},
        "environment": environment() | hardware | _versions(),
    }


def training_hash(settings: Training, cell: Cell) -> str:
    """Name what decides a training's numbers.

    Args:
        settings: Of the task.
        cell: Variant, init and seed.

    Returns:
        Sixteen hexadecimal digits.
    """
    whole = {"settings": settings.model_dump(mode="json"), "cell": cell.model_dump()}
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:16]


def read_config(folder: Path) -> dict[str, Any]:
    """Read a training's ``config.yaml``.

    Args:
        folder: Of the training.

    Returns:
        As ``training_config`` made it.

    Raises:
        ValueError: It is missing, broken, or of something else.
    """
    config = _config(folder)
    require(config is not None, f"{folder} must hold the {CONFIG} of a training", "none",
            "what `levelhead train --out FOLDER` wrote")  # fmt: skip
    assert config is not None
    return config


def _config(folder: Path) -> dict[str, Any] | None:
    """Read the config of a training; None where there is none, or one of something else."""
    try:
        config = yaml.safe_load((folder / CONFIG).read_text("utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return None
    is_training = isinstance(config, dict) and {"settings", "training"} <= set(config)
    return config if is_training else None


def check_folder(folder: Path, settings: Training, cell: Cell, resume: bool) -> None:
    """Refuse a folder that holds something else, or a training that is not to be gone on with.

    Args:
        folder: Where to train.
        settings: Of the task.
        cell: Variant, init and seed.
        resume: Whether to go on with what is there.

    Raises:
        ValueError: It holds something else.
    """
    if not any(folder.glob("*")):
        return
    before = read_config(folder) if resume else _config(folder)
    require(
        before is not None,
        f"{folder} must be empty, or hold a training of `levelhead train`",
        "a folder with other files",
        "another --out",
    )
    assert before is not None
    training = {"cell": cell.model_dump(), "hash": training_hash(settings, cell)}
    if before["training"] != training:
        old = _flat(before["settings"]["tasks"][0], before["training"]["cell"])
        new = _flat(settings.model_dump(mode="json"), training["cell"])
        other = [key for key in new | old if old.get(key) != new.get(key)]
        raise ValueError(
            f"{folder} holds another training: "
            + "; ".join(f"{key} was {old.get(key)}, not {new.get(key)}" for key in other[:3])
            + "; go on with the old settings, or give another --out"
        )
    require(resume, f"{folder} must be empty for a new training", "a folder with this training",
            "--resume, to go on with it, or another --out")  # fmt: skip


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write ``config.yaml``; that of an earlier start stays, as most was done with it.

    Args:
        folder: Of the training.
        config: As ``training_config`` made it.
    """
    if not (folder / CONFIG).exists():
        text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
        replace_text(folder / CONFIG, text)


def _flat(task: Mapping[str, Any], cell: Mapping[str, Any]) -> dict[str, Any]:
    return _leaves("", task) | _leaves("cell", cell)


def _leaves(path: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {path: value}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= _leaves(f"{path}.{key}".lstrip("."), inner)
    return found


def _devices() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"devices": ["cpu"]}
    count = torch.cuda.device_count()
    return {"devices": [torch.cuda.get_device_name(i) for i in range(count)],
            "cuda": torch.version.cuda}  # fmt: skip


def _versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found

"""A trained model back from a training's folder, for those who look at it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.harness.config import Cell, TaskSettings, TrainingSettings
from levelhead.harness.engine.checkpoint import (
    CHECKPOINTS,
    MANIFEST,
    checkpoints,
    damage,
    read_checkpoint,
)
from levelhead.harness.engine.folder import read_config
from levelhead.harness.engine.log import METRICS, read_events
from levelhead.harness.engine.state import fill_model
from levelhead.harness.recipe_tasks import task_of
from levelhead.harness.seeding import named_seed
from levelhead.shapes import require

PROBE_SAMPLES = 64


@dataclass(frozen=True)
class Trained:
    """What a training left.

    Attributes:
        model: With the checkpoint's weights, in evaluation mode.
        inputs: Training samples for it, or None where the task's batches are not pairs.
        cell: Task, variant, init and seed.
        step: Steps done.
        checkpoint: Where the weights come from.
        curves: Name to (step, value) pairs.
    """

    model: nn.Module
    inputs: Tensor | None
    cell: Cell
    step: int
    checkpoint: Path
    curves: dict[str, list[tuple[int, float]]]


def is_training(folder: Path) -> bool:
    """Whether a folder is that of a training, or one of its checkpoints.

    Args:
        folder: Any.

    Returns:
        By what lies in it; nothing is read.
    """
    return (folder / CHECKPOINTS).is_dir() or (folder / MANIFEST).is_file()


def load_trained(folder: Path) -> Trained:
    """Load the newest whole checkpoint of a training, or the one that is given.

    Args:
        folder: Of the training, or a checkpoint in it; nothing in it is changed.

    Returns:
        The model and what belongs to it.

    Raises:
        ValueError: No whole checkpoint, or one that does not fit the settings beside it.
    """
    is_checkpoint = (folder / MANIFEST).is_file()
    run = folder.resolve().parents[1] if is_checkpoint else folder
    config = read_config(run)
    settings = config["settings"]["tasks"][0]
    task = task_of((TrainingSettings if "recipe" in settings else TaskSettings)(**settings))
    cell = Cell(**config["training"]["cell"])
    checkpoint = read_checkpoint(folder if is_checkpoint else _newest(folder))
    model = task.build(cell.variant)
    fill_model(model, checkpoint.tensors["model"])
    batch = next(task.batches(named_seed(cell.seed, "probe")))
    curves: dict[str, list[tuple[int, float]]] = {}
    for event in read_events(run / METRICS):
        if event["event"] == "step":
            for name in ("train_loss_nats", "grad_norm"):
                if isinstance(event[name], float):  # NaN is written as text
                    curves.setdefault(name, []).append((event["step"], event[name]))
    return Trained(model.eval(), _inputs(batch), cell, checkpoint.step, checkpoint.path, curves)


def _newest(folder: Path) -> Path:
    found = checkpoints(folder / CHECKPOINTS)
    whole = [path for path in found if not damage(path)]
    require(bool(whole), f"{folder} must hold a whole checkpoint", f"{len(found)} damaged ones",
            "levelhead train --resume, to train on")  # fmt: skip
    return whole[0]


def _inputs(batch: Any) -> Tensor | None:
    first = batch[0] if isinstance(batch, tuple | list) else None
    return first[:PROBE_SAMPLES] if isinstance(first, torch.Tensor) else None

"""From a name on the command line to a model and a batch, and words about where they come from."""

import importlib
import inspect
import json
import logging
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from levelhead.diagnose import Curves
from levelhead.diagnose_command_batch import made_batch, read_batch
from levelhead.harness.config import Cell, TaskSettings
from levelhead.harness.seeding import named_seed
from levelhead.harness.tasks import make_task
from levelhead.harness.train import (
    make_optimizer,
    start_model,
    training_step,
    warmup_cosine,
)
from levelhead.modes import one_thread
from levelhead.shapes import require
from levelhead.store import SPEC, load


@dataclass
class Loaded:
    """A model ready to be diagnosed.

    Attributes:
        model: The model.
        batch: What to call it with, or None.
        origin: Where the batch comes from, in words.
        curves: Of the run it comes from.
    """

    model: nn.Module
    batch: Any
    origin: str
    curves: Curves = field(default_factory=dict)


def load_named(name: str, data: Path | None, random_weights: bool = False) -> Loaded:
    """Load a model by what the user wrote, and read or make its batch.

    Args:
        name: ``module:function``, a run's folder, a folder of transformers or levelhead, the name
            of a timm model, or of one of transformers.
        data: A file, see ``read_batch``; None makes a batch.
        random_weights: Build a timm model without its trained weights.

    Returns:
        The model with its batch.

    Raises:
        ValueError: Nothing is known by that name, or the batch cannot be read or made.
    """
    folder = Path(name)
    if folder.is_dir():
        loaded = _from_folder(folder)
    elif ":" in name and not folder.exists():
        loaded = _from_function(name)
    else:
        with _quiet_hub():
            loaded = _from_library(name, random_weights)
    if data is not None:
        loaded.batch = read_batch(data, name)
        loaded.origin = f"read from {data}"
    elif loaded.batch is None and not loaded.origin:
        loaded.batch, loaded.origin = made_batch(loaded.model)
    return loaded


@contextmanager
def _quiet_hub() -> Iterator[None]:
    """Leave out the warnings of every attempt at a download: the last error says what is wrong."""
    _installed("huggingface_hub.utils.logging")  # sets a level when first imported
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _from_function(name: str) -> Loaded:
    module, _, attribute = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        function: Any = importlib.import_module(module)
        for part in attribute.split("."):
            function = getattr(function, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name} must name a function as module:function; {error}") from error
    finally:
        sys.path.pop(0)
    _require_no_arguments(function, name)
    made = function()
    model, batch = made if isinstance(made, tuple) else (made, None)
    is_model = isinstance(model, nn.Module)
    came = type(model).__name__
    require(is_model, f"{name} must return a module, or a module and a batch", came)
    return Loaded(model, batch, "" if batch is None else f"from {name}")


def _require_no_arguments(function: Any, name: str) -> None:
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ValueError(f"{name} must be called without arguments; {error}") from error
    except ValueError:
        return  # some of Python's own functions do not say what they take


def _from_training(folder: Path) -> Loaded:
    from levelhead.harness.engine.loading import load_trained

    trained = load_trained(folder)
    place = trained.checkpoint.name
    origin = f"training data of {trained.cell.task}; weights after step {trained.step} ({place})"
    return Loaded(trained.model, trained.inputs, origin, dict(trained.curves))


def _from_folder(folder: Path) -> Loaded:
    if any((folder / name).exists() for name in ("checkpoints", "manifest.json")):
        return _from_training(folder)
    if (folder / "cells.jsonl").exists():
        return _from_run(folder)
    if (folder / SPEC).exists():
        return Loaded(load(folder), None, "")
    must = "a folder must be a run, or hold a model of levelhead or transformers"
    wanted = f"cells.jsonl, {SPEC} or config.json"
    require((folder / "config.json").exists(), must, f"{folder} has none of them", wanted)
    return Loaded(_from_transformers(str(folder)), None, "")


def _from_library(name: str, random_weights: bool) -> Loaded:
    looks_like_path = name.startswith((".", "/", "~", "runs/")) or name.endswith(
        (".pt", ".bin", ".pth")
    )
    must = "MODEL must be a folder that exists, module:function, or a name of timm or transformers"
    require(not looks_like_path, must, f"{name}, which is no folder")
    timm = _installed("timm")
    if timm is not None and timm.is_model(name.removeprefix("timm/")):
        try:
            model = timm.create_model(name.removeprefix("timm/"), pretrained=not random_weights)
        except Exception as error:
            said = textwrap.shorten(str(error), 200, placeholder=" ...")
            raise ValueError(
                f"the trained weights of {name} could not be had ({said}); "
                "give a folder, or --random-weights for the model as built"
            ) from error
        return Loaded(model.eval(), None, "")
    return Loaded(_from_transformers(name), None, "")


def _installed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _from_transformers(name: str) -> nn.Module:
    transformers = _installed("transformers")
    require(transformers is not None, f"{name} needs transformers", "none installed",
            "pip install 'levelhead[transformers]'")  # fmt: skip
    transformers.logging.set_verbosity_error()
    try:
        config = transformers.AutoConfig.from_pretrained(name)
        model_class = getattr(transformers, (config.architectures or ["AutoModel"])[0])
        return model_class.from_pretrained(name).eval()
    except Exception as error:
        said = textwrap.shorten(str(error), 200, placeholder=" ...")
        raise ValueError(
            f"{name} could not be loaded ({type(error).__name__}: {said}); check the name, or "
            "give a folder with config.json and its weights"
        ) from error


def _from_run(folder: Path) -> Loaded:
    """Train the run's first cell anew: a run keeps curves and no weights."""
    settings = yaml.safe_load((folder / "config.yaml").read_text())["settings"]
    record = json.loads((folder / "cells.jsonl").read_text().splitlines()[0])
    cell = Cell.from_record(record)
    chosen = [task for task in settings["tasks"] if TaskSettings(**task).name == cell.task]
    require(len(chosen) > 0, f"{folder} must hold the settings of its cells", cell.task)
    task = make_task(TaskSettings(**chosen[0]))
    curve = record["curve"]
    with one_thread():
        model = trained(task, cell)
    batch = next(task.batches(named_seed(cell.seed, "probe")))[0]
    steps = zip(curve["step"], curve["train_loss_nats"], strict=True)
    origin = (
        f"training data of {cell.task}; the run keeps no weights, so its first cell "
        f"({cell.variant}, {cell.init}, seed {cell.seed}) was trained again as it was"
    )
    return Loaded(model.eval(), batch, origin, {"train_loss_nats": list(steps)})


def trained(task: Any, cell: Cell, on_step: Callable[[], None] = lambda: None) -> nn.Module:
    """Train one cell as a comparison does, and keep the model.

    Args:
        task: Data and model.
        cell: Variant, init and seed.
        on_step: Called after each step.

    Returns:
        The trained model.
    """
    model, settings = start_model(task, cell), task.settings
    optimizer = make_optimizer(model, settings)
    batches = task.batches(named_seed(cell.seed, "batches"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(named_seed(cell.seed, "dropout"))
        for step in range(settings.steps):
            factor = warmup_cosine(step, settings.steps, settings.warmup_frac)
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * factor
            training_step(task, model.train(), optimizer, next(batches))
            on_step()
    return model

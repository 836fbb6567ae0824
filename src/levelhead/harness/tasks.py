"""A task: data, the model that fits it, the loss, and the metric that is compared."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from itertools import islice
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from pydantic import TypeAdapter
from torch import Tensor, nn

from levelhead.harness.config import TaskSettings, Training
from levelhead.harness.data import ImageData, TextData, load
from levelhead.harness.models.gpt import GPT, GPTConfig
from levelhead.harness.models.vit import ViT, ViTConfig
from levelhead.harness.parameter_groups import decayed_apart
from levelhead.harness.seeding import paired_init_
from levelhead.shapes import require, require_known

Batch = tuple[Tensor, Tensor]

EVALUATION_BATCH = 256
EVALUATION_WINDOWS = 256  # windows of test text, evenly spaced: the same ones for every model
LARGE_IMAGE = 16  # pixels; from here on patches of 4 keep the sequence short


@dataclass(frozen=True)
class Metric:
    """The number that is compared.

    Attributes:
        name: Its key in records, unit included.
        label: Its heading in tables.
        unit: What a difference is counted in.
        higher_is_better: Which way is up.
        digits: Decimals worth printing.
    """

    name: str
    label: str
    unit: str
    higher_is_better: bool
    digits: int


class Task(Protocol):
    """What training and comparison need to know; a new kind of task implements this."""

    metric: ClassVar[Metric]

    @property
    def settings(self) -> Training:
        """Return how it is trained."""
        ...

    def build(self, variant: str) -> nn.Module:
        """Return the model with this attention variant."""
        ...

    def start(self, variant: str, seed: int) -> nn.Module:
        """Return the model with this attention variant, its weights drawn from the seed.

        What two variants share starts equal.
        """
        ...

    def batches(self, seed: int, start_step: int = 0) -> Iterator[Batch]:
        """Yield global training batches for ever, from that of step ``start_step`` on.

        What a batch holds depends on the seed and the number of its step and on nothing else:
        not on where the iteration began, not on other random numbers, not on worker processes.
        So a training resumes exactly, and each rank takes its slice of the same batch.
        """
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean training loss of a batch, in nats."""
        ...

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the metric and others on the test data, wherever the model is."""
        ...

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return the model's trained parameters as groups of an optimiser.

        Each has its own ``weight_decay``; one with ``lr_scale`` learns at that multiple of the
        learning rate.
        """
        ...


class ImageClassification:
    """A ViT on labelled images."""

    metric: ClassVar[Metric] = Metric("accuracy_pct", "accuracy %", "points", True, 2)

    def __init__(self, settings: TaskSettings, data: ImageData):
        self.settings = settings
        self.data = data

    def build(self, variant: str) -> ViT:
        return ViT(ViTConfig(**self.settings.model_options, variant=variant))

    def start(self, variant: str, seed: int) -> nn.Module:
        return paired_init_(self.build(variant), seed)

    def batches(self, seed: int, start_step: int = 0) -> Iterator[Batch]:
        for chosen in islice(self._chosen(seed), start_step, None):
            yield self.data.train_images[chosen], self.data.train_labels[chosen]

    def _chosen(self, seed: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        num_images, size = len(self.data.train_images), self.settings.batch_size
        while True:
            order = torch.randperm(num_images, generator=generator)
            yield from order.split(size)[: max(1, num_images // size)]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        model.eval()
        images = self.data.test_images.split(EVALUATION_BATCH)
        device = next(model.parameters()).device
        logits = torch.cat([model(part.to(device)).cpu() for part in images])
        loss = F.cross_entropy(logits, self.data.test_labels).item()
        correct = (logits.argmax(-1) == self.data.test_labels).double().mean().item()
        return {"accuracy_pct": 100 * correct, "loss_nats": loss}

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        return decayed_apart(model, self.settings.weight_decay)


class LanguageModelling:
    """A GPT on the bytes of a text."""

    metric: ClassVar[Metric] = Metric("bits_per_byte", "bits per byte", "bits per byte", False, 3)

    def __init__(self, settings: TaskSettings, data: TextData):
        self.settings = settings
        self.data = data
        self.length = settings.model_options["context_length"]
        for part, values in (("training", data.train_bytes), ("test", data.test_bytes)):
            require(
                len(values) > self.length,
                f"the {part} part of a text must be longer than context_length={self.length}",
                f"{len(values)} bytes in {data.name}",
            )

    def build(self, variant: str) -> GPT:
        return GPT(GPTConfig(**self.settings.model_options, variant=variant))

    def start(self, variant: str, seed: int) -> nn.Module:
        return paired_init_(self.build(variant), seed)

    def batches(self, seed: int, start_step: int = 0) -> Iterator[Batch]:
        for starts in islice(self._starts(seed), start_step, None):
            yield self._windows(self.data.train_bytes, starts)

    def _starts(self, seed: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        num_starts = len(self.data.train_bytes) - self.length
        while True:
            yield torch.randint(num_starts, (self.settings.batch_size,), generator=generator)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        tokens, following = batch
        return F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        model.eval()
        last = len(self.data.test_bytes) - self.length - 1
        starts = torch.linspace(0, last, min(EVALUATION_WINDOWS, last + 1)).long()
        device = next(model.parameters()).device
        losses = []
        for part in starts.split(EVALUATION_BATCH):
            tokens, following = self._windows(self.data.test_bytes, part)
            loss = self.loss(model, (tokens.to(device), following.to(device)))
            losses.append(len(part) * loss.item())
        loss = sum(losses) / len(starts)
        return {"bits_per_byte": loss / math.log(2), "loss_nats": loss}

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        return decayed_apart(model, self.settings.weight_decay)

    def _windows(self, values: Tensor, starts: Tensor) -> Batch:
        windows = values[starts[:, None] + torch.arange(self.length + 1)].long()
        return windows[:, :-1], windows[:, 1:]


def make_task(settings: TaskSettings) -> Task:
    """Load a task's data and check that it is the data the settings were made for.

    Args:
        settings: What to train.

    Returns:
        The task.

    Raises:
        ValueError: Other data than the fingerprint says.
    """
    data = load(settings.data)
    require(
        data.fingerprint == settings.fingerprint,
        f"{settings.data} must be the data these settings were made for",
        f"fingerprint {data.fingerprint}, not {settings.fingerprint}",
    )
    if isinstance(data, ImageData):
        return ImageClassification(settings, data)
    return LanguageModelling(settings, data)


def resolve_task(
    data_name: str,
    model_options: dict[str, dict[str, Any]] | None = None,
    **overrides: Any,
) -> TaskSettings:
    """Complete the settings of a task from its data.

    Args:
        data_name: As ``harness.data.load`` takes it.
        model_options: ``{"vit": {...}, "gpt": {...}}``, changes to the default models.
        overrides: Changes to the other settings (steps, batch_size, learning_rate, ...).

    Returns:
        Settings in which nothing is left to a default.

    Raises:
        ValueError: Unreadable data, or an option that the model does not know.
    """
    data = load(data_name)
    model = "gpt" if isinstance(data, TextData) else "vit"
    chosen = (model_options or {}).get(model, {})
    options = asdict(_model_config(data, chosen))
    del options["variant"]
    defaults = {"vit": _VIT_TRAINING, "gpt": _GPT_TRAINING}[model]
    return TaskSettings(
        data=data_name,
        fingerprint=data.fingerprint,
        model=model,
        model_options=options,
        **{**defaults, **overrides},
    )


MODELS = ("vit", "gpt")
DEFAULT_DATA = {"vit": "digits", "gpt": "topics"}

# Chosen so that the default comparison (36 trainings) fits three minutes of two cores.
_VIT_TRAINING = {
    "steps": 400, "batch_size": 64, "learning_rate": 1e-2, "weight_decay": 0.05, "clip_norm": 5.0,
}  # fmt: skip
_GPT_TRAINING = {
    "steps": 250, "batch_size": 16, "learning_rate": 5e-3, "weight_decay": 0.1, "clip_norm": 1.0,
}  # fmt: skip


def _model_config(data: ImageData | TextData, chosen: dict[str, Any]) -> ViTConfig | GPTConfig:
    if isinstance(data, TextData):
        decided, suggested, config_type = {"vocab_size": 256}, {}, GPTConfig
    else:
        channels, height, width = data.train_images.shape[1:]
        require(height == width, "images must be square", f"{height} x {width} in {data.name}")
        decided = {"image_size": height, "num_channels": channels, "num_classes": data.num_classes}
        suggested, config_type = {"patch_size": 4 if height >= LARGE_IMAGE else 2}, ViTConfig
    taken = [name for name in (*decided, "variant") if name in chosen]
    require(not taken, "these options of a model are decided elsewhere", ", ".join(taken))
    free = [f.name for f in fields(config_type) if f.name not in (*decided, "variant")]
    for name in chosen:
        require_known("option of the model", name, free)
    return TypeAdapter(config_type).validate_python({**decided, **suggested, **chosen})

"""What is trained: the settings of a task and of a comparison, strict and complete.

Everything that can change a number is in here, so that a run's ``config.yaml`` is enough to make
it again. An unknown key is an error.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from levelhead.variants import parse_variant

BASELINE = "softmax"
DEFAULT_VARIANTS = ("softmax", "quest", "affine", "gate", "spectral", "precondition")
RUNS_FOLDER = Path("runs")
FIRST_SELECTION_SEED = 1_000_000  # beyond every reported seed

Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def task_name(data: str) -> str:
    """Return how tables and records call the task on some data.

    Args:
        data: Name or path.

    Returns:
        The name, or the last part of the path.
    """
    return Path(data).name or data


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


Schedule = Literal["cosine", "warmup_stable_decay", "constant"]
Precision = Literal["no", "bf16", "fp16"]


class TrainingSettings(_Strict):
    """How a model is trained: all that an engine reads of a recipe's task."""

    name: str
    """How tables and records call the task."""
    model: str
    """What is trained, in a word."""
    data: str
    """On what, in a word."""
    steps: Count
    """Optimiser steps."""
    batch_size: Count
    """Samples of one optimiser step, over all devices and accumulation together."""
    micro_batch_size: Count | None = None
    """Most samples that one device takes at a time; None: all of its share."""
    learning_rate: Positive
    """Peak, reached after the warm-up."""
    min_learning_rate: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Where the schedule ends."""
    schedule: Schedule = "cosine"
    """How the learning rate falls after the warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps in which it rises in a line."""
    decay_steps: Annotated[int, Field(ge=0)] = 0
    """Last steps, in which ``warmup_stable_decay`` falls."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """AdamW's, on what the task's ``parameter_groups`` say."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """AdamW's."""
    eps: Positive = 1e-8
    """AdamW's."""
    clip_norm: Positive | None = None
    """Largest gradient norm; None: not clipped."""
    ema_decay: Fraction | None = None
    """Of the moving average of the weights that is evaluated; None: none is kept."""
    mixed_precision: Precision = "no"
    """What forward and backward compute in."""
    evaluate_every: Count | None = None
    """Steps between evaluations; None: the engine's habit."""
    recipe: dict[str, Any] = {}
    """The resolved recipe, enough to make the task again."""


class TaskSettings(_Strict):
    """One model on one set of data; the attention variant, the init and the seed are left open."""

    data: str
    """Name or path, as ``harness.data.load`` takes it."""
    fingerprint: str
    """Hash of the data's bytes."""
    model: str
    """``"vit"`` or ``"gpt"``."""
    model_options: dict[str, Any]
    """Every field of the model's config but ``variant``."""
    steps: Count
    """Optimiser steps of one training."""
    batch_size: Count
    """Images or windows of text in a step."""
    learning_rate: Positive
    """Peak, reached after the warm-up; falls to zero along a cosine."""
    weight_decay: Annotated[float, Field(ge=0)]
    """AdamW's, on matrices only."""
    warmup_frac: Fraction = 0.1
    """Share of the steps in which the learning rate rises."""
    clip_norm: Positive = 1.0
    """Largest gradient norm."""

    # The same for every such task. Not fields: the configs of older runs do not hold them.
    micro_batch_size: ClassVar[None] = None
    min_learning_rate: ClassVar[float] = 0.0
    schedule: ClassVar[Schedule] = "cosine"
    decay_steps: ClassVar[int] = 0
    betas: ClassVar[tuple[float, float]] = (0.9, 0.95)
    """GPT-3's; the short trainings here want the shorter memory."""
    eps: ClassVar[float] = 1e-8
    ema_decay: ClassVar[None] = None
    mixed_precision: ClassVar[Precision] = "no"
    evaluate_every: ClassVar[None] = None

    @property
    def name(self) -> str:
        """How tables and records call the task."""
        return task_name(self.data)

    @property
    def warmup_steps(self) -> int:
        """Optimiser steps in which the learning rate rises."""
        return round(self.warmup_frac * self.steps)


Training = TaskSettings | TrainingSettings
"""Either has every field that an engine reads."""


class CompareSettings(_Strict):
    """A grid: every task with every variant, init and seed, each at its own learning rate."""

    tasks: Annotated[tuple[Training, ...], Field(min_length=1)]
    """What is trained."""
    variants: tuple[str, ...] = DEFAULT_VARIANTS
    """Variant strings in their canonical form; the baseline comes first."""
    inits: Annotated[tuple[str, ...], Field(min_length=1)] = ("default",)
    """Initialisers; the first one is the baseline's."""
    seeds: Annotated[int, Field(ge=1, le=FIRST_SELECTION_SEED)] = 3
    """Number of seeds, 0 to ``seeds - 1``; each stands for one start and one order of the data."""
    learning_rates: tuple[Positive, ...] = ()
    """Tried by every task, variant and init, rising; none: each task's own rate for all."""
    selection_seeds: Count = 2
    """Number of further seeds that choose among several learning rates."""

    @model_validator(mode="before")
    @classmethod
    def _in_one_form(cls, values: Any) -> Any:
        if isinstance(values, dict) and "variants" in values:
            names = [str(parse_variant(text)) for text in values["variants"]]
            values = values | {"variants": tuple(dict.fromkeys([BASELINE, *names]))}
        if isinstance(values, dict) and "learning_rates" in values:
            values = values | {"learning_rates": tuple(sorted(set(values["learning_rates"])))}
        return values

    @model_validator(mode="after")
    def _names_differ(self) -> "CompareSettings":
        names = [task.name for task in self.tasks]
        if len(set(names)) < len(names):
            raise ValueError(f"each task needs a name of its own, got {', '.join(names)}")
        return self

    def default_folder(self) -> Path:
        """Return ``runs/<tasks>-<hash>``: the same tasks meet their finished cells again.

        Variants, inits, seeds and learning rates are left out of the hash, so that a grid can
        grow.

        Returns:
            A path relative to the working directory.
        """
        tasks = json.dumps([task.model_dump() for task in self.tasks], sort_keys=True)
        digest = hashlib.sha256(tasks.encode()).hexdigest()[:8]
        return RUNS_FOLDER / f"{'-'.join(task.name for task in self.tasks)}-{digest}"


class Cell(_Strict):
    """One training of the grid."""

    task: str
    variant: str
    init: str
    seed: int
    learning_rate: float | None = None
    """None: the task's own."""
    part: Literal["test", "validation"] = "test"
    """What it is measured on; with ``"validation"`` that part is kept from its training."""

    @property
    def key(self) -> str:
        """One line that names the cell."""
        parts = [self.task, self.variant, self.init, f"seed {self.seed}"]
        parts += [] if self.learning_rate is None else [f"learning rate {self.learning_rate!r}"]
        parts += [] if self.part == "test" else [self.part]
        return " | ".join(parts)

    @property
    def slug(self) -> str:
        """A folder name that no other cell has."""
        digest = hashlib.sha256(self.key.encode()).hexdigest()[:12]
        return f"{self.part}-seed-{self.seed}-{digest}"

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Cell":
        """Read back which cell a record is of.

        Args:
            record: A line of ``cells.jsonl``; an old one may lack the newer fields.

        Returns:
            The cell.
        """
        return cls(**{name: record[name] for name in cls.model_fields if name in record})


Row = tuple[str, str, str]
"""Task, variant and init: what has one learning rate and one line of a table."""


def rows(settings: CompareSettings) -> list[Row]:
    """List what is compared, in the order of the tables.

    Args:
        settings: The grid.

    Returns:
        The names of task, variant and init.
    """
    return [
        (task.name, variant, init)
        for task in settings.tasks
        for init in settings.inits
        for variant in settings.variants
    ]


def cells(
    settings: CompareSettings, learning_rates: Mapping[Row, float | None] | None = None
) -> list[Cell]:
    """List the trainings whose results are reported.

    All of one seed come before the next: an interrupted run holds whole pairs.

    Args:
        settings: The grid.
        learning_rates: Of the rows that do not use their task's own.

    Returns:
        Its cells in the order of training.
    """
    rates = learning_rates or {}
    return [
        Cell(task=row[0], variant=row[1], init=row[2], seed=seed, learning_rate=rates.get(row))
        for seed in range(settings.seeds)
        for row in rows(settings)
    ]


def selection_cells(settings: CompareSettings) -> list[Cell]:
    """List the trainings that choose a learning rate: other seeds, and a validation part.

    Args:
        settings: The grid.

    Returns:
        Every row at every rate, the same number for each; none where there is nothing to choose.
    """
    if len(settings.learning_rates) < 2:
        return []
    return [
        Cell(
            task=task, variant=variant, init=init, seed=FIRST_SELECTION_SEED + number,
            learning_rate=cell_rate(settings, task, rate), part="validation",
        )
        for number in range(settings.selection_seeds)
        for task, variant, init in rows(settings)
        for rate in settings.learning_rates
    ]  # fmt: skip


def cell_rate(settings: CompareSettings, task: str, rate: float) -> float | None:
    """Write a learning rate as cells do: None where it is the task's own.

    Args:
        settings: The grid.
        task: Name of one of its tasks.
        rate: The learning rate.

    Returns:
        The rate, or None.
    """
    (own,) = (known.learning_rate for known in settings.tasks if known.name == task)
    return None if rate == own else rate


def default_workers(num_cells: int | None = None) -> int:
    """Return how many one-thread processes train side by side.

    Args:
        num_cells: Trainings to do; None: any number.

    Returns:
        The number of cores this process may use, at most one for each training, at least 1.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, cores if num_cells is None else min(cores, num_cells))

"""Each row at its own learning rate, chosen on data and seeds that are not reported.

A rate chosen by the reported runs on the test data flatters whoever had the most rates to choose
from: the best of several noisy numbers is too good. So the choosing is done by seeds of its own,
which train without a part of the training data and are measured on that part. The reported runs
then train on all of it at the chosen rate. Every row has the same rates and seeds to choose by.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

import torch

from levelhead.harness.config import (
    Cell,
    CompareSettings,
    Row,
    cell_rate,
    rows,
    selection_cells,
)
from levelhead.harness.data import ImageData, TextData
from levelhead.harness.seeding import named_seed
from levelhead.harness.tasks import Metric, Task
from levelhead.shapes import require

VALIDATION_FRAC = 0.2  # of the training data
SPLIT_SEED = named_seed(0, "validation")  # the same part for every run

Records = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One learning rate of one row.

    Attributes:
        learning_rate: The rate.
        mean: Of the metric on the validation part, over the ``n`` seeds that finished.
        n: How many did.
        num_diverged: How many diverged.
        num_missing: How many were not finished because their process died.
    """

    learning_rate: float
    mean: float | None
    n: int
    num_diverged: int
    num_missing: int


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The learning rate of one row, and what it was chosen from.

    Attributes:
        learning_rate: The chosen one.
        tried: All rates, rising.
        at_edge: ``"lowest"`` or ``"highest"`` where the chosen rate is the first or the last of
            the grid: a better one may lie outside.
        tied_with: Other rates that were exactly as good; the lowest of them is taken.
    """

    learning_rate: float
    tried: tuple[Tried, ...]
    at_edge: str | None
    tied_with: tuple[float, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self) | {
            "tried": [asdict(tried) for tried in self.tried],
            "tied_with": list(self.tied_with),
        }


def choose(tried: Sequence[Tried], metric: Metric) -> Choice:
    """Choose among learning rates: fewest divergences first, then the best mean.

    Args:
        tried: The rates, at least one.
        metric: Says which way is up.

    Returns:
        The choice; the lowest rate where no run of any finished.
    """
    tried = sorted(tried, key=lambda one: one.learning_rate)
    up = 1 if metric.higher_is_better else -1

    def merit(one: Tried) -> tuple[bool, float, float]:
        finished = one.mean is not None
        share = one.num_diverged / max(1, one.n + one.num_diverged)
        return finished, -share, up * one.mean if one.mean is not None else 0.0

    best = max(map(merit, tried))
    equals = [one.learning_rate for one in tried if merit(one) == best]
    at_edge = {tried[0].learning_rate: "lowest", tried[-1].learning_rate: "highest"}
    return Choice(
        learning_rate=equals[0],
        tried=tuple(tried),
        at_edge=at_edge.get(equals[0]),
        tied_with=tuple(equals[1:]),
    )


def choices(
    settings: CompareSettings, metrics: Mapping[str, Metric], records: Records
) -> dict[Row, Choice]:
    """Choose the learning rate of every row.

    Args:
        settings: The grid.
        metrics: Of each task.
        records: Cell key to record; those of cells whose processes died are missing.

    Returns:
        Row to choice; empty where there is nothing to choose.
    """
    wanted: dict[Row, dict[float | None, list[Cell]]] = {}
    for cell in selection_cells(settings):
        by_rate = wanted.setdefault((cell.task, cell.variant, cell.init), {})
        by_rate.setdefault(cell.learning_rate, []).append(cell)
    return {
        row: choose(
            [
                _tried(rate, by_rate[cell_rate(settings, row[0], rate)], metrics[row[0]], records)
                for rate in settings.learning_rates
            ],
            metrics[row[0]],
        )
        for row, by_rate in wanted.items()
    }


def _tried(rate: float, wanted: Sequence[Cell], metric: Metric, records: Records) -> Tried:
    found = [records[cell.key] for cell in wanted if cell.key in records]
    values = [record["final"][metric.name] for record in found if record["final"]]
    return Tried(
        learning_rate=rate,
        mean=fmean(values) if values else None,
        n=len(values),
        num_diverged=len(found) - len(values),
        num_missing=len(wanted) - len(found),
    )


def chosen_rates(
    settings: CompareSettings, chosen: Mapping[Row, Choice]
) -> dict[Row, float | None]:
    """Say at which learning rate each row is reported.

    Args:
        settings: The grid.
        chosen: What ``choices`` returned.

    Returns:
        Row to rate, as cells write it: None for the task's own.
    """
    if len(settings.learning_rates) == 1:
        (rate,) = settings.learning_rates
        return {row: cell_rate(settings, row[0], rate) for row in rows(settings)}
    return {
        row: cell_rate(settings, row[0], choice.learning_rate) for row, choice in chosen.items()
    }


def can_hold_out(task: Task) -> bool:
    """Say whether a part of a task's training data can be kept to choose by.

    Args:
        task: Any.

    Returns:
        False for a text that streams, for the retrieval task, and for tasks of other kinds.
    """
    return any(is_such(task) for is_such, _ in SPLITS)


def held_out(task: Task) -> Task:
    """Return a task that trains on four fifths of the training data and is measured on the rest.

    Args:
        task: Any task on images or on a text that is known whole.

    Returns:
        The same task without the test data.

    Raises:
        ValueError: Data of another kind, or too few to split.
    """
    for is_such, split in SPLITS:
        if is_such(task):
            return split(task)
    raise ValueError(
        "choosing among learning rates needs a task whose training data can be split, got "
        f"{task.settings.name}; valid: a single learning rate"
    )


def _with_data(task: Any, data: ImageData | TextData) -> Task:
    return type(task)(task.settings, data)


def _cached(task: Any, **parts: Any) -> Task:
    """Copy a task whose data are cached properties, with others in their place."""
    changed = copy.copy(task)
    changed.__dict__.pop("broken", None)  # it counts what is broken in the other part
    changed.__dict__.update(parts)
    return changed


class _PartOfSource:
    """Some images of a recipe's source."""

    def __init__(self, source: Any, indices: list[int]):
        self.source, self.indices = source, indices
        self.name, self.in_memory = source.name, source.in_memory
        self.losses, self.num_lost = source.losses, source.num_lost

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> Any:
        return self.source.read(self.indices[index])

    def where(self, index: int) -> str:
        return self.source.where(self.indices[index])


def _split_source(task: Any) -> Task:
    kept, validation = _apart(len(task.source), task.settings.name)
    return _cached(
        task,
        source=_PartOfSource(task.source, kept.tolist()),
        test_source=_PartOfSource(task.source, validation.tolist()),
        num_classes=task.num_classes,
    )


def _split_windows(task: Any) -> Task:
    tokens, length = task.train_windows.tokens, task.train_windows.length
    border = round((1 - VALIDATION_FRAC) * len(tokens))
    cut = type(task.train_windows)
    return _cached(
        task,
        train_windows=cut(tokens[:border], length),
        test_windows=cut(tokens[border:], length),
    )


def _split_images(data: ImageData) -> ImageData:
    kept, validation = _apart(len(data.train_images), data.name)
    return replace(
        data,
        train_images=data.train_images[kept],
        train_labels=data.train_labels[kept],
        test_images=data.train_images[validation],
        test_labels=data.train_labels[validation],
    )


def _apart(num_images: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices to train on, and indices to choose by."""
    num_kept = num_images - round(VALIDATION_FRAC * num_images)
    require(
        0 < num_kept < num_images,
        "a validation part needs at least 3 training images",
        f"{num_images} in {name}",
    )
    order = torch.randperm(num_images, generator=torch.Generator().manual_seed(SPLIT_SEED))
    return order[:num_kept], order[num_kept:]


def _split_text(data: TextData) -> TextData:
    border = round((1 - VALIDATION_FRAC) * len(data.train_bytes))
    return replace(
        data, train_bytes=data.train_bytes[:border], test_bytes=data.train_bytes[border:]
    )


SPLITS: tuple[tuple[Callable[[Any], bool], Callable[[Any], Task]], ...] = (
    (
        lambda task: isinstance(getattr(task, "data", None), ImageData),
        lambda task: _with_data(task, _split_images(task.data)),
    ),
    (
        lambda task: isinstance(getattr(task, "data", None), TextData),
        lambda task: _with_data(task, _split_text(task.data)),
    ),
    (lambda task: hasattr(type(task), "test_source"), _split_source),
    (lambda task: hasattr(type(task), "test_windows") and not task._is_stream, _split_windows),
)
"""Which tasks can be split, and how."""

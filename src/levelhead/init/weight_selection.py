"""Weight selection: a small model starts from evenly spaced entries of a larger trained one."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from levelhead.shapes import require, require_known

HEAD_NAMES = ("head", "head_dist", "heads", "classifier", "fc", "lm_head", "score")
"""First parts of the names under which timm, torchvision and transformers keep the classifier."""


def selected_indices(teacher_size: int, student_size: int) -> Int[Tensor, " student_size"]:
    """Say which entries of one dimension of the teacher the student takes.

        arange(s) * (t / s)                   where s divides t
        round(linspace(0, t - 1, s))          elsewhere

    Args:
        teacher_size: t.
        student_size: s, at most t.

    Returns:
        Increasing indices in [0, t).

    Source: Xu et al., Initializing Models with Larger Ones, ICLR 2024, arXiv 2311.18823.
    """
    require(
        0 < student_size <= teacher_size,
        "every dimension of the student must be at most the teacher's",
        f"student {student_size}, teacher {teacher_size}",
    )
    if teacher_size % student_size == 0:
        return torch.arange(student_size) * (teacher_size // student_size)
    # float32 as published: at an exact half the width of the type decides the rounding.
    spaced = torch.linspace(0, teacher_size - 1, student_size, dtype=torch.float32)
    return spaced.round().long()


@torch.no_grad()
def select_weight(teacher: Tensor, student_shape: tuple[int, ...]) -> Tensor:
    """Take evenly spaced entries along every dimension of a tensor.

    On a fused qkv tensor the rule keeps the three parts apart: the rows of the student's query
    come from the teacher's query, and so on, also where the widths do not divide.

    Args:
        teacher: The larger tensor.
        student_shape: The shape wanted, as many dimensions.

    Returns:
        The selected entries, a copy in the teacher's dtype.

    Source: as `selected_indices`.
    """
    _require_as_many_dimensions(teacher, student_shape)
    selected = teacher.detach()
    for dim, size in enumerate(student_shape):
        indices = selected_indices(teacher.shape[dim], size).to(teacher.device)
        selected = selected.index_select(dim, indices)
    return selected if student_shape else selected.clone()


def first_layers(teacher_layers: int, student_layers: int) -> list[int]:
    """Take the first layers of the teacher: layer i from layer i (the paper's choice).

    Args:
        teacher_layers: How many layers the teacher has.
        student_layers: How many the student has.

    Returns:
        One position in the teacher per layer of the student.
    """
    return list(range(min(student_layers, teacher_layers)))


def uniform_layers(teacher_layers: int, student_layers: int) -> list[int]:
    """Take evenly spaced layers of the teacher, first and last included where none divides.

    Args:
        teacher_layers: How many layers the teacher has.
        student_layers: How many the student has.

    Returns:
        One position in the teacher per layer of the student.
    """
    if student_layers > teacher_layers:
        return list(range(teacher_layers))
    return selected_indices(teacher_layers, student_layers).tolist()


LAYER_RULES: dict[str, Callable[[int, int], list[int]]] = {
    "first": first_layers,
    "uniform": uniform_layers,
}


def is_head(name: str) -> bool:
    """Whether a tensor belongs to the classifier head, which is left as the student made it.

    Args:
        name: Its dotted name.

    Returns:
        True where the first part of the name is one of `HEAD_NAMES`.
    """
    return name.split(".")[0] in HEAD_NAMES


def teacher_names(
    student_names: Iterable[str], teacher_names_: Iterable[str], layers: str = "first"
) -> dict[str, str]:
    """Say from which tensor of the teacher each tensor of the student comes.

    Every number in a dotted name counts layers: within one prefix the student's i-th number is
    paired with the teacher's by the rule, so that stages with blocks inside pair stage by stage.

    Args:
        student_names: Dotted names of the student's tensors.
        teacher_names_: Dotted names of the teacher's.
        layers: "first" or "uniform".

    Returns:
        Student name to teacher name; names that would leave the teacher's layers map to
        themselves.
    """
    require_known("layers", layers, LAYER_RULES)
    student_counts = _numbers_under_prefixes(student_names)
    teacher_counts = _numbers_under_prefixes(teacher_names_)
    return {
        name: _teacher_name(name, student_counts, teacher_counts, LAYER_RULES[layers])
        for name in student_names
    }


@dataclass(frozen=True)
class Selection(Mapping[str, Tensor]):
    """Student name to selected tensor; each is selected when it is looked up, none is held.

    Attributes:
        student: The student's state dict; gives the shapes.
        teacher: The teacher's state dict.
        names: From which tensor of the teacher each selected tensor of the student comes.
    """

    student: Mapping[str, Tensor]
    teacher: Mapping[str, Tensor]
    names: Mapping[str, str]

    def __getitem__(self, name: str) -> Tensor:
        return select_weight(self.teacher[self.names[name]], tuple(self.student[name].shape))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def weight_selection(
    student: Mapping[str, Tensor], *, teacher: Mapping[str, Tensor], layers: str = "first"
) -> Selection:
    """Check that a student can be selected from a larger teacher of the same family.

    Args:
        student: The student's state dict; gives names and shapes, not changed.
        teacher: The teacher's state dict.
        layers: "first" (layer i from layer i) or "uniform".

    Returns:
        The selection of every floating-point tensor but those of the classifier head.

    Source: as `selected_indices`.
    """
    wanted = [n for n, t in student.items() if t.is_floating_point() and not is_head(n)]
    names = teacher_names(wanted, teacher, layers)
    missing = [f"{name} (from {names[name]})" for name in wanted if names[name] not in teacher]
    require(
        not missing,
        "every tensor of the student but the classifier head must have one in the teacher",
        f"{len(missing)} without, first {missing[:3]}",
        "a teacher of the same family that is at least as deep",
    )
    require(bool(wanted), "the student must have tensors to select", "none but a classifier head")
    for name in wanted:
        _require_selectable(name, student[name], teacher[names[name]])
    return Selection(student, teacher, names)


def select_weights(
    student: Mapping[str, Tensor], *, teacher: Mapping[str, Tensor], layers: str = "first"
) -> dict[str, Tensor]:
    """Select every floating-point tensor of a student from a larger teacher of the same family.

    Args:
        student: The student's state dict; gives names and shapes, not changed.
        teacher: The teacher's state dict.
        layers: "first" (layer i from layer i) or "uniform".

    Returns:
        The new tensors by student name, in the teacher's dtype. The classifier head and integer
        buffers are left out.

    Source: as `selected_indices`.
    """
    return dict(weight_selection(student, teacher=teacher, layers=layers))


def _require_as_many_dimensions(teacher: Tensor, student_shape: tuple[int, ...]) -> None:
    require(
        teacher.ndim == len(student_shape),
        "student and teacher tensors must have as many dimensions",
        f"student {list(student_shape)}, teacher {list(teacher.shape)}",
    )


def _require_selectable(name: str, student: Tensor, teacher: Tensor) -> None:
    try:
        _require_as_many_dimensions(teacher, tuple(student.shape))
        for teacher_size, student_size in zip(teacher.shape, student.shape, strict=True):
            selected_indices(teacher_size, student_size)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _numbers_under_prefixes(names: Iterable[str]) -> dict[str, list[int]]:
    """Collect, for every prefix that is followed by a number, the numbers in order."""
    found: dict[str, set[int]] = {}
    for name in names:
        parts = name.split(".")
        for place, part in enumerate(parts):
            if part.isdigit():
                found.setdefault(".".join(parts[:place]), set()).add(int(part))
    return {prefix: sorted(numbers) for prefix, numbers in found.items()}


def _teacher_name(
    name: str,
    student_counts: dict[str, list[int]],
    teacher_counts: dict[str, list[int]],
    rule: Callable[[int, int], list[int]],
) -> str:
    """Translate one name part by part, number by number."""
    parts: list[str] = []
    student_parts = name.split(".")
    for place, part in enumerate(student_parts):
        mine = student_counts.get(".".join(student_parts[:place]), [])
        theirs = teacher_counts.get(".".join(parts), [])
        if part.isdigit() and mine != theirs:
            chosen = rule(len(theirs), len(mine))
            position = mine.index(int(part))
            part = str(theirs[chosen[position]]) if position < len(chosen) else part
        parts.append(part)
    return ".".join(parts)

"""The layers of a page: what to call them where room is short, and which belong together.

An encoder's layers, a decoder's and its cross attentions have names that differ in more than
their numbers. A map or a line that mixes them reads as a zigzag, so each kind stands by itself.
"""

from collections.abc import Sequence
from typing import Any

ANY_NUMBER = "*"
MOST_KINDS = 6
"""With more kinds of layers than this, headings would take more room than they save."""


def lay_out_layers(names: Sequence[str], positions: Sequence[int]) -> dict[str, Any]:
    """Say how the layers are called and in which order they stand.

    Args:
        names: Of the modules, in the model's order, all different.
        positions: What the records call ``layer_idx``, one for each name.

    Returns:
        ``layers`` in the model's order, each with its full name, a short one that tells it from
        all others, and a label that does so within its kind; ``kinds``, headings with the
        places of their layers, in the order in which a page shows them. One kind without a
        heading where the names do not fall into a few kinds.
    """
    kinds = _kinds(names)
    labels = list(short_names(names))
    for heading, members in kinds.items():
        for place, label in zip(members, short_names([names[m] for m in members]), strict=True):
            labels[place] = label if heading else labels[place]
    layers = [
        {"name": name, "short": short, "label": label, "idx": position}
        for name, short, label, position in zip(
            names, short_names(names), labels, positions, strict=True
        )
    ]
    laid_out = [{"title": heading, "layers": members} for heading, members in kinds.items()]
    return {"layers": layers, "kinds": laid_out}


def short_names(names: Sequence[str]) -> list[str]:
    """Leave out what all names share, so that an axis has room for the rest.

    Args:
        names: Dotted module names, all different.

    Returns:
        For example ``["0", "1"]`` for ``["blocks.0.attn", "blocks.1.attn"]``.
    """
    parts = [name.split(".") for name in names]
    if len(names) < 2 or len({len(part) for part in parts}) > 1:
        return list(names)
    differing = [place for place in range(len(parts[0])) if len({p[place] for p in parts}) > 1]
    return [".".join(part[place] for place in differing) for part in parts]


def _kinds(names: Sequence[str]) -> dict[str, list[int]]:
    """Heading to the places of its layers; the empty heading where there is but one kind."""
    by_pattern: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        parts = (ANY_NUMBER if part.isdigit() else part for part in name.split("."))
        by_pattern.setdefault(".".join(parts), []).append(place)
    count = len(by_pattern)
    if not 2 <= count <= MOST_KINDS or min(map(len, by_pattern.values())) < 2:
        return {"": list(range(len(names)))}
    headings = [_heading(pattern) for pattern in short_names(list(by_pattern))]
    return dict(zip(headings, by_pattern.values(), strict=True))


def _heading(pattern: str) -> str:
    return " ".join(part for part in pattern.split(".") if part != ANY_NUMBER) or pattern

"""What came of a conversion, as a table."""

from collections import Counter
from dataclasses import dataclass

LEAST_MOVE = 1e-5
"""Outputs that moved less than this, relative to their norm, moved by rounding alone."""


@dataclass(frozen=True)
class LayerChange:
    """One converted attention.

    Attributes:
        name: Dotted path of the host's attention.
        host: Class of the host's attention.
        before: Its attention before, in this library's terms.
        after: Its attention now.
        num_params: Parameters added.
        moved: ``||after - before|| / ||before||`` of the attention's output on a probe (random
            hidden states through the layer's own projections, no positions).
        note: What else was done, for example a projection that was doubled.
        kernel: What computes it, in evaluation and while training (without a mask).
    """

    name: str
    host: str
    before: str
    after: str
    num_params: int
    moved: float
    note: str = ""
    kernel: str = ""

    @property
    def function(self) -> str:
        """Say whether the layer computes what it did."""
        if self.moved < LEAST_MOVE:
            return "preserved"
        percent = 100 * self.moved
        return f"moved by {percent:.0f} %" if percent >= 10 else f"moved by {percent:.2g} %"


@dataclass(frozen=True)
class Conversion:
    """What ``convert`` did.

    Attributes:
        variant: What was asked for.
        start: "preserve" or "paper".
        layers: One row for each converted attention.
        left: Attentions left as they were: name and reason.
        notes: What concerns the whole model.
    """

    variant: str
    start: str
    layers: tuple[LayerChange, ...]
    left: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def num_params(self) -> int:
        """Parameters added in all layers."""
        return sum(layer.num_params for layer in self.layers)

    def __str__(self) -> str:
        title = (
            f"{self.variant}: {len(self.layers)} attentions converted, "
            f"{self.num_params} parameters added, start={self.start!r}"
        )
        header = ("layer", "before", "after", "parameters", "function")
        rows = [
            (layer.name, layer.before, layer.after, f"+{layer.num_params}", layer.function)
            for layer in self.layers
        ]
        notes = Counter(layer.note for layer in self.layers if layer.note)
        notes += Counter(f"kernel: {layer.kernel}" for layer in self.layers if layer.kernel)
        lines = [title, "", *_columns([header, *rows])]
        lines += [f"{count} x {note}" for note, count in notes.items()]
        lines += [f"left as it was: {name}: {why}" for name, why in self.left]
        return "\n".join([*lines, *self.notes])


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]

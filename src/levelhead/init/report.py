"""What an initialisation did: one row per matrix, before and after."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from levelhead.init.promises import AttentionFacts, HeadFacts, ProductFacts


@dataclass(frozen=True)
class MatrixRow:
    """One projection of one attention.

    Attributes:
        site: Dotted path of the attention in the model.
        matrix: "q", "k", "v" or "o".
        status: "initialised", "kept", or "tied to <site>" where the same weights were done there.
        dtype: The dtype it is stored in.
        host: Facts of the matrix as it came.
        computed: Facts of the fresh matrix before the cast; None where there is none.
        stored: Facts of the matrix read back from the model, after the cast.
    """

    site: str
    matrix: str
    status: str
    dtype: str
    host: HeadFacts
    computed: HeadFacts | None
    stored: HeadFacts


@dataclass(frozen=True)
class ProductRow:
    """One product of projections of one attention.

    Attributes:
        site: Dotted path of the attention in the model.
        product: "q k^T" (per head) or "v o" (over the layer).
        host: Facts of the product as it came.
        computed: Facts before the cast.
        stored: Facts after the cast.
    """

    site: str
    product: str
    host: ProductFacts
    computed: ProductFacts
    stored: ProductFacts


def matrix_rows(
    site: str,
    dtypes: Mapping[str, str],
    host: AttentionFacts,
    computed: AttentionFacts,
    stored: AttentionFacts,
) -> list[MatrixRow]:
    """Bring the facts of one attention into rows.

    Args:
        site: Dotted path of the attention in the model.
        dtypes: Dtype of each matrix the host has.
        host: Facts before.
        computed: Facts of the fresh matrices; a matrix that is not there was kept.
        stored: Facts of what the model holds afterwards.

    Returns:
        One row per matrix of the host.
    """
    fresh = computed.matrices
    return [
        MatrixRow(
            site,
            name,
            "initialised" if name in fresh else "kept",
            dtype,
            host.matrices[name],
            fresh.get(name),
            stored.matrices[name],
        )
        for name, dtype in dtypes.items()
    ]


def product_rows(
    site: str, host: AttentionFacts, computed: AttentionFacts, stored: AttentionFacts
) -> list[ProductRow]:
    """Bring the facts of one attention's products into rows.

    Args:
        site: Dotted path of the attention in the model.
        host: Facts before.
        computed: Facts of the fresh matrices.
        stored: Facts of what the model holds afterwards.

    Returns:
        One row per product of fresh matrices.
    """
    return [
        ProductRow(site, name, host.products[name], facts, stored.products[name])
        for name, facts in computed.products.items()
    ]


@dataclass(frozen=True)
class EffectRow:
    """What one batch shows of one attention.

    Attributes:
        site: Dotted path of the attention in the model.
        quantity: What was measured; its unit is in the name.
        before: Before the initialisation.
        after: After it.
    """

    site: str
    quantity: str
    before: float
    after: float


def effect_rows(
    before: Mapping[str, Mapping[str, float]], after: Mapping[str, Mapping[str, float]]
) -> list[EffectRow]:
    """Pair what a batch showed before and after.

    Args:
        before: Quantities by name, by site.
        after: The same, measured on the same batch.

    Returns:
        One row per attention and quantity.
    """
    return [
        EffectRow(site, quantity, value, after[site][quantity])
        for site, quantities in before.items()
        for quantity, value in quantities.items()
    ]


@dataclass(frozen=True)
class InitReport:
    """The record of one initialisation; ``print`` shows it as tables.

    Attributes:
        initializer: What was asked for.
        matrices: One row per matrix.
        products: One row per product the method makes a promise on.
        effects: One row per attention and quantity, where a batch was given.
        notes: What the tables do not say.
    """

    initializer: str
    matrices: tuple[MatrixRow, ...]
    products: tuple[ProductRow, ...] = ()
    effects: tuple[EffectRow, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def initialised(self) -> tuple[MatrixRow, ...]:
        """The rows of the matrices that were changed."""
        return tuple(row for row in self.matrices if row.status == "initialised")

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data.

        Returns:
            Nested dictionaries and lists of strings and numbers.
        """
        return asdict(self)

    def __str__(self) -> str:
        parts = [f"initialised with {self.initializer}: {_count(self.matrices)}"]
        parts.append(_table(_MATRIX_COLUMNS, map(_matrix_cells, self.matrices)))
        if self.products:
            parts.append(_table(_PRODUCT_COLUMNS, map(_product_cells, self.products)))
        if self.effects:
            parts.append(_table(_EFFECT_COLUMNS, map(_effect_cells, self.effects)))
        parts.extend(f"note: {note}" for note in self.notes)
        return "\n".join(parts)


_MATRIX_COLUMNS = (
    "site", "matrix", "status", "dtype", "residual computed", "residual stored",
    "kappa host", "kappa computed", "kappa stored", "2-norm", "F-norm host", "F-norm",
)  # fmt: skip
_PRODUCT_COLUMNS = (
    "site", "product", "diagonal host", "diagonal computed", "diagonal stored",
    "off-diagonal host", "off-diagonal computed", "off-diagonal stored",
)  # fmt: skip
_EFFECT_COLUMNS = ("site", "quantity", "before", "after")


def _matrix_cells(row: MatrixRow) -> list[str]:
    host, computed, stored = row.host, row.computed, row.stored
    return [
        row.site,
        row.matrix,
        row.status,
        row.dtype,
        _number(computed and computed.orthogonality_residual),
        _number(stored.orthogonality_residual),
        _number(host.kappa_max),
        _number(computed and computed.kappa_max),
        _number(stored.kappa_max),
        _number(stored.spectral_norm),
        _number(host.frobenius_norm),
        _number(stored.frobenius_norm),
    ]


def _product_cells(row: ProductRow) -> list[str]:
    facts = (row.host, row.computed, row.stored)
    diagonals = [_number(f.diagonal_mean) for f in facts]
    return [row.site, row.product, *diagonals, *(_number(f.off_diagonal_std) for f in facts)]


def _effect_cells(row: EffectRow) -> list[str]:
    return [row.site, row.quantity, _number(row.before), _number(row.after)]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _count(matrices: Sequence[MatrixRow]) -> str:
    changed = sum(row.status == "initialised" for row in matrices)
    sites = len({row.site for row in matrices})
    return f"{changed} of {len(matrices)} matrices of {sites} attentions (kappa: worst head)"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Align columns; numbers and words alike to the left."""
    lines = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )

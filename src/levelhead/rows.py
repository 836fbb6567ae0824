"""Rows brought to unit length: the one operation QUEST, q/k norms and preconditioning share."""

from jaxtyping import Float
from torch import Tensor

from levelhead.shapes import at_least_float32

ROW_EPS = 1e-6
"""Norm below which a row is divided by this instead (Govindarajan et al. 2026; METHODS 4, 5)."""


def inverse_row_norm(
    rows: Float[Tensor, "*batch D"], eps: float = ROW_EPS
) -> Float[Tensor, "*batch 1"]:
    """Return one over the 2-norm of each row.

        inverse = 1 / max(||row||_2, eps),   and 0 for a row of zeros

    The zero keeps a zero row at zero with a zero gradient, where a naive square root gives NaN.

    Args:
        rows: Rows along the last axis.
        eps: Smallest norm divided by, in the unit of the rows; positive.

    Returns:
        Values in [0, 1 / eps], in float32 or wider.
    """
    wide = rows.to(at_least_float32(rows.dtype))
    squared_norm = wide.square().sum(dim=-1, keepdim=True)
    is_zero = squared_norm == 0
    inverse = squared_norm.masked_fill(is_zero, 1.0).clamp_min(eps * eps).rsqrt()
    return inverse.masked_fill(is_zero, 0.0)


def unit_rows(rows: Float[Tensor, "*batch D"], eps: float = ROW_EPS) -> Float[Tensor, "*batch D"]:
    """Divide each row by its 2-norm.

        unit = row / max(||row||_2, eps)

    Args:
        rows: Rows along the last axis.
        eps: Smallest norm divided by; positive.

    Returns:
        Rows of norm one (less for rows shorter than ``eps``, zero for zero rows), same dtype;
        the norm is computed in float32 or wider.
    """
    return (rows * inverse_row_norm(rows, eps)).to(rows.dtype)

"""Rows brought to unit length: the one operation QUEST, q/k norms and preconditioning share."""

import torch
from jaxtyping import Float
from torch import Tensor

from levelhead.modes import is_transformed
from levelhead.shapes import at_least_float32, without_autocast

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


def unit_rows(
    rows: Float[Tensor, "*batch D"],
    eps: float = ROW_EPS,
    factor: Float[Tensor, "*#batch #D"] | None = None,
) -> Float[Tensor, "*batch D"]:
    """Divide each row by its 2-norm, and multiply it by a factor.

        unit = factor * row / max(||row||_2, eps)

    Args:
        rows: Rows along the last axis.
        eps: Smallest norm divided by; positive.
        factor: Length the rows shall have, or a number for each coordinate of the unit rows,
            broadcast to them; one unless given.

    Returns:
        Rows of norm one (less for rows shorter than ``eps``, zero for zero rows) times ``factor``,
        same dtype; the norm is computed in float32 or wider.
    """
    if _is_traced():
        inverse = inverse_row_norm(rows, eps)
        return (rows * (inverse if factor is None else inverse * factor)).to(rows.dtype)
    return _UnitRows.apply(rows, eps, factor)


def _is_traced() -> bool:
    """Whether a compiler fuses the plain form itself, or ``torch.func`` looks into it."""
    return torch.compiler.is_compiling() or is_transformed()


class _UnitRows(torch.autograd.Function):
    """The same, with a gradient in half the passes over memory.

        grad_rows = factor * inverse * (grad - inverse^2 <grad, rows> rows)
        grad_factor = inverse <grad, rows>

    A row shorter than ``eps`` has a constant ``inverse``: its second term is zero. A factor per
    coordinate meets the gradient first, and unit rows are never kept beside the result.
    """

    @staticmethod
    def forward(ctx, rows, eps, factor):
        compute_dtype = at_least_float32(rows.dtype)
        norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=compute_dtype)
        inverse = norm.clamp_min(eps).reciprocal_().mul_(norm != 0)
        ctx.eps, is_longer = eps, norm > eps
        ctx.save_for_backward(rows, inverse, is_longer, factor)
        ctx.save_for_forward(rows, inverse, is_longer, factor)
        if factor is None or factor.shape[-1] == 1:
            return (rows * (inverse if factor is None else inverse * factor)).to(rows.dtype)
        return (rows * inverse).mul_(factor).to(rows.dtype)

    @staticmethod
    def backward(ctx, *grads):
        with without_autocast(grads[0].device.type):
            return _UnitRows._gradients(ctx, grads[0])

    @staticmethod
    def _gradients(ctx, grad):
        rows, inverse, is_longer, factor = ctx.saved_tensors
        wide = grad.to(inverse.dtype)
        if torch.is_grad_enabled():  # the gradient shall have a gradient
            inverse = inverse_row_norm(rows, ctx.eps)
        grad_factor = None
        if factor is not None and factor.shape[-1] > 1:
            grad_factor = (wide * inverse * rows).sum_to_size(factor.shape).to(factor.dtype)
            wide, factor = (wide * factor).to(inverse.dtype), None
        along = torch.linalg.vecdot(wide, rows.to(inverse.dtype)).unsqueeze(-1) * inverse
        size = inverse if factor is None else inverse * factor
        grad_rows = torch.addcmul(wide, rows, along * inverse * is_longer, value=-1)
        grad_rows = grad_rows * size if torch.is_grad_enabled() else grad_rows.mul_(size)
        if factor is not None:
            grad_factor = along.sum_to_size(factor.shape).to(factor.dtype)
        return grad_rows.to(rows.dtype), None, grad_factor

    @staticmethod
    def jvp(ctx, tangent, _, factor_tangent):
        rows, inverse, is_longer, factor = ctx.saved_tensors
        wide = torch.zeros_like(rows) if tangent is None else tangent
        along = (wide * rows).sum(dim=-1, keepdim=True) * inverse
        moved = (wide - rows * (along * inverse * is_longer)) * inverse
        if factor is not None:
            moved = moved * factor
        if factor_tangent is not None:
            moved = moved + rows * inverse * factor_tangent
        return moved.to(rows.dtype)

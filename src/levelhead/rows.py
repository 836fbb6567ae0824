"""Rows brought to unit length: the one operation QUEST, q/k norms and preconditioning share."""

import torch
from jaxtyping import Float
from torch import Tensor

from levelhead.modes import is_forward_mode, is_plain, is_transformed
from levelhead.plain_gradients import needs_plain_gradients
from levelhead.shapes import at_least_float32, require, without_autocast

ROW_EPS = 1e-6
"""Norm below which a row is divided by this instead (Govindarajan et al. 2026; METHODS 4, 5)."""

_LEAST_FACTOR = 2.0**-32
"""Factors from here to its inverse leave the digits of unit rows as they are."""


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


def row_norms(rows: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch 1"]:
    """Return the 2-norm of each row, laid out in memory as the rows are.

    What broadcasts along rows is read fastest in their own order: heads of a token lie side by
    side where a projection or a kernel wrote them.

    Args:
        rows: Rows along the last axis.

    Returns:
        Norms, same dtype.
    """
    if rows.stride(-1) != 1:  # columns: across memory torch's norm takes six times as long
        squares = rows.to(at_least_float32(rows.dtype)).square()
        return squares.sum(dim=-1, keepdim=True).sqrt().to(rows.dtype)
    order = _memory_order(rows)
    norms = torch.linalg.vector_norm(rows.permute(order), dim=-1, keepdim=True)
    return _put_back(norms, order)


def _row_products(
    left: Float[Tensor, "*batch D"], right: Float[Tensor, "*batch D"]
) -> Float[Tensor, "*batch 1"]:
    """Return the dot product of each pair of rows, laid out in memory as those on the right."""
    order = _memory_order(right)
    products = torch.linalg.vecdot(left.permute(order), right.permute(order))
    return _put_back(products.unsqueeze(-1), order)


def _memory_order(rows: Tensor) -> list[int]:
    """Return the axes as they lie in memory, the outermost first; the last one stays."""
    *outer, last = range(rows.ndim)
    return [*sorted(outer, key=lambda axis: -rows.stride(axis)), last]


def _put_back(permuted: Tensor, order: list[int]) -> Tensor:
    return permuted.permute([order.index(axis) for axis in range(len(order))])


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

    Raises:
        ValueError: Rows of whole numbers.
    """
    require(rows.is_floating_point(), "rows must be floating-point", f"{rows.dtype}")
    if _is_traced():
        inverse = inverse_row_norm(rows, eps)
        return (rows * (inverse if factor is None else inverse * factor)).to(rows.dtype)
    return _UnitRows.apply(rows, eps, factor)[0]


def _is_traced() -> bool:
    """Whether a compiler fuses the plain form itself, or ``torch.func`` looks into it."""
    return torch.compiler.is_compiling() or is_transformed()


def _can_be_undone(rows: Tensor, factor: Tensor | None) -> bool:
    """Whether dividing by a factor gives unit rows back, digits and all.

    Only on a CPU is it looked at: elsewhere the look would stall the device.
    """
    if rows.dtype != at_least_float32(rows.dtype):
        return False
    if factor is None:
        return True
    if factor.device.type != "cpu" or factor.numel() == 0 or not is_plain(factor):
        return False
    lowest, highest = (bound.item() for bound in factor.detach().abs().aminmax())
    return lowest >= _LEAST_FACTOR and highest <= 1 / _LEAST_FACTOR  # half precision has no 2^-32


def _inverse(norm: Tensor, eps: float) -> Tensor:
    """Return one over a norm that is at least ``eps``; 0 for rows of zeros."""
    return norm.clamp_min(eps).reciprocal() * (norm != 0)


def _length_gradients(
    grad: Tensor, kept: Tensor, inverse: Tensor, is_longer: Tensor, factor: Tensor | None,
    keeps_result: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Return the gradients of rows and of their length, and unit rows over what is kept."""
    unit_per_kept = inverse
    if keeps_result:
        unit_per_kept = torch.ones_like(inverse)
        if factor is not None:
            unit_per_kept = _widened(factor, inverse).reciprocal()
    along = _row_products(grad, kept.to(inverse.dtype)) * unit_per_kept
    grad_rows = torch.addcmul(grad, kept, along * unit_per_kept * is_longer, value=-1)
    size = inverse if factor is None else inverse * factor
    grad_rows = grad_rows * size if torch.is_grad_enabled() else grad_rows.mul_(size)
    if factor is None:
        return grad_rows, None, unit_per_kept
    return grad_rows, along.sum_to_size(factor.shape).to(factor.dtype), unit_per_kept


def _coordinate_gradients(
    grad: Tensor, kept: Tensor, inverse: Tensor, is_longer: Tensor, factor: Tensor,
    keeps_result: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the same for a factor per coordinate, in the memory of as few tensors as can be.

    New memory costs more than what is computed in it.
    """
    unit_per_kept = _widened(factor, inverse).reciprocal() if keeps_result else inverse
    products = grad * kept
    if keeps_result:  # the factor is in the products already
        grad_factor = products.sum_to_size(factor.shape) * unit_per_kept
        along = products.sum(dim=-1, keepdim=True)
    else:
        products = products * inverse
        grad_factor = products.sum_to_size(factor.shape)
        along = (products * factor).sum(dim=-1, keepdim=True)
    is_more = needs_plain_gradients(grad) or is_transformed() or not is_plain(products)
    room = None if is_more else products
    grad_rows = torch.mul(kept, unit_per_kept, out=room)
    grad_rows = torch.mul(grad_rows, -along * is_longer, out=room)
    grad_rows = torch.addcmul(grad_rows, grad, factor, out=room)
    grad_rows = torch.mul(grad_rows, inverse, out=room)
    return grad_rows.to(inverse.dtype), grad_factor.to(factor.dtype), unit_per_kept


def _widened(factor: Tensor, like: Tensor) -> Tensor:
    """Return a factor with at least the digits of another tensor."""
    return factor.to(torch.promote_types(factor.dtype, like.dtype))


class _UnitRows(torch.autograd.Function):
    """The same, and the norms, with a gradient in half the passes over memory.

        grad_rows = factor * inverse * (grad - <grad, unit> unit)
        grad_factor = <grad, unit>

    Kept for it is the result, which an attention keeps anyway, where it has all its digits and the
    factor can be divided out again, else the rows that came. A row shorter than ``eps`` has a
    constant ``inverse``: its second term is zero. The norms are an output so that second
    derivatives reach the rows through them.
    """

    @staticmethod
    def forward(ctx, rows, eps, factor):
        result = rows.to(at_least_float32(rows.dtype), copy=True)  # dense: its norms take less
        norm = row_norms(result)
        norm = norm.data if norm._is_view() else norm  # a view made here takes no tangent
        inverse = _inverse(norm, eps)
        if factor is None or factor.shape[-1] == 1:
            result.mul_(inverse if factor is None else inverse * factor)
        else:
            result.mul_(inverse).mul_(factor)
        result = result.to(rows.dtype)
        ctx.eps, ctx.keeps_result = eps, _can_be_undone(rows, factor)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(result if ctx.keeps_result else rows, norm, factor)
        if is_forward_mode():
            ctx.save_for_forward(rows, norm, factor)
        return result, norm

    @staticmethod
    def backward(ctx, *grads):
        saved = ctx.saved_tensors  # once: checkpointing computes them again for each look
        with without_autocast(saved[0].device.type):
            return _UnitRows._gradients(ctx, saved, *grads)

    @staticmethod
    def _gradients(ctx, saved, grad, grad_norm):
        kept, norm, factor = saved
        inverse = _inverse(norm, ctx.eps)
        wide = (torch.zeros_like(kept) if grad is None else grad).to(inverse.dtype)
        common = wide, kept, inverse, norm > ctx.eps
        if factor is None or factor.shape[-1] == 1:
            found = _length_gradients(*common, factor, ctx.keeps_result)
        else:
            found = _coordinate_gradients(*common, factor, ctx.keeps_result)
        grad_rows, grad_factor, unit_per_kept = found
        if grad_norm is not None:
            grad_rows = grad_rows + grad_norm * (kept * unit_per_kept)
        return grad_rows.to(kept.dtype), None, grad_factor

    @staticmethod
    def jvp(ctx, tangent, _, factor_tangent):
        rows, norm, factor = ctx.saved_tensors
        inverse = _inverse(norm, ctx.eps)
        wide = torch.zeros_like(rows) if tangent is None else tangent
        along = (wide * rows).sum(dim=-1, keepdim=True) * inverse
        moved = (wide - rows * (along * inverse * (norm > ctx.eps))) * inverse
        if factor is not None:
            moved = moved * factor
        if factor_tangent is not None:
            moved = moved + rows * inverse * factor_tangent
        return moved.to(rows.dtype), along  # of the norms of longer rows: those that count

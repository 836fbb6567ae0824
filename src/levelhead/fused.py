"""What a fused projection wrote, freed once only parts of it are needed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from levelhead.modes import is_transformed
from levelhead.shapes import at_least_float32


def leave_fused(before: Sequence[Tensor], after: Sequence[Tensor]) -> list[Tensor]:
    """Copy what still lies beside rows that others have taken the place of.

    A fused projection writes queries, keys and values into one tensor, all of which lives for the
    backward pass as long as any part is kept. Where a norm or a rotation has made other rows of
    its queries or keys, copies of the parts that stay free the whole. On a CPU, in training and in
    full precision only; a compiler plans its own memory.

    Args:
        before: Queries, keys and values as they were projected, in their order.
        after: The same as the attention will see them.

    Returns:
        ``after``, in part copied.
    """
    if all(old is new for old, new in zip(before, after, strict=True)):
        return list(after)
    if torch.compiler.is_compiling() or is_transformed() or not torch.is_grad_enabled():
        return list(after)
    replaced = [old._base for old, new in zip(before, after, strict=True) if old is not new]
    bases = [base for base in replaced if base is not None]
    staying = [any(rows._base is base for base in bases) for rows in after]
    if not all(_can_move(rows) for rows, stays in zip(after, staying, strict=True) if stays):
        return list(after)
    return [_copy(rows) if stays else rows for rows, stays in zip(after, staying, strict=True)]


def _can_move(rows: Tensor) -> bool:
    """Whether a copy takes less room than it frees; half precision norms keep what they take."""
    is_wide = rows.dtype == at_least_float32(rows.dtype)
    return is_wide and rows.device.type == "cpu" and rows.requires_grad and 0 not in rows.stride()


def _copy(rows: Tensor) -> Tensor:
    """Copy rows, the heads of a token side by side as they lie in a projection."""
    return rows.transpose(1, 2).contiguous().transpose(1, 2)

"""What a fused projection wrote, freed once only parts of it are needed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from levelhead.modes import is_transformed


def leave_fused(before: Sequence[Tensor], after: Sequence[Tensor]) -> list[Tensor]:
    """Copy what still lies beside rows that others have taken the place of.

    A fused projection writes queries, keys and values into one tensor, all of which lives for the
    backward pass as long as any part is kept. Where a norm or a rotation has made other rows of
    its queries or keys, copies of the parts that stay free the whole. On a CPU only, in training
    only; a compiler plans its own memory.

    Args:
        before: Queries, keys and values as they were projected, in their order.
        after: The same as the attention will see them.

    Returns:
        ``after``, in part copied.
    """
    if torch.compiler.is_compiling() or is_transformed() or not torch.is_grad_enabled():
        return list(after)
    replaced = [old._base for old, new in zip(before, after, strict=True) if old is not new]
    bases = [base for base in replaced if base is not None]
    return [_copy(rows) if _lies_in(rows, bases) else rows for rows in after]


def _lies_in(rows: Tensor, bases: list[Tensor]) -> bool:
    is_plain = rows.device.type == "cpu" and rows.requires_grad
    return is_plain and any(rows._base is base for base in bases)


def _copy(rows: Tensor) -> Tensor:
    """Copy rows, the heads of a token side by side as they lie in a projection."""
    return rows.transpose(1, 2).contiguous().transpose(1, 2)

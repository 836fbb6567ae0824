"""Rows of a tile brought to unit length in place, while they are in the caches of the cores."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from levelhead.shapes import at_least_float32


class RowNorm(NamedTuple):
    """What ``rows.unit_rows`` is asked for: ``factor * row / max(||row||_2, eps)``.

    Attributes:
        eps: Smallest norm divided by; positive.
        factor: One number per head ``[H, 1, 1]`` or per coordinate ``[D]``, or None for one.
    """

    eps: float
    factor: Float[Tensor, "..."] | None = None


def inverse_norms(rows: Float[Tensor, "B H N D"], eps: float) -> Float[Tensor, "2 B H N 1"]:
    """Return what rows are multiplied by to be of unit length, and what their gradient loses.

    Args:
        rows: Of any layout.
        eps: Smallest norm divided by.

    Returns:
        ``1 / max(||row||, eps)``, and 0 for rows of zeros; the same, and 0 for rows not longer
        than ``eps``, which have a constant factor.
    """
    norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=at_least_float32(rows.dtype))
    inverse = norm.clamp_min(eps).reciprocal_().mul_(norm != 0)
    return torch.stack([inverse, inverse * (norm > eps)])


class UnitTile(NamedTuple):
    """The rows of a tile at unit length, and what their gradient takes.

    Attributes:
        unit: Rows of norm one (less for rows shorter than ``eps``), without the factor.
        inverse: What ``inverse_norms`` returned for them.
        factor: That of the tile's heads, or None.
    """

    unit: Float[Tensor, "b h N D"]
    inverse: Float[Tensor, "2 b h N 1"]
    factor: Float[Tensor, "..."] | None

    def gradient_(
        self, grad: Float[Tensor, "b h N D"], grad_factor: Tensor | None, room: Tensor
    ) -> Float[Tensor, "b h N D"]:
        """Turn the gradient of unit rows times factor into that of the rows.

            grad_rows = inverse * (factor * grad - <factor * grad, unit> unit)
            grad_factor += <grad, unit>

        Args:
            grad: Overwritten.
            grad_factor: That of the tile's heads, added to, or None.
            room: Overwritten; of the shape of ``grad``.

        Returns:
            ``grad``.
        """
        along = torch.mul(grad, self.unit, out=room)
        if self.factor is None:
            along = along.sum(dim=-1, keepdim=True)
        elif self.factor.shape[-1] == 1:  # per head
            along = along.sum(dim=-1, keepdim=True)
            _add(along, grad_factor)
            along.mul_(self.factor)
            grad.mul_(self.factor)
        else:
            _add(along, grad_factor)
            along = along.mul_(self.factor).sum(dim=-1, keepdim=True)
            grad.mul_(self.factor)
        inverse, of_longer = self.inverse
        return grad.mul_(inverse).addcmul_(self.unit, along.mul_(of_longer), value=-1)


def _add(along: Tensor, grad_factor: Tensor | None) -> None:
    if grad_factor is not None:
        grad_factor += along.sum_to_size(grad_factor.shape)

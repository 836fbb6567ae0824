"""Rows of a tile brought to unit length in place, while they are in the caches of the cores."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class RowNorm(NamedTuple):
    """What ``rows.unit_rows`` is asked for: ``factor * row / max(||row||_2, eps)``.

    Attributes:
        eps: Smallest norm divided by; positive.
        factor: One number per head ``[H, 1, 1]`` or per coordinate ``[D]``, or None for one.
    """

    eps: float
    factor: Float[Tensor, "..."] | None = None


class UnitTile(NamedTuple):
    """The rows of a tile at unit length, and what their gradient takes.

    Attributes:
        unit: Rows of norm one (less for rows shorter than ``eps``), without the factor.
        inverse: What the rows were multiplied by.
        is_longer: Whether a row was longer than ``eps``: a shorter one has a constant inverse.
        factor: That of the tile's heads, or None.
    """

    unit: Float[Tensor, "b h N D"]
    inverse: Float[Tensor, "b h N 1"]
    is_longer: Bool[Tensor, "b h N 1"]
    factor: Float[Tensor, "..."] | None

    def result(self, out: Float[Tensor, "b h N D"]) -> Float[Tensor, "b h N D"]:
        """Return the rows with their factor, in ``out`` where that is another tensor."""
        return self.unit if self.factor is None else torch.mul(self.unit, self.factor, out=out)

    def gradient_(
        self, grad: Float[Tensor, "b h N D"], grad_factor: Tensor | None, room: Tensor
    ) -> Float[Tensor, "b h N D"]:
        """Turn the gradient of the result into that of the rows, and add up that of the factor.

            grad_rows = inverse * (factor * grad - <factor * grad, unit> unit)

        Args:
            grad: Overwritten.
            grad_factor: That of the tile's heads, added to, or None.
            room: Overwritten; of the shape of ``grad``.

        Returns:
            ``grad``.
        """
        if self.factor is not None and grad_factor is not None:
            moved = torch.mul(grad, self.unit, out=room)
            if self.factor.shape[-1] == 1:
                moved = moved.sum(dim=-1, keepdim=True)
            grad_factor += moved.sum_to_size(grad_factor.shape)
        if self.factor is not None:
            grad.mul_(self.factor)
        along = torch.mul(grad, self.unit, out=room).sum(dim=-1, keepdim=True)
        return grad.addcmul_(self.unit, along.mul_(self.is_longer), value=-1).mul_(self.inverse)


def unit_tile_(
    rows: Float[Tensor, "b h N D"], eps: float, factor: Float[Tensor, "..."] | None
) -> UnitTile:
    """Bring rows to unit length in place; rows of zeros stay.

    Args:
        rows: Overwritten.
        eps: Smallest norm divided by.
        factor: Goes along.

    Returns:
        The unit rows.
    """
    norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    inverse = norm.clamp_min(eps).reciprocal_().mul_(norm != 0)
    return UnitTile(rows.mul_(inverse), inverse, norm > eps, factor)

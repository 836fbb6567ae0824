"""Semi-orthogonal and Xavier matrices: the parts of other initialisers, and the controls."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from levelhead.init.blocks import (
    apply_gain,
    check_projection,
    merge_heads,
    split_heads,
    standard_normal,
)
from levelhead.linalg import orthogonal_factor


@torch.no_grad()
def orthogonal(
    weight: Float[Tensor, "E HD"],
    *,
    num_heads: int = 1,
    gain: float | str = 1.0,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "E HD"]:
    """A matrix whose head blocks are semi-orthogonal, independent and uniformly distributed.

        W_h = gain * Q,    G = Q R,    G ~ N(0, 1),    diag(R) > 0,    so that Q^T Q = I_D

    Where a block is wider than it is tall, its rows are orthonormal instead. One head is the whole
    matrix.

    Args:
        weight: Gives shape, device and the least width of the dtype; not changed.
        num_heads: Into how many independent blocks the columns fall.
        gain: A positive factor (every singular value of a block), or "match": the Frobenius norm
            of ``weight``.
        generator: Random source; None uses torch's global one.

    Returns:
        A new matrix in float32 (float64 where ``weight`` is).

    Source: Saxe et al. 2014, arXiv 1312.6120 (whole matrix); Saratchandran and Lucey, ICLR 2026
    (per head).
    """
    check_projection("weight", weight, num_heads, "num_heads")
    drawn = standard_normal(tuple(weight.shape), weight, generator)
    # Head by head: the factorisation works in float64, and one head at a time keeps that small.
    blocks = torch.stack([orthogonal_factor(block) for block in split_heads(drawn, num_heads)])
    return apply_gain(merge_heads(blocks), weight, gain)


def orthogonal_(
    weight: Float[Tensor, "E HD"],
    *,
    num_heads: int = 1,
    gain: float | str = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Fill a matrix in place as `orthogonal` says.

    Args:
        weight: Changed in place.
        num_heads: Into how many independent blocks the columns fall.
        gain: A positive factor or "match".
        generator: Random source; None uses torch's global one.

    Returns:
        ``weight``.
    """
    fresh = orthogonal(weight, num_heads=num_heads, gain=gain, generator=generator)
    return _fill(weight, fresh)


@torch.no_grad()
def xavier(
    weight: Float[Tensor, "rows cols"],
    *,
    gain: float = 1.0,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "rows cols"]:
    """A matrix of Gaussian entries whose variance balances forward and backward signals.

        W_ij ~ N(0, gain^2 * 2 / (rows + cols))

    The fans are those of the logical matrix: a fused qkv weight gets the variance of its three
    parts, not that of one matrix three times as wide.

    Args:
        weight: Gives shape, device and the least width of the dtype; not changed.
        gain: A positive factor.
        generator: Random source; None uses torch's global one.

    Returns:
        A new matrix in float32 (float64 where ``weight`` is).

    Source: Glorot and Bengio 2010, equation 16 (there as a uniform law of the same variance).
    """
    check_projection("weight", weight, 1, "num_heads")
    std = math.sqrt(2.0 / sum(weight.shape))
    drawn = standard_normal(tuple(weight.shape), weight, generator)
    return apply_gain(drawn * std, weight, gain)


def xavier_(
    weight: Float[Tensor, "rows cols"],
    *,
    gain: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Fill a matrix in place as `xavier` says.

    Args:
        weight: Changed in place.
        gain: A positive factor.
        generator: Random source; None uses torch's global one.

    Returns:
        ``weight``.
    """
    return _fill(weight, xavier(weight, gain=gain, generator=generator))


@torch.no_grad()
def _fill(weight: Tensor, fresh: Tensor) -> Tensor:
    return weight.copy_(fresh)

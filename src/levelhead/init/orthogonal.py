"""Semi-orthogonal and Xavier matrices: the parts of other initialisers, and the controls."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from levelhead.init.blocks import (
    apply_gain,
    check_projection,
    standard_normal,
)
from levelhead.shapes import at_least_float32

TINY = torch.finfo(torch.float32).tiny


@torch.no_grad()
def uniform_orthogonal(
    shape: tuple[int, int], like: Tensor, generator: torch.Generator | None
) -> Float[Tensor, "rows cols"]:
    """Draw a matrix with orthonormal columns (rows, where wide) from the uniform law.

    Args:
        shape: Rows and columns.
        like: Gives device and the least width of the dtype.
        generator: Random source; None uses torch's global one.

    Returns:
        The matrix in float32 (float64 where ``like`` is), computed in float64.

    Source: as `orthogonal_from_reflections`.
    """
    tall = (max(shape), min(shape))
    # Widened here, not in a call: an argument may live as long as the call that it was handed to.
    factor = _reflect_(standard_normal(tall, like, generator).to(torch.float64))
    return (factor if shape == tall else factor.mT).to(at_least_float32(like.dtype))


def orthogonal_from_reflections(
    gaussian: Float[Tensor, "rows cols"],
) -> Float[Tensor, "rows cols"]:
    """Turn a Gaussian matrix into a uniformly distributed one with orthonormal columns.

        Q = H_1 H_2 ... H_cols diag(+-1),    H_j maps the part of column j from row j on to +-e_j

    The law is that of the sign-fixed QR factor of a Gaussian matrix without factorising one:
    reflecting what is left of a Gaussian matrix leaves it Gaussian, so that the vectors the
    factorisation would meet, one after the other, can be read off the columns as they are drawn.

    Args:
        gaussian: Independent N(0, 1) entries, no more columns than rows; those above the diagonal
            are not used.

    Returns:
        Q in float64.

    Source: Stewart, The Efficient Generation of Random Orthogonal Matrices, SIAM J. Numer. Anal.
    17, 1980; Mezzadri 2007, arXiv math-ph/0609050 (the signs).
    """
    return _reflect_(gaussian.to(torch.float64, copy=True))


def _reflect_(vectors: Float[Tensor, "rows cols"]) -> Float[Tensor, "rows cols"]:
    """`orthogonal_from_reflections` in float64; the Gaussian matrix is overwritten."""
    vectors.tril_()
    first = vectors.diagonal()
    first[first == 0] = TINY  # a vector of one entry could be zero and would have no direction
    image = -torch.linalg.vector_norm(vectors, dim=0).copysign(first)
    scales = 1 - first / image
    vectors /= first - image
    factor = torch.linalg.householder_product(vectors, scales)
    factor *= image.sign()
    return factor


@torch.no_grad()
def orthogonal(
    weight: Float[Tensor, "E HD"],
    *,
    num_heads: int = 1,
    gain: float | str = 1.0,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "E HD"]:
    """A matrix whose head blocks are semi-orthogonal, independent and uniformly distributed.

        W_h = gain * Q,    Q^T Q = I_D,    Q in law the factor of G = Q R, G ~ N(0, 1), R_ii > 0

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
    block = weight.shape[0], weight.shape[1] // num_heads
    blocks = [uniform_orthogonal(block, weight, generator) for _ in range(num_heads)]
    return apply_gain(torch.cat(blocks, dim=1), weight, gain)


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

"""Projections ``[E, H D]`` as blocks of heads, the draws that fill them, and their checks."""

import math
from typing import TypeGuard

import torch
from jaxtyping import Float
from torch import Tensor

from levelhead.shapes import at_least_float32, require, require_divides, require_float

DRAW_DTYPE = torch.float32
"""Every draw is made in this dtype, so that a seed gives one matrix whatever the model's dtype."""


def split_heads(weight: Float[Tensor, "E HD"], num_heads: int) -> Float[Tensor, "H E D"]:
    """View the columns of a projection as one block per head; head h owns ``h D .. (h + 1) D``.

    Args:
        weight: Projection in the logical layout.
        num_heads: How many heads its columns hold.

    Returns:
        A view, ``D = columns / num_heads``.
    """
    return weight.unflatten(1, (num_heads, -1)).transpose(0, 1)


def merge_heads(blocks: Float[Tensor, "H E D"]) -> Float[Tensor, "E HD"]:
    """Put the blocks of the heads side by side: the inverse of `split_heads`.

    Args:
        blocks: One block per head.

    Returns:
        The projection in the logical layout.
    """
    return blocks.transpose(0, 1).flatten(1)


def standard_normal(
    shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None
) -> Tensor:
    """Draw independent N(0, 1) entries.

    The draw happens in float32 on the generator's device (the CPU without one), so that one seed
    gives one matrix for every dtype and device of the model.

    Args:
        shape: Shape of the draw.
        like: The result lies on its device and is at least as wide as its dtype.
        generator: Random source; None uses torch's global one.

    Returns:
        The draw in float32, float64 where ``like`` is float64.
    """
    device = torch.device("cpu") if generator is None else generator.device
    drawn = torch.randn(shape, generator=generator, dtype=DRAW_DTYPE, device=device)
    return drawn.to(like.device, at_least_float32(like.dtype))


def frobenius_norm(weight: Tensor) -> float:
    """Frobenius norm, summed in float64.

    Args:
        weight: Any tensor.

    Returns:
        A value in [0, inf], NaN where an entry is NaN.
    """
    return float(torch.linalg.vector_norm(weight, dtype=torch.float64))


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a finite number (a bool is none).

    Args:
        value: Anything.

    Returns:
        True for a finite int or float.
    """
    return isinstance(value, int | float) and type(value) is not bool and math.isfinite(value)


def apply_gain(weight: Tensor, host: Tensor, gain: float | str) -> Tensor:
    """Scale a fresh matrix by a number, or to the Frobenius norm of the one it replaces.

    Refuses an unknown gain, and "match" where the host's norm is zero or not finite.

    Args:
        weight: The fresh matrix.
        host: The matrix it replaces.
        gain: A positive factor, or "match".

    Returns:
        The scaled matrix.
    """
    if gain != "match":
        factor = gain if is_number(gain) else math.nan
        require(factor > 0, "gain must be a positive number or 'match'", f"gain={gain!r}")
        return weight * factor
    norm = frobenius_norm(host)
    require(
        math.isfinite(norm) and norm > 0,
        "gain='match' keeps the host's Frobenius norm, which must be finite and positive",
        f"a {list(host.shape)} matrix of norm {norm}",
        "initialise the host first, or give gain as a number",
    )
    return weight * (norm / frobenius_norm(weight))


def check_projection(name: str, weight: Tensor, num_heads: int, heads_name: str) -> None:
    """Raise unless ``weight`` is a floating-point matrix with data whose columns hold the heads.

    Args:
        name: What the user calls the matrix.
        weight: ``[E, H D]``.
        num_heads: How many heads share its columns.
        heads_name: What the user calls that number.
    """
    require_float(**{name: weight})
    require(weight.ndim == 2, f"{name} must be a matrix [E, H D]", f"{name} {list(weight.shape)}")
    require_data(name, weight)
    require_divides(heads_name, num_heads, f"columns of {name}", weight.shape[1])


def require_data(name: str, weight: Tensor) -> None:
    """Raise when a tensor lies on the meta device and so has no data to initialise.

    Args:
        name: What the user calls the tensor.
        weight: The tensor.
    """
    require(
        not weight.is_meta,
        f"{name} must hold data before it can be initialised",
        f"{name} on the meta device",
        "materialise first (model.to_empty(device=...), load or reset every other weight), "
        "then initialise",
    )


def check_grouping(num_heads: int, num_kv_heads: int | None) -> int:
    """Return the number of key/value heads, checked.

    Args:
        num_heads: H.
        num_kv_heads: Hkv, or None for as many as query heads.

    Returns:
        Hkv.
    """
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    require_divides("num_kv_heads", num_kv_heads, "num_heads", num_heads)
    return num_kv_heads

"""The sizes of an attention, checked, with the defaults filled in."""

from numbers import Integral
from typing import Any

import torch

from levelhead.parts.base import AttentionShape
from levelhead.shapes import require, require_divides


def check_sizes(
    embed_dim: int,
    num_heads: int,
    num_kv_heads: int | None,
    head_dim: int | None,
    bias: bool,
    device: Any,
    dtype: torch.dtype | None,
    kv_embed_dim: int | None = None,
) -> AttentionShape:
    """Check the sizes of an attention and fill in the defaults.

    Args:
        embed_dim: E.
        num_heads: H.
        num_kv_heads: Hkv or None for H.
        head_dim: D or None for ``E / H``.
        bias: Whether q, k, v projections have a bias.
        device: For new parameters.
        dtype: For new parameters.
        kv_embed_dim: Width of the context, or None for E.

    Returns:
        The sizes.

    Raises:
        ValueError: A size that is no positive integer or does not divide another, or a dtype of
            integers.
    """
    sizes = {
        "embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads,
        "head_dim": head_dim, "kv_embed_dim": kv_embed_dim,
    }  # fmt: skip
    for name, size in sizes.items():
        require(
            size is None or isinstance(size, Integral), f"{name} must be an integer",
            f"{name}={size!r}",
        )  # fmt: skip
    require(
        dtype is None or dtype.is_floating_point, "dtype must be floating-point", f"dtype={dtype}"
    )
    if head_dim is None:
        require_divides("num_heads", num_heads, "embed_dim", embed_dim)
        head_dim = embed_dim // num_heads
    require(
        embed_dim > 0 and head_dim > 0, "sizes must be positive",
        f"embed_dim={embed_dim}, head_dim={head_dim}",
    )  # fmt: skip
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    require_divides("num_kv_heads", num_kv_heads, "num_heads", num_heads)
    factory = {"device": device, "dtype": dtype}
    return AttentionShape(
        embed_dim, num_heads, num_kv_heads, head_dim, bias, kv_embed_dim, factory
    )

"""The sizes of an attention, checked, with the defaults filled in."""

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
        ValueError: A size that is not positive or does not divide another.
    """
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

"""What the masks of ``nn.MultiheadAttention`` mean, said in this library's one rule."""

from typing import Any

import torch
from torch import Tensor

from levelhead.shapes import complaint, describe, require


def multihead_masks(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    may_use_hint: bool,
    is_causal: bool,
    query: Tensor,
    key: Tensor,
) -> dict[str, Any]:
    """Translate both masks: their True means "may not attend", floats are added.

    The hint ``is_causal`` stands for a square mask where torch would take its word too (no padding
    beside it, no weights asked for); elsewhere the mask itself is used, whatever the hint says.

    Args:
        attn_mask: ``[T, S]`` or ``[B H, T, S]``, or None.
        key_padding_mask: ``[B, S]``, or ``[S]`` for one sequence, or None.
        may_use_hint: Whether the hint may replace the mask.
        is_causal: The hint.
        query: ``[B, H, T, D]``.
        key: ``[B, H, S, D]``.

    Returns:
        ``attn_mask`` (True = may attend), ``attn_bias`` and ``is_causal``.

    Raises:
        ValueError: A mask of another shape or dtype, or the hint without a mask.
    """
    require(
        attn_mask is not None or not is_causal,
        "is_causal only promises that attn_mask is the causal mask, so attn_mask must be given",
        "is_causal=True, attn_mask=None",
        "attn_mask=nn.Transformer.generate_square_subsequent_mask(T)",
    )
    is_square = query.shape[2] == key.shape[2]
    use_hint = may_use_hint and key_padding_mask is None and is_square
    masks = []
    if attn_mask is not None and not use_hint:
        masks.append(_query_key_mask(attn_mask, query, key))
    if key_padding_mask is not None:
        masks.append(_padding_mask(key_padding_mask, key))
    allowed, bias = None, None
    for mask in masks:
        if mask.dtype == torch.bool:
            allowed = ~mask if allowed is None else allowed & ~mask
        else:
            bias = mask if bias is None else bias + mask
    return {"attn_mask": allowed, "attn_bias": bias, "is_causal": use_hint and is_causal}


def _query_key_mask(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    batch, num_heads, num_queries, _ = query.shape
    plain = (num_queries, key.shape[2])
    per_head = (batch * num_heads, *plain)
    _check("attn_mask", mask, plain, per_head)
    return mask[None, None] if mask.ndim == 2 else mask.view(batch, num_heads, *plain)


def _padding_mask(mask: Tensor, key: Tensor) -> Tensor:
    batch, num_keys = key.shape[0], key.shape[2]
    _check("key_padding_mask", mask, *([(num_keys,)] if batch == 1 else []), (batch, num_keys))
    return mask.view(batch, 1, 1, num_keys)


def _check(name: str, mask: Tensor, *shapes: tuple[int, ...]) -> None:
    if not (mask.dtype == torch.bool or mask.is_floating_point()) or mask.shape not in shapes:
        valid = "boolean (True = may not attend) or float (added), of shape "
        rule = f"{name} must fit the queries and keys"
        raise ValueError(complaint(rule, describe(mask), valid + " or ".join(map(str, shapes))))


def unnest(states: Tensor) -> tuple[Tensor, Tensor]:
    """Pad sequences of different lengths.

    Args:
        states: A nested tensor of ``[T_i, E]``.

    Returns:
        ``[B, T, E]``, zeros past each end, and ``[B, T]``, True where there is nothing.
    """
    lengths = torch.tensor([len(sequence) for sequence in states.unbind()], device=states.device)
    padded = states.to_padded_tensor(0.0)
    positions = torch.arange(padded.shape[1], device=states.device)
    return padded, positions >= lengths[:, None]


def nest(padded: Tensor, is_padding: Tensor) -> Tensor:
    """Undo ``unnest``.

    Args:
        padded: ``[B, T, E]``.
        is_padding: ``[B, T]``.

    Returns:
        A nested tensor.
    """
    return torch.nested.as_nested_tensor(
        [rows[~gone] for rows, gone in zip(padded, is_padding, strict=True)]
    )

"""How torch runs ``nn.MultiheadAttention``: inside one function that no hook can look into, so
the query, key and value are projected here, from the same inputs and weights."""

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from levelhead.sites.calls import Seen
from levelhead.sites.layout import Projection
from levelhead.sites.sites import AttentionSite

SIGNATURE = inspect.signature(nn.MultiheadAttention.forward)


def seen_in_multihead(
    site: AttentionSite, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Seen]:
    """Project what a call of ``nn.MultiheadAttention`` gets.

    Boolean masks of torch's forbid where they are True; here True means "may attend".

    Args:
        site: The site.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Returns:
        The hidden states ``[B, T, E]`` and what goes into the kernel.
    """
    bound = SIGNATURE.bind(site.module, *args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    is_batched = given["query"].ndim == 3
    states = [_batch_first(site, given[name]) for name in ("query", "key", "value")]
    query, key, value = (
        project(getattr(site.layout, letter), state).unflatten(-1, (site.num_heads, -1))
        for letter, state in zip("qkv", states, strict=True)
    )
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    attn_mask, attn_bias = None, None
    for mask in (
        _four_axes(given["attn_mask"], query, key),
        _key_padding(given["key_padding_mask"], is_batched),
    ):
        if mask is None:
            continue
        if mask.dtype == torch.bool:
            attn_mask = ~mask if attn_mask is None else attn_mask & ~mask
        else:
            attn_bias = mask if attn_bias is None else attn_bias + mask
    return states[0], Seen(query, key, value, site.scale, attn_mask, attn_bias)


def seen_in_landmarks(site: AttentionSite, states: Tensor, attn_bias: Tensor | None) -> Seen:
    """Project what an attention through landmarks approximates: full attention.

    Args:
        site: The site.
        states: ``[B, T, E]``.
        attn_bias: The host's additive mask, or None.

    Returns:
        What the kernel of full attention would get.
    """
    query, key, value = (
        project(getattr(site.layout, letter), states)
        .unflatten(-1, (site.num_heads, -1))
        .transpose(1, 2)
        for letter in "qkv"
    )
    return Seen(query, key, value, site.scale, attn_bias=attn_bias)


def project(projection: Projection, states: Tensor) -> Tensor:
    """Apply one logical projection of a host.

    Args:
        projection: Where it is stored.
        states: ``[..., in]``.

    Returns:
        ``[..., out]``.
    """
    weight, bias = projection.weight, projection.bias
    rows = weight.rows(weight.parameter).flatten(0, -2)
    return F.linear(states, rows, None if bias is None else bias.rows(bias.parameter).flatten())


def _batch_first(site: AttentionSite, states: Tensor) -> Tensor:
    if states.is_nested:
        states = states.to_padded_tensor(0.0)
    if states.ndim == 2:
        return states[None]
    return states if site.module.batch_first else states.transpose(0, 1)


def _four_axes(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    if mask is None or mask.ndim == 2:
        return mask if mask is None else mask[None, None]
    return mask.view(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _key_padding(mask: Tensor | None, is_batched: bool) -> Tensor | None:
    if mask is None:
        return None
    return mask[:, None, None, :] if is_batched else mask[None, None, None, :]

"""Queries, keys and values of a converted timm attention, in one product where timm has one."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from levelhead.parts.projections import WHICH, Projections

Rows = Float[Tensor, "B H T D"]


def project_heads(
    host: Any, hidden_states: Tensor, context: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Project and split into heads, through the projections part of the host.

    Args:
        host: The attention, with a ``levelhead`` child.
        hidden_states: ``[B, T, E]``, what asks.
        context: ``[B, S, E]``, what is asked; the hidden states by default.

    Returns:
        Query, key, value: ``[B, H, T, D]``, ``[B, Hkv, S, D]`` twice.
    """
    context = hidden_states if context is None else context
    part, head_dim = host.levelhead.projections, host.levelhead.inner.shape.head_dim
    is_plain, is_fused = type(part) is Projections, getattr(host, "qkv", None) is not None
    if is_plain and is_fused:  # its backward lays the gradient as the layer before wants it
        thirds = _fused(host, hidden_states).unflatten(-1, (3, -1, head_dim)).unbind(-3)
        query, key, value = (thirds[role].transpose(1, 2) for role in host.roles)
        return query, key, value
    sources = {"q": hidden_states, "k": context, "v": context}
    if is_fused:
        thirds = _fused(host, hidden_states).chunk(3, dim=-1)
        projected = {w: thirds[role] for w, role in zip(WHICH, host.roles, strict=True)}
    else:
        projected = {which: layer_of(host, which)(sources[which]) for which in WHICH}
    if not is_plain:
        stored = weights_of(host)
        part.ensure_derived({which: weight for which, (weight, _) in stored.items()})
        projected = {w: part.adjust(w, projected[w], sources[w], *stored[w]) for w in WHICH}
    query, key, value = (split_heads(projected[which], head_dim) for which in WHICH)
    return query, key, value


def project_dense_heads(host: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Project, split into heads, and on a CPU lay the rows of each head one after the other.

    There such attention runs in tiles of scores: products copy strided rows anyway, norms are
    faster on dense ones, and the projection they are a view of is free again.

    Args:
        host: As for ``project_heads``.
        hidden_states: Likewise.

    Returns:
        Query, key, value: ``[B, H, T, D]``, on a CPU contiguous.
    """
    query, key, value = project_heads(host, hidden_states)
    if query.device.type != "cpu":
        return query, key, value
    return query.contiguous(), key.contiguous(), value.contiguous()


def layer_of(host: Any, which: str) -> nn.Module:
    """Return the layer of one projection, where the host keeps them apart.

    Args:
        host: The attention.
        which: "q", "k" or "v".
    """
    return getattr(host, f"{which}_proj" if hasattr(host, "q_proj") else which)


def weights_of(host: Any) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Return weight and bias of each projection, as torch stores them.

    Args:
        host: The attention.

    Returns:
        "q", "k", "v" to weight and bias (or None), as views the gradient flows through.
    """
    if getattr(host, "qkv", None) is None:
        layers: dict[str, Any] = {which: layer_of(host, which) for which in WHICH}
        return {which: (layer.weight, layer.bias) for which, layer in layers.items()}
    weights, biases = host.qkv.weight.chunk(3), _biases(host)
    roles = zip(WHICH, host.roles, strict=True)
    return {which: (weights[role], biases[role]) for which, role in roles}


def _fused(host: Any, hidden_states: Tensor) -> Tensor:
    if getattr(host, "q_bias", None) is None:
        return host.qkv(hidden_states)
    bias = torch.cat((host.q_bias, host.k_bias, host.v_bias))
    return F.linear(hidden_states, host.qkv.weight, bias)


def _biases(host: Any) -> tuple[Tensor | None, ...]:
    if getattr(host, "q_bias", None) is not None:
        return host.q_bias, host.k_bias, host.v_bias
    return (None, None, None) if host.qkv.bias is None else host.qkv.bias.chunk(3)


def split_heads(projected: Float[Tensor, "B T HD"], head_dim: int) -> Rows:
    """Give each head its rows.

    Args:
        projected: All heads side by side.
        head_dim: D.

    Returns:
        A view.
    """
    return projected.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def merge_heads(attn_output: Rows) -> Float[Tensor, "B T HD"]:
    """Put the heads side by side again.

    Args:
        attn_output: One output per query and head.

    Returns:
        The heads' outputs, head by head.
    """
    return attn_output.transpose(1, 2).flatten(2)

"""Attention of one query: tokens are mixed before the value projection, which then sees one."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from levelhead.inner import to_autocast_dtype
from levelhead.kernels_mapped import is_observed
from levelhead.parts.projections import Projections
from levelhead.reference import final_weights
from levelhead.shapes import at_least_float32, without_autocast
from levelhead.sites.host import Installed
from levelhead.sites.own_calls import is_listened_to
from levelhead.sites.timm_host_projections import layer_of, split_heads


def mixes_tokens_first(host: Any, installed: Installed) -> bool:
    """Say whether nobody but the attention itself needs the values of a class attention.

    Args:
        host: The attention.
        installed: What runs there.

    Returns:
        False where a part, a hook or a layer that is more than a product wants them.
    """
    layer = layer_of(host, "v")
    if type(installed.projections) is not Projections or type(layer) is not nn.Linear:
        return False
    if any(is_observed(module) for module in (layer, installed, installed.inner)):
        return False
    return all(type(t) in (Tensor, nn.Parameter, type(None)) for t in (layer.weight, layer.bias))


def attend_from_class(
    host: Any, hidden_states: Float[Tensor, "B S E"]
) -> Float[Tensor, "B H 1 D"]:
    """Attend from the first token to all, without a value for each of them.

        attn_output = W_v (attn_weights @ hidden_states) + b_v sum(attn_weights)

    The same numbers as with values, from a product with one row per head instead of one per
    token: half of what such an attention computes.

    Args:
        host: An attention that ``mixes_tokens_first``, with a ``levelhead`` child.
        hidden_states: The class token, then the others.

    Returns:
        One output per head.
    """
    inner, asks = host.levelhead.inner, hidden_states[:, :1]
    query, key = _heads(host, "q", asks), _heads(host, "k", hidden_states)
    value = key  # what a check asks of values holds for the keys
    if is_listened_to(inner):
        with torch.no_grad():
            value = _heads(host, "v", hidden_states)
    inner.check_fit(query, key, value, asks)
    query, key = inner.norm.prepare(query, key)
    call = inner.check(query, key, value)
    scores = _scores_of_one(query, key, call.scale)
    attn_weights = final_weights(inner, query, scores, asks, call)
    attn_output = _project_mixed(attn_weights.squeeze(2), hidden_states, layer_of(host, "v"))
    for part in inner.outputs():
        attn_output = part(attn_output, asks)
    return attn_output


def _heads(host: Any, which: str, hidden_states: Tensor) -> Tensor:
    projected = layer_of(host, which)(hidden_states)
    return to_autocast_dtype(split_heads(projected, host.levelhead.inner.shape.head_dim))[0]


def _scores_of_one(
    query: Float[Tensor, "B H 1 D"], key: Float[Tensor, "B H S D"], scale: float
) -> Float[Tensor, "B H 1 S"]:
    """Return ``plain_scores``, the keys of all heads read as they lie: side by side in a token.

    Each head's query meets zeros in the place of the others'.
    """
    num_heads, wide = query.shape[1], at_least_float32(query.dtype)
    with without_autocast(query.device.type):
        own = torch.eye(num_heads, dtype=wide, device=query.device)[..., None]
        blocks = (query.to(wide) * own).flatten(2)
        tokens = key.to(wide).transpose(1, 2).flatten(2)
        scores = torch.bmm(tokens, blocks.mT).mT  # the gradient of tokens is dense this way round
    return scale * scores.unsqueeze(2)


def _project_mixed(
    attn_weights: Float[Tensor, "B H S"], hidden_states: Float[Tensor, "B S E"], layer: Any
) -> Float[Tensor, "B H 1 D"]:
    num_heads = attn_weights.shape[1]
    mixed = torch.bmm(attn_weights, hidden_states).transpose(0, 1)
    values = torch.bmm(mixed, layer.weight.unflatten(0, (num_heads, -1)).mT)
    if layer.bias is not None:
        total = attn_weights.sum(dim=-1).mT.unsqueeze(-1)
        values = values + total * layer.bias.to(values.dtype).unflatten(0, (num_heads, 1, -1))
    return values.transpose(0, 1).unsqueeze(2)

"""The equations, plain: T x S, any float dtype, with the attention weights. This is the law."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from levelhead.shapes import at_least_float32, without_autocast
from levelhead.stages.masks import AttentionMask


class ReferenceOutput(NamedTuple):
    """What the plain form returns.

    Attributes:
        attn_output: ``[B, H, T, Dv]``, after the output stage.
        attn_weights: ``[B, H, T, S]``, what multiplied the values: after the normaliser,
            dropout and the weights stage, before the output stage.
    """

    attn_output: Tensor
    attn_weights: Tensor


def plain_scores(
    query: Float[Tensor, "B H T D"], key: Float[Tensor, "B Hkv S D"], scale: float
) -> Float[Tensor, "B H T S"]:
    """Return the scaled dot products.

        scores[t, s] = scale * query[t] . key[s]

    Args:
        query: Queries.
        key: Keys; key head ``h // (H / Hkv)`` serves query head h.
        scale: Factor on the dot product.

    Returns:
        Scores, not masked.
    """
    return scale * (query @ repeat_heads(key, query.shape[1]).mT)


def repeat_heads(rows: Float[Tensor, "B Hkv S D"], num_heads: int) -> Float[Tensor, "B H S D"]:
    """Give every query head its own copy of its key/value head.

    Args:
        rows: Keys or values.
        num_heads: H, a multiple of Hkv.

    Returns:
        Head h of the result is head ``h // (H / Hkv)`` of ``rows``; ``rows`` itself where there
        is one for each.
    """
    num_groups = num_heads // rows.shape[1]
    return rows if num_groups == 1 else rows.repeat_interleave(num_groups, dim=1)


def reference_attention(
    inner: Any,
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B Hkv S D"],
    value: Float[Tensor, "B Hkv S Dv"],
    hidden_states: Float[Tensor, "B T E"] | None = None,
    *,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    is_causal: bool = False,
    token_mask: Bool[Tensor, "#B T"] | None = None,
    scale: float | None = None,
) -> ReferenceOutput:
    """Attention of any variant by its equation.

        scores = mask(cap(scale * query @ key^T))
        attn_weights = weights(normaliser(scores))
        attn_output = gate(precondition(attn_weights @ value))

    Args:
        inner: The ``InnerAttention`` whose parts are used.
        query: Queries.
        key: Keys.
        value: Values.
        hidden_states: Input of the attention on the query side, where a part reads it.
        attn_mask: Boolean, True = may attend.
        attn_bias: Float, added to the scores.
        is_causal: Forbid the future, bottom-right.
        token_mask: True = a real token, for running means.
        scale: Factor on the dot product; the inner attention's own by default.

    Returns:
        The output and the weights.
    """
    inner.check_fit(query, key, value, hidden_states)
    query, key = inner.norm.prepare(query, key)
    call = inner.check(query, key, value, attn_mask, attn_bias, is_causal, token_mask, scale)
    return attend_plainly(inner, query, key, value, hidden_states, call)


class Call(NamedTuple):
    """One checked call of an inner attention.

    Attributes:
        mask: What each query may attend to.
        scale: The factor on the dot product, the norm's word included.
        token_mask: True = a real token, or None.
        dropout_p: Probability of dropping a weight in this call.
    """

    mask: AttentionMask
    scale: float
    token_mask: Tensor | None
    dropout_p: float


def attend_plainly(
    inner: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden_states: Tensor | None,
    call: Call,
) -> ReferenceOutput:
    """Attend with prepared queries and keys, plainly.

    Args:
        inner: The inner attention.
        query: Queries, after the norm part.
        key: Keys, after the norm part.
        value: Values.
        hidden_states: Input of the attention, or None.
        call: The checked call.

    Returns:
        The output and the weights.
    """
    scores = wide_scores(query, key, call.scale)
    attn_weights = final_weights(inner, query, scores, hidden_states, call)
    attn_output = attn_weights @ repeat_heads(value, query.shape[1])
    for part in inner.outputs():
        attn_output = part(attn_output, hidden_states)
    return ReferenceOutput(attn_output, attn_weights)


def final_weights(
    inner: Any,
    query: Tensor,
    scores: Float[Tensor, "B H T S"],
    hidden_states: Tensor | None,
    call: Call,
) -> Float[Tensor, "B H T S"]:
    """Return what multiplies the values: cap, mask, normaliser, dropout and weights stage.

    Args:
        inner: The inner attention.
        query: Queries, after the norm part.
        scores: Scaled dot products, in float32 or wider.
        hidden_states: Input of the attention, or None.
        call: The checked call.

    Returns:
        Weights in the dtype of the query.
    """
    extra_score = inner.normaliser.extra_score(query)
    attn_weights = _normalised(inner, scores, extra_score, call.mask, call).to(query.dtype)
    if inner.weights is not None:
        coefficients = inner.weights.coefficients(hidden_states, call.token_mask)
        attn_weights = inner.weights.plain(attn_weights, call.mask, *coefficients)
    return attn_weights


def plain_weights(
    inner: Any,
    query: Tensor,
    key: Tensor,
    extra_score: Float[Tensor, " H"] | None,
    mask: AttentionMask,
    call: Call,
) -> Float[Tensor, "B H T S"]:
    """Return the normalised weights, dropout included, before the weights stage.

    Args:
        inner: The inner attention.
        query: Queries (all, or a block of them).
        key: Keys.
        extra_score: Score of a key without a value, per head.
        mask: What these queries may attend to.
        call: The checked call.

    Returns:
        Weights in the dtype of the query.
    """
    scores = wide_scores(query, key, call.scale)
    return _normalised(inner, scores, extra_score, mask, call).to(query.dtype)


def wide_scores(query: Tensor, key: Tensor, scale: float) -> Float[Tensor, "B H T S"]:
    """Return ``plain_scores`` in float32 or wider, also under autocast.

    Args:
        query: Queries.
        key: Keys.
        scale: Factor on the dot product.
    """
    wide = at_least_float32(query.dtype)
    with without_autocast(query.device.type):
        return plain_scores(query.to(wide), key.to(wide), scale)


def _normalised(
    inner: Any, scores: Tensor, extra_score: Tensor | None, mask: AttentionMask, call: Call
) -> Tensor:
    if inner.cap is not None:
        scores = inner.cap.cap(scores)
    attn_weights = inner.normaliser.plain(mask.apply(scores), extra_score)
    if call.dropout_p > 0:
        attn_weights = torch.nn.functional.dropout(attn_weights, call.dropout_p)
    return attn_weights

"""Affine-scaled attention: weights scaled and shifted per query, without a T x S matrix."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from levelhead.shapes import at_least_float32
from levelhead.stages.masks import AttentionMask, visible_count, visible_sum

CLIPPING_SLOPE = 0.1
CLIPPING_OFFSET = 0.5


def linear_clipping(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Map any number into [0, 1], with 0 at the middle.

        phi(x) = clamp(0.1 x + 0.5, 0, 1)

    Args:
        x: Anything.

    Returns:
        Values in [0, 1].

    Source: Bae et al. 2026, arXiv 2602.23057 (constants as there).
    """
    return (CLIPPING_SLOPE * x + CLIPPING_OFFSET).clamp(0.0, 1.0)


def affine_attention(
    attn_output: Float[Tensor, "B H T Dv"],
    value: Float[Tensor, "B Hkv S Dv"],
    alpha: Float[Tensor, "B H T 1"],
    alpha_mean: Float[Tensor, "#H 1 1"],
    mask: AttentionMask,
    keys_counted: int | None = None,
) -> Float[Tensor, "B H T Dv"]:
    """Scale the attention weights by alpha and shift them by beta, on the output.

        attn_output = [alpha * attn_weights + beta] @ value
                    = alpha * attn_output + beta * sum_{visible} value
        beta = (alpha_mean - alpha) / N

    The shift reaches visible keys only. A mask that is the same for all queries but for
    causality takes (cumulative) sums of the values; any other takes the mean of the visible
    values from one more fused attention with zero queries.

    Args:
        attn_output: Output of attention with the unscaled weights.
        value: Values.
        alpha: Factor per query and head.
        alpha_mean: Running mean of alpha, per head or one for all.
        mask: What each query may attend to.
        keys_counted: N; None counts the keys visible to each query, so that a row of the
            weights sums to ``alpha_mean``.

    Returns:
        Output in the dtype of ``attn_output``, computed in float32 or wider; zeros where a
        query may attend to nothing.

    Source: Bae et al. 2026, arXiv 2602.23057; N is open there (METHODS 1).
    """
    compute_dtype = at_least_float32(attn_output.dtype, alpha.dtype)
    shift = (alpha_mean - alpha).to(compute_dtype)
    scaled = alpha.to(compute_dtype) * attn_output
    if mask.is_key_padding:
        total, count = visible_sum(mask, value)
        divisor = count.clamp_min(1.0) if keys_counted is None else keys_counted
        return (scaled + _group(shift / divisor, total)).to(attn_output.dtype)
    mean = _visible_mean(attn_output, value, mask)
    if keys_counted is not None:
        shift = shift * (visible_count(mask).to(compute_dtype) / keys_counted)
    return (scaled + _group(shift, mean)).to(attn_output.dtype)


def _group(
    factor: Float[Tensor, "B H T 1"], rows: Float[Tensor, "B Hkv #T Dv"]
) -> Float[Tensor, "B H T Dv"]:
    """Multiply without repeating the rows of a key/value head for its query heads."""
    num_heads, num_row_heads = factor.shape[1], rows.shape[1]
    if num_heads == num_row_heads:
        return factor * rows
    grouped = factor.unflatten(1, (num_row_heads, num_heads // num_row_heads))
    return (grouped * rows.unsqueeze(2)).flatten(1, 2)


def _visible_mean(attn_output: Tensor, value: Tensor, mask: AttentionMask) -> Tensor:
    """Average the visible values: fused attention in which every score is zero."""
    batch, num_heads, num_queries, _ = attn_output.shape
    visible = mask.visible()
    assert visible is not None
    if visible.shape[1] == 1:
        num_heads = value.shape[1]
    query = value.new_zeros(batch, num_heads, num_queries, value.shape[-1])
    key = value.new_zeros(()).expand(value.shape)
    return F.scaled_dot_product_attention(
        query, key, value, visible, enable_gqa=num_heads != value.shape[1]
    )


def affine_weights(
    attn_weights: Float[Tensor, "B H T S"],
    alpha: Float[Tensor, "B H T 1"],
    alpha_mean: Float[Tensor, "#H 1 1"],
    visible: Tensor | None,
    keys_counted: int | None = None,
) -> Float[Tensor, "B H T S"]:
    """Scale and shift the attention weights themselves: the equation, plain.

        weights[t, s] = alpha[t] * attn_weights[t, s] + (alpha_mean - alpha[t]) / N,  s visible

    Args:
        attn_weights: Weights before, zero where masked.
        alpha: Factor per query and head.
        alpha_mean: Running mean of alpha.
        visible: True = may attend, broadcastable, or None for all.
        keys_counted: N; None counts the keys visible to each query.

    Returns:
        Weights that may be negative (alpha .8, alpha_mean .4 and weights (.1, .9) give
        (-.12, .52)), with a row sum of ``alpha_mean`` if N counts the visible keys; zero where
        masked. The 1-norm of a row can reach 1.5.

    Source: Bae et al. 2026, arXiv 2602.23057; N is open there (METHODS 1).
    """
    seen = torch.ones_like(attn_weights) if visible is None else visible.to(attn_weights.dtype)
    seen = seen.expand_as(attn_weights)
    count = seen.sum(dim=-1, keepdim=True).clamp_min(1.0)
    divisor = count if keys_counted is None else keys_counted
    shift = ((alpha_mean - alpha) / divisor).to(attn_weights.dtype)
    return alpha.to(attn_weights.dtype) * attn_weights + shift * seen

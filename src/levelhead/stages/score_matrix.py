"""Attention through the T x S matrix of scores, on a CPU, where no fused kernel does better.

Two cases: a position bias that learns, which no fused kernel gives a gradient, and a matrix that
is smaller than the queries themselves (the channels of cross-covariance attention).
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from levelhead.score_tiles import AffineTerms, TiledAttention, fits_score_tiles, may_be_empty
from levelhead.shapes import at_least_float32, without_autocast


def learns_on_cpu(attn_bias: Tensor) -> bool:
    """Whether a bias needs a gradient where no fused kernel gives one.

    Args:
        attn_bias: The bias.
    """
    return attn_bias.requires_grad and attn_bias.device.type == "cpu"


def is_smaller_than_queries(
    query: Float[Tensor, "B H T D"], key: Float[Tensor, "B Hkv S D"]
) -> bool:
    """Whether the scores of a call on a CPU take less room than its queries.

    A compiler is told no: a graph shall not depend on the length.

    Args:
        query: Queries.
        key: Keys.
    """
    if torch.compiler.is_compiling() or query.device.type != "cpu":
        return False
    return key.shape[2] < query.shape[3]


def attention_by_score_matrix(
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B Hkv S D"],
    value: Float[Tensor, "B Hkv S Dv"],
    attn_bias: Float[Tensor, "#B #H #T #S"] | None,
    allowed: Bool[Tensor, "#B #H #T #S"] | None,
    scale: float,
    dropout_p: float = 0.0,
    sink_score: Float[Tensor, " H"] | None = None,
    affine: AffineTerms | None = None,
) -> Float[Tensor, "B H T Dv"]:
    """Attend by the T x S form, tile by tile (``score_tiles``) where that can be.

        attn_output = [alpha * softmax(scale * query @ key^T + attn_bias) + shift] @ value

    Args:
        query: Queries.
        key: Keys; ``Hkv`` divides ``H``.
        value: Values.
        attn_bias: Added to the scores; -inf forbids. Or None.
        allowed: True = may attend, or None for all.
        scale: Factor on the dot product.
        dropout_p: Probability of dropping a weight.
        sink_score: Unscaled score of an extra key without a value, or None for none.
        affine: What scales and shifts the weights of the softmax, or None for nothing.

    Returns:
        One output per query and head, the heads of a token side by side in memory where tokens
        are rows, as fused kernels lay them; zeros where a query may attend to nothing.
    """
    num_groups = query.shape[1] // key.shape[1]
    if num_groups > 1:
        key, value = (rows.repeat_interleave(num_groups, dim=1) for rows in (key, value))
    alpha, shift, seen = affine or (None, None, None)

    def plain(query, key, value, attn_bias, sink_score, alpha, shift) -> Tensor:
        weights = _weights(query, key, attn_bias, sink_score, allowed, scale)
        if dropout_p > 0:
            weights = F.dropout(weights, dropout_p)
        if alpha is not None:
            weights = alpha * weights + (shift if seen is None else shift * seen)
        return weights.to(value.dtype) @ value

    learning = (query, key, value, attn_bias, sink_score, alpha, shift)
    if not fits_score_tiles(query, dropout_p, *learning[1:], seen, allowed):
        return token_major(plain(*learning))
    return TiledAttention.apply(*learning, seen, allowed, scale, plain)  # pyright: ignore[reportReturnType]


def token_major(attn_output: Float[Tensor, "B H T Dv"]) -> Float[Tensor, "B H T Dv"]:
    """Lay the heads of a token side by side in memory, as the fused kernels do.

    Merging the heads is free then, and what comes between shares one layout with its gradient.

    Args:
        attn_output: One output per query and head.

    Returns:
        The same numbers.
    """
    return attn_output.transpose(1, 2).contiguous().transpose(1, 2)


def _weights(
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B H S D"],
    attn_bias: Float[Tensor, "#B #H #T #S"] | None,
    sink_score: Float[Tensor, " H"] | None,
    allowed: Bool[Tensor, "#B #H #T #S"] | None,
    scale: float,
) -> Float[Tensor, "B H T S"]:
    """Return the weights of the keys by public operators."""
    compute_dtype = at_least_float32(query.dtype)
    with without_autocast(query.device.type):
        scores = scale * query.to(compute_dtype) @ key.to(compute_dtype).mT
    if attn_bias is not None:
        scores = scores + attn_bias.to(compute_dtype)
    if allowed is not None:
        # Added, not filled in: a constant needs no backward pass.
        zero = torch.zeros((), dtype=compute_dtype, device=query.device)
        scores = scores + torch.where(allowed, zero, -torch.inf)
    if sink_score is None:
        return _safe_softmax(scores, may_be_empty(attn_bias, allowed))
    sink = sink_score.to(compute_dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]


def _safe_softmax(scores: Tensor, may_be_empty: bool) -> Tensor:
    """Softmax; a row of -inf gives zeros, with a zero gradient."""
    if not may_be_empty:
        return scores.softmax(dim=-1)
    empty = (scores.detach() == -torch.inf).all(dim=-1, keepdim=True)
    return scores.masked_fill(empty, 0.0).softmax(dim=-1).masked_fill(empty, 0.0)

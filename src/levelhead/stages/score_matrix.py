"""Attention through the T x S matrix of scores, on a CPU, where no fused kernel does better.

Two cases: a position bias that learns, which no fused kernel gives a gradient, and a matrix that
is smaller than the queries themselves (the channels of cross-covariance attention).
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

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
) -> Float[Tensor, "B H T Dv"]:
    """Attend by the T x S form, with as few passes over the scores as the gradient allows.

        attn_output = softmax(scale * query @ key^T + attn_bias) @ value

    Args:
        query: Queries.
        key: Keys; ``Hkv`` divides ``H``.
        value: Values.
        attn_bias: Added to the scores; -inf forbids. Or None.
        allowed: True = may attend, or None for all.
        scale: Factor on the dot product.
        dropout_p: Probability of dropping a weight.
        sink_score: Unscaled score of an extra key without a value, or None for none.

    Returns:
        One output per query and head; zeros where a query may attend to nothing.
    """
    compute_dtype = at_least_float32(query.dtype)
    num_groups = query.shape[1] // key.shape[1]
    if num_groups > 1:
        key, value = (rows.repeat_interleave(num_groups, dim=1) for rows in (key, value))
    query = query.to(compute_dtype) * scale if scale != 1.0 else query.to(compute_dtype)
    key = key.to(compute_dtype)
    # Added, not filled in: a constant needs no backward pass.
    hidden = None
    if allowed is not None:
        zero = torch.zeros((), dtype=compute_dtype, device=query.device)
        hidden = torch.where(allowed, zero, -torch.inf)
    with without_autocast(query.device.type):
        scores = _scores(query, key, attn_bias, hidden)
    if sink_score is not None:
        attn_weights = _sink_softmax(scores, sink_score)
    else:
        attn_weights = _safe_softmax(scores, _may_be_empty(attn_bias, allowed))
    if dropout_p > 0:
        attn_weights = F.dropout(attn_weights, dropout_p)
    return attn_weights.to(value.dtype) @ value


def token_major(attn_output: Float[Tensor, "B H T Dv"]) -> Float[Tensor, "B H T Dv"]:
    """Lay the heads of a token side by side in memory, as the fused kernels do.

    Merging the heads is free then, and what comes between shares one layout with its gradient.

    Args:
        attn_output: One output per query and head.

    Returns:
        The same numbers.
    """
    return attn_output.transpose(1, 2).contiguous().transpose(1, 2)


def _scores(query: Tensor, key: Tensor, *added: Tensor | None) -> Tensor:
    scores = query @ key.mT
    for part in added:
        if part is not None:
            scores.add_(part.to(scores.dtype))
    return scores


def _sink_softmax(scores: Tensor, sink_score: Tensor) -> Tensor:
    sink = sink_score.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]


def _may_be_empty(attn_bias: Tensor | None, allowed: Tensor | None) -> bool:
    """Whether a query could be left without a key; looks at no full T x S matrix."""
    if torch.compiler.is_compiling():
        return True
    if attn_bias is not None and attn_bias.numel() > 0 and attn_bias.amin().item() == -torch.inf:
        return True
    return allowed is not None and not bool(allowed.any(dim=-1).all())


def _safe_softmax(scores: Tensor, may_be_empty: bool) -> Tensor:
    """Softmax; a row of -inf gives zeros, with a zero gradient."""
    if not may_be_empty:
        return scores.softmax(dim=-1)
    empty = (scores.detach() == -torch.inf).all(dim=-1, keepdim=True)
    return scores.masked_fill(empty, 0.0).softmax(dim=-1).masked_fill(empty, 0.0)

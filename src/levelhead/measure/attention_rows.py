"""Sensitivity and head similarity of an attention, block by block, never all T x S weights."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from levelhead.measure.row_statistics import head_similarity_sums
from levelhead.measure.sensitivity import Sensitivity, sensitivity, sink_sensitivity
from levelhead.measure.streaming import DEFAULT_QUERIES, AttentionScores, ScoreBlock
from levelhead.shapes import require


def attention_sensitivity(
    scores: AttentionScores,
    *,
    num_queries: int | None = None,
    tol: float = 1e-6,
    real_queries: Bool[Tensor, "B T"] | None = None,
) -> tuple[Sensitivity, Int[Tensor, " N"]]:
    """Bound theta of the rows of an attention, block by block; see ``sensitivity``.

    With a sink: the norm of the Jacobian from key scores to key weights, ``sink_sensitivity``.

    Args:
        scores: Queries, keys, scale and masks.
        num_queries: How many queries to look at, evenly spaced; None for all.
        tol: Largest width of the bounds.
        real_queries: False for queries that are padding; they are left out.

    Returns:
        Bounds ``[B, H, N]`` (NaN for rows without a key and padding), and the queries looked at.

    Raises:
        ValueError: Less than one query, ``tol`` out of range, or a score that is NaN or +inf.
    """
    scores, query_idx = scores.detached(), scores.sample(num_queries)
    shape = (*scores.query.shape[:2], len(query_idx))
    bounds = torch.empty(2, *shape, dtype=torch.float64, device=scores.query.device)
    for block in scores.blocks(query_idx):
        attn_weights = _weights(block, scores.sink_score, real_queries)
        row_bounds = sensitivity if scores.sink_score is None else sink_sensitivity
        found = row_bounds(attn_weights, tol=tol)
        where = (block.batch, block.heads, block.columns)
        bounds[0][where], bounds[1][where] = found.lower, found.upper
    if real_queries is not None:
        bounds.masked_fill_(~real_queries[:, None, query_idx], torch.nan)
    return Sensitivity(bounds[0], bounds[1]), query_idx


def attention_head_similarity(
    scores: AttentionScores,
    *,
    num_queries: int | None = DEFAULT_QUERIES,
    real_queries: Bool[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B H H"]:
    """Compare the heads of an attention, block by block; see ``row_statistics.head_similarity``.

    Args:
        scores: Queries, keys, scale and masks.
        num_queries: How many queries to look at, evenly spaced; None for all.
        real_queries: False for queries that are padding; they are left out.

    Returns:
        Mean cosine of the rows of each pair of heads; NaN where no query counts.

    Raises:
        ValueError: Less than one query.
    """
    scores = scores.detached()
    num_heads = scores.num_heads
    shape = (scores.query.shape[0], num_heads, num_heads)
    total = torch.zeros(shape, dtype=scores.compute_dtype, device=scores.query.device)
    count = torch.zeros_like(total)
    for block in scores.blocks(scores.sample(num_queries), whole_heads=True):
        sums = head_similarity_sums(_weights(block, scores.sink_score, real_queries))
        total[block.batch] += sums[0]
        count[block.batch] += sums[1]
    return (total / count.clamp(min=1)).masked_fill(count == 0, torch.nan)


def _weights(
    block: ScoreBlock,
    sink_score: Float[Tensor, " H"] | None,
    real_queries: Bool[Tensor, "B T"] | None,
) -> Tensor:
    """Softmax weights of the keys; zeros where a query may attend to nothing or is padding."""
    if real_queries is not None:
        is_padding = ~real_queries[block.batch, block.query_idx]
        block.scores.masked_fill_(is_padding[:, None, :, None], -torch.inf)
    largest = block.scores.amax(-1, keepdim=True)
    broken = largest.isnan() | (largest == torch.inf)
    require(not broken.any(), "scores must not be NaN or +inf", f"{int(broken.sum())} such rows")
    sink = torch.full_like(largest[:1, :, :1], -torch.inf)
    if sink_score is not None:
        sink = sink_score[block.heads].to(largest.dtype)[:, None, None]
    largest = torch.maximum(largest, sink)
    largest = torch.where(largest == -torch.inf, 0, largest)
    exps = block.scores.sub_(largest).exp_()
    total = exps.sum(-1, keepdim=True) + (sink - largest).exp()
    return exps.div_(torch.where(total > 0, total, 1))

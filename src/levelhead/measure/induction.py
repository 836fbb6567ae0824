"""Does a head continue what it has seen before? The induction score, block by block.

A B ... A -> B:   a query whose token came before attends to what followed it then
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from levelhead.measure.streaming import DEFAULT_QUERIES, AttentionScores
from levelhead.shapes import complaint


def induction_weights(
    scores: AttentionScores,
    token_ids: Int[Tensor, "B T"],
    *,
    num_queries: int | None = DEFAULT_QUERIES,
    real_queries: Bool[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, "B H N"], Int[Tensor, " N"]]:
    """Weight on the token after the last earlier occurrence of the query's own token.

        induction[t] = p[t, s + 1],   s = max{s < t - 1 : token_ids[s] = token_ids[t]}

    An induction head puts most of its weight there whatever the tokens mean. Taken on random
    tokens said twice it is the prefix-matching score; on prose, repetition has other reasons too.

    Args:
        scores: Queries, keys, scale and masks of a self-attention, as many keys as queries.
        token_ids: What the model read.
        num_queries: How many queries to look at, evenly spaced; None for all.
        real_queries: False for queries that are padding; they are left out.

    Returns:
        Weights in [0, 1] (NaN where the token did not come before, or what followed it may not be
        attended to), and the queries looked at.

    Raises:
        ValueError: Shapes that do not fit, or less than one query.

    Source: Olsson et al. 2022, arXiv 2209.11895, prefix matching score.
    """
    wanted = [scores.query.shape[0], scores.num_queries]
    if list(token_ids.shape) != wanted or scores.num_keys != scores.num_queries:
        came = f"token_ids {list(token_ids.shape)}, {scores.num_keys} keys"
        raise ValueError(
            complaint("token_ids must hold a number a query and key", came, f"{wanted}")
        )
    scores, query_idx = scores.detached(), scores.sample(num_queries)
    followers = _followers(token_ids.to(scores.query.device))[:, query_idx]
    if real_queries is not None:
        followers = followers.masked_fill(~real_queries[:, query_idx], -1)
    shape = (*scores.query.shape[:2], len(query_idx))
    found = torch.full(shape, torch.nan, dtype=scores.compute_dtype, device=scores.query.device)
    for block in scores.blocks(query_idx):
        at = followers[block.batch, block.columns]
        at = at[:, None, :, None].expand(-1, block.scores.shape[1], -1, 1)
        chosen = block.scores.gather(-1, at.clamp(min=0))
        lse = block.scores.logsumexp(-1, keepdim=True)
        if scores.sink_score is not None:
            sink = scores.sink_score[block.heads].to(lse)[:, None, None]
            lse = torch.logaddexp(lse, sink)
        is_known = (at >= 0) & (chosen > -torch.inf)
        weights = (chosen - lse).exp().masked_fill(~is_known, torch.nan)
        found[block.batch, block.heads, block.columns] = weights[..., 0]
    return found, query_idx


def _followers(token_ids: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """The position after the last earlier occurrence of each token, -1 where there is none.

    A token twice in a row is followed by itself, which is no continuation.
    """
    ordered, order = token_ids.sort(stable=True, dim=-1)
    is_again = ordered[:, 1:] == ordered[:, :-1]
    after = torch.where(is_again, order[:, :-1] + 1, -1)
    followers = torch.full_like(order, -1).scatter(-1, order[:, 1:], after)
    positions = torch.arange(token_ids.shape[1], device=token_ids.device)
    return followers.masked_fill(followers == positions, -1)

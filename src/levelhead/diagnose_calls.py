"""One attention call seen as scores, weights, outputs: what the measures of a diagnosis share."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from levelhead.capture_tokens import without_padding
from levelhead.measure.streaming import AttentionScores, ScoreBlock
from levelhead.sites.calls import AttentionCall
from levelhead.sites.sites import AttentionSite

WINDOW_FILL = -50.0
"""Shifted windows add -100 to the scores of other windows' keys; that means "may not attend"."""


@dataclass(frozen=True)
class FirstTokens:
    """What a Jacobian needs of the first tokens of one sample.

    Attributes:
        hidden_states: ``[N, E]``.
        attn_mask: ``[N, N]``, True = may attend, or None.
        query: ``[H, N, D]``, as the kernel saw it.
        key: ``[Hkv, N, D]``, likewise.
        scale: The kernel's.
        dtype: Of the kernel's query.
        attn_bias: ``[H, N, N]``, finite, or None.
        soft_cap: Or None.
        sink_score: ``[H]``, or None.
    """

    hidden_states: Float[Tensor, "N E"]
    attn_mask: Bool[Tensor, "N N"] | None
    query: Float[Tensor, "H N D"]
    key: Float[Tensor, "Hkv N D"]
    scale: float
    dtype: torch.dtype
    attn_bias: Float[Tensor, "H N N"] | None
    soft_cap: float | None
    sink_score: Float[Tensor, " H"] | None


def first_tokens_of(
    call: AttentionCall,
    hidden_states: Float[Tensor, "B T E"],
    num_first: int,
    real_queries: Bool[Tensor, "B T"] | None = None,
) -> FirstTokens | None:
    """Keep the first tokens of the first sample, where tokens ask and are asked alike.

    Args:
        call: What its kernel saw.
        hidden_states: Of the call.
        num_first: How many tokens.
        real_queries: False for padding, which is no token.

    Returns:
        Copies, or None where the queries are not the tokens of the hidden states.
    """
    if not call.query.shape[2] == call.key.shape[2] == hidden_states.shape[1]:
        return None
    visible, chosen = call.mask().visible(), torch.arange(call.query.shape[2])
    if real_queries is not None:
        chosen = real_queries[0].nonzero()[:, 0].cpu()
    chosen = chosen[:num_first]
    if visible is not None:
        size = (call.query.shape[2], call.key.shape[2])
        visible = visible[0, 0].expand(size)[chosen][:, chosen]
    return FirstTokens(
        hidden_states[0, chosen].double(), visible,
        call.query[0, :, chosen].double(), call.key[0, :, chosen].double(),
        call.scale, call.query.dtype, _bias_of(call, chosen), call.soft_cap, call.sink_score,
    )  # fmt: skip


def _bias_of(call: AttentionCall, chosen: Int[Tensor, " N"]) -> Float[Tensor, "H N N"] | None:
    """The finite part of a bias on the first sample; a float mask of 0 and -inf is none."""
    if call.attn_bias is None:
        return None
    num_heads, size = call.query.shape[1], (call.query.shape[2], call.key.shape[2])
    bias = call.attn_bias[0].expand(num_heads, *size)[:, chosen][:, :, chosen].double()
    bias = bias.masked_fill(bias <= torch.finfo(call.attn_bias.dtype).min / 2, 0.0)
    return bias if bool(bias.any()) else None


def scores_of(call: AttentionCall) -> AttentionScores:
    """Return what decides the scores of a call.

    Args:
        call: What its kernel saw.

    Returns:
        The scores, not yet computed.
    """
    bias = call.attn_bias
    if bias is not None and call.site.kind == "window":
        bias = bias.masked_fill(bias <= WINDOW_FILL, -torch.inf)
    return AttentionScores(
        call.query, call.key, call.scale, call.attn_mask, bias, call.is_causal,
        call.sink_score, call.soft_cap,
    )  # fmt: skip


def broken_heads(call: AttentionCall, real_queries: Bool[Tensor, "B T"] | None) -> set[int]:
    """Return the query heads of a call whose query, key or value is not finite.

    Args:
        call: What its kernel saw.
        real_queries: False for queries that are padding. Their keys and values count: a weight of
            zero times NaN is NaN.

    Returns:
        Head numbers.
    """
    query = without_padding(call.query, real_queries)
    if all(map(_has_finite_sum, (query, call.key, call.value))):
        return set()
    group = call.query.shape[1] // call.key.shape[1]

    def broken(tensor: Tensor) -> Bool[Tensor, " H"]:
        return ~tensor.isfinite().all(dim=(0, 2, 3))

    found = broken(query) | (broken(call.key) | broken(call.value)).repeat_interleave(group)
    return set(found.nonzero()[:, 0].tolist())


def _has_finite_sum(tensor: Tensor) -> bool:
    """Whether all numbers are finite, in one pass; False may be an overflow of their sum."""
    return bool(tensor.sum().isfinite())


def head_output_weights(site: AttentionSite) -> Float[Tensor, "H D E"] | None:
    """Return the output projection by head.

    Args:
        site: Where.

    Returns:
        ``W_O`` of each head, or None where there is none that can be read.
    """
    if site.layout.o is None or site.output_norm is not None:
        return None
    try:
        o_weight = site.layout.o.weight.read()
    except ValueError:
        return None
    return o_weight.unflatten(0, (site.num_heads, -1))


def weight_blocks(
    scores: AttentionScores,
    query_idx: Int[Tensor, " N"],
    real_queries: Bool[Tensor, "B T"] | None = None,
) -> Iterator[tuple[ScoreBlock, Float[Tensor, "b h t s"]]]:
    """Yield the softmax weights of chosen queries, block by block.

    Args:
        scores: Finite scores.
        query_idx: Ascending positions of the queries.
        real_queries: False for queries that are padding.

    Yields:
        The block, and its weights; zeros where a query may attend to nothing or is padding.
    """
    for block in scores.blocks(query_idx):
        if real_queries is not None:
            is_padding = ~real_queries[block.batch, block.query_idx]
            block.scores.masked_fill_(is_padding[:, None, :, None], -torch.inf)
        lse = block.scores.logsumexp(-1, keepdim=True)
        if scores.sink_score is not None:
            sink = scores.sink_score[block.heads].to(lse)[:, None, None]
            lse = torch.logaddexp(lse, sink)
        yield block, (block.scores - lse.nan_to_num(neginf=0.0)).exp()


def block_outputs(
    block: ScoreBlock,
    weights: Float[Tensor, "b h t s"],
    value: Float[Tensor, "B Hkv S Dv"],
    group: int,
) -> Float[Tensor, "b h t Dv"]:
    """Multiply the weights of a block with its values.

    Args:
        block: Says which samples and heads.
        weights: Of the block; keys that none of its queries may attend to are cut off.
        value: All values.
        group: Query heads that share a key head.

    Returns:
        The outputs.
    """
    heads = torch.arange(block.heads.start, block.heads.stop, device=value.device)
    chosen = value[block.batch, heads // group, : weights.shape[-1]]
    return weights @ chosen.to(weights.dtype)

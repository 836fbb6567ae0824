"""Parts that turn scores into weights."""

import torch
from torch import Tensor, nn

from levelhead.kernels_mapped import Then
from levelhead.parts.base import AttentionShape, Part
from levelhead.score_tiles import AffineTerms, lies_in_columns
from levelhead.shapes import at_least_float32
from levelhead.stages.masks import AttentionMask
from levelhead.stages.score_matrix import (
    attention_by_score_matrix,
    is_smaller_than_queries,
    learns_on_cpu,
)
from levelhead.stages.softmax import sink_attention, softmax_attention

Rows = tuple[Tensor, Tensor, Tensor]
KernelCall = tuple[Tensor | None, bool, float, float]
"""Mask, whether it is causal, scale, probability of dropping a weight."""


class Softmax(Part):
    """Weights that sum to one."""

    def extra_score(self, like: Tensor) -> Tensor | None:
        """Return the score of an extra key per query head of ``like``, or None without one."""
        return None

    def fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: AttentionMask,
        scale: float,
        dropout_p: float,
        then: Then | AffineTerms | None = None,
    ) -> Tensor:
        """Return the attention output without a T x S matrix, where torch has a kernel for it.

        ``then`` is what is done to the output, or where ``builds_scores`` holds to the weights.
        """
        if self.builds_scores(query, key, mask):
            return self.by_scores(query, key, value, mask, scale, dropout_p, then)
        assert not isinstance(then, AffineTerms)
        call = (*mask.for_sdpa(query.dtype), scale, dropout_p)
        return self.by_kernel((query, key, value), call, then)

    def by_kernel(self, rows: Rows, call: KernelCall, then: Then | None) -> Tensor:
        """Return the attention output by a fused kernel."""
        attn_mask, is_causal, scale, dropout_p = call
        return softmax_attention(*rows, attn_mask, is_causal, scale, dropout_p, then)

    def builds_scores(self, query: Tensor, key: Tensor, mask: AttentionMask) -> bool:
        """Say whether a call is faster through the matrix of scores than by a fused kernel."""
        if mask.bias is not None and learns_on_cpu(mask.bias):
            return True
        return lies_in_columns(key) and is_smaller_than_queries(query, key)

    def by_scores(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: AttentionMask,
        scale: float,
        dropout_p: float,
        then: Then | AffineTerms | None = None,
    ) -> Tensor:
        """Return the attention output through the matrix of scores."""
        sink, affine = self.extra_score(query), then if isinstance(then, AffineTerms) else None
        attn_output = attention_by_score_matrix(
            query, key, value, mask.bias, mask.allowed(), scale, dropout_p, sink, affine
        )
        return attn_output if then is None or isinstance(then, AffineTerms) else then(attn_output)

    def plain(self, scores: Tensor, extra_score: Tensor | None) -> Tensor:
        """Return the weights of masked scores; a row without any allowed key gives zeros.

        ``extra_score`` is what the method of this name returned.
        """
        compute_dtype = at_least_float32(scores.dtype)
        empty = (scores == -torch.inf).all(dim=-1, keepdim=True)
        weights = scores.masked_fill(empty, 0.0).softmax(dim=-1, dtype=compute_dtype)
        return weights.masked_fill(empty, 0.0).to(scores.dtype)


class OffByOne(Softmax):
    """One more in the denominator: a sink whose score is fixed at zero."""

    def sink_score(self, like: Tensor) -> Tensor:
        """Return the score of the extra key, one per query head of ``like``."""
        return like.new_zeros(like.shape[1])

    def extra_score(self, like: Tensor) -> Tensor:
        return self.sink_score(like)

    def builds_scores(self, query: Tensor, key: Tensor, mask: AttentionMask) -> bool:
        return super().builds_scores(query, key, mask) or is_smaller_than_queries(query, key)

    def by_kernel(self, rows: Rows, call: KernelCall, then: Then | None) -> Tensor:
        attn_output = sink_attention(*rows, self.sink_score(rows[0]), *call)
        return attn_output if then is None else then(attn_output)

    def plain(self, scores: Tensor, extra_score: Tensor | None) -> Tensor:
        assert extra_score is not None
        compute_dtype = at_least_float32(scores.dtype)
        sink = extra_score.to(compute_dtype).view(1, -1, 1, 1)
        with_sink = torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], dim=-1)
        return with_sink.softmax(dim=-1, dtype=compute_dtype)[..., :-1].to(scores.dtype)


class Sink(OffByOne):
    """A sink whose score every head learns, starting at ``start``."""

    def __init__(self, shape: AttentionShape, start: float = 0.0):
        super().__init__()
        self.start = float(start)
        self.score = nn.Parameter(torch.empty(shape.num_heads, **shape.factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.score, self.start)

    def sink_score(self, like: Tensor) -> Tensor:
        return self.score

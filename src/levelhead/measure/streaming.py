"""The scores of an attention, block of queries by block of queries, never all T x S of them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from levelhead.shapes import (
    Key,
    Query,
    Scores,
    at_least_float32,
    check_attention_inputs,
    complaint,
)
from levelhead.stages.masks import resolve_mask
from levelhead.stages.scores import cap_scores

_BLOCK_NUMBERS = {"cpu": 1 << 18, "cuda": 1 << 24}  # scores held at once: 1 MiB, 64 MiB in float32
_CAUSAL_STRETCHES = 8
"""A block ends with the last key its last query sees: short stretches of queries waste less."""
DEFAULT_QUERIES = 128
"""Queries looked at where not all are asked for: evenly spaced, the middle of each stretch."""


@dataclass(frozen=True)
class ScoreBlock:
    """Masked scores of some queries of some heads.

    Attributes:
        scores: ``[b, h, t, s]`` in float32 or wider, -inf where a query may not attend. Keys that
            none of the queries may attend to under causality are cut off: s is at most S.
        batch: Which of the B samples.
        heads: Which of the H query heads.
        columns: Which of the chosen queries.
        query_idx: ``[t]`` which of the T queries they are.
        open_keys: Keys before this one are visible to all of these queries (0: not known).
    """

    scores: Scores
    batch: slice
    heads: slice
    columns: slice
    query_idx: Int[Tensor, " t"]
    open_keys: int


@dataclass(frozen=True)
class AttentionScores:
    """All that decides the scores of an attention; nothing is computed before it is asked for.

        scores = scale * query key^T, capped, plus attn_bias, -inf where masked

    Attributes:
        query: ``[B, H, T, D]``.
        key: ``[B, Hkv, S, D]``, ``Hkv`` dividing ``H``.
        scale: Factor on the dot product; ``D ** -0.5`` if None.
        attn_mask: Boolean, True = may attend; ``[T, S]`` or broadcastable to ``[B, H, T, S]``.
        attn_bias: Added to the scores, same shapes; values at or below ``finfo(dtype).min / 2``
            mean "may not attend".
        is_causal: Query t may attend to keys up to ``S - T + t``.
        sink_score: ``[H]`` score of a learned extra key without a value, or None. ``off_by_one``
            is a sink of score 0.
        soft_cap: ``cap * tanh(scores / cap)`` before the mask, or None.
    """

    query: Query
    key: Key
    scale: float | None = None
    attn_mask: Tensor | None = None
    attn_bias: Tensor | None = None
    is_causal: bool = False
    sink_score: Tensor | None = None
    soft_cap: float | None = None

    def __post_init__(self):
        check_attention_inputs(self.query, self.key, self.key)
        problem = self._problem()
        if problem:
            raise ValueError(problem)
        # Shapes and rules are checked here, on the meta device because the check copies the bias.
        bias = None if self.attn_bias is None else self.attn_bias.to("meta")
        resolve_mask(self.query, self.key, self.attn_mask, bias, self.is_causal)

    def _problem(self) -> str:
        sink = self.sink_score
        if min(*self.query.shape, self.num_keys) < 1:
            shapes = f"query {list(self.query.shape)}, key {list(self.key.shape)}"
            return complaint("query and key must not be empty", shapes)
        if sink is not None and list(sink.shape) != [self.num_heads]:
            came = f"sink_score {list(sink.shape)}"
            return complaint("sink_score must hold one score a head", came, f"[{self.num_heads}]")
        scale, soft_cap = (1.0 if n is None else n for n in (self.scale, self.soft_cap))
        if not math.isfinite(scale) or not 0 < soft_cap < math.inf:
            came = f"scale={self.scale}, soft_cap={self.soft_cap}"
            return complaint("scale must be finite and soft_cap positive", came)
        return ""

    @property
    def num_heads(self) -> int:
        """H."""
        return self.query.shape[1]

    @property
    def num_queries(self) -> int:
        """T."""
        return self.query.shape[2]

    @property
    def num_keys(self) -> int:
        """S."""
        return self.key.shape[2]

    @property
    def compute_dtype(self) -> torch.dtype:
        """float32, or float64 where query or key is float64."""
        return at_least_float32(self.query.dtype, self.key.dtype)

    def sample(self, num_queries: int | None) -> Int[Tensor, " N"]:
        """Choose queries: the middle of each of ``num_queries`` equal stretches.

        Args:
            num_queries: How many; None or anything from T up means all.

        Returns:
            Ascending positions.

        Raises:
            ValueError: Less than one query.
        """
        if num_queries is not None and num_queries < 1:
            raise ValueError(
                complaint(
                    "num_queries must be at least 1", f"num_queries={num_queries}", "None for all"
                )
            )
        total = self.num_queries
        if num_queries is None or num_queries >= total:
            return torch.arange(total, device=self.query.device)
        steps = torch.arange(num_queries, device=self.query.device)
        return (2 * steps + 1) * total // (2 * num_queries)

    def blocks(
        self, query_idx: Int[Tensor, " N"], *, whole_heads: bool = False
    ) -> Iterator[ScoreBlock]:
        """Walk over samples, heads and chosen queries in blocks of bounded size.

        Args:
            query_idx: Ascending positions of the queries to look at.
            whole_heads: Keep all heads of a query in one block.

        Yields:
            Blocks that cover each chosen query of each head once.
        """
        num_batch, num_kv_heads = self.key.shape[:2]
        group = self.num_heads // num_kv_heads
        room = max(1, _BLOCK_NUMBERS.get(self.query.device.type, 1 << 18) // self.num_keys)
        kv_step = num_kv_heads if whole_heads else 1
        query_step = _at_most(len(query_idx), room // (group * kv_step))
        if self.is_causal and query_step < len(query_idx):
            query_step = _at_most(query_step, -(-len(query_idx) // _CAUSAL_STRETCHES))
        if not whole_heads:
            kv_step = _at_most(num_kv_heads, room // (group * query_step))
        batch_step = _at_most(num_batch, room // (group * kv_step * query_step))
        if kv_step < num_kv_heads:
            batch_step = 1
        for batch in _slices(num_batch, batch_step):
            for kv_heads in _slices(num_kv_heads, kv_step):
                key = self.key[batch, kv_heads].to(self.compute_dtype)
                for columns in _slices(len(query_idx), query_step):
                    yield self._block(batch, kv_heads, columns, query_idx[columns], key)

    def _block(
        self,
        batch: slice,
        kv_heads: slice,
        columns: slice,
        query_idx: Int[Tensor, " t"],
        key: Key,
    ) -> ScoreBlock:
        group = self.num_heads // self.key.shape[1]
        heads = slice(kv_heads.start * group, kv_heads.stop * group)
        offset = self.num_keys - self.num_queries
        end = int(query_idx[-1]) + offset + 1 if self.is_causal else self.num_keys
        query = self.query[batch, heads][:, :, query_idx].to(self.compute_dtype) * self._scale()
        # The heads that share a key head side by side: one product for each key head.
        grouped = query.unflatten(1, (-1, group)).flatten(2, 3)
        scores = (grouped @ key[:, :, :end].mT).view(*query.shape[:3], end)
        if self.soft_cap is not None:
            scores = cap_scores(scores, self.soft_cap)
        open_keys = end
        if self.attn_mask is not None or self.attn_bias is not None:
            open_keys = 0
            mask = _part(self.attn_mask, batch, heads, query_idx, end)
            bias = _part(self.attn_bias, batch, heads, query_idx, end)
            scores = resolve_mask(query, key[:, :, :end], mask, bias).apply(scores)
        if self.is_causal:
            first = int(query_idx[0]) + offset + 1
            later = torch.arange(first, end, device=key.device) > query_idx[:, None] + offset
            scores[..., first:].masked_fill_(later, -torch.inf)
            open_keys = min(open_keys, first)
        return ScoreBlock(scores, batch, heads, columns, query_idx, open_keys)

    def _scale(self) -> float:
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale

    def detached(self) -> "AttentionScores":
        """Return the same without gradients.

        Returns:
            A copy that shares the tensors' memory.
        """
        sink = None if self.sink_score is None else self.sink_score.detach()
        bias = None if self.attn_bias is None else self.attn_bias.detach()
        return replace(
            self,
            query=self.query.detach(),
            key=self.key.detach(),
            sink_score=sink,
            attn_bias=bias,
        )


def first_tokens(
    documents: Bool[Tensor, "B S"] | Int[Tensor, "B S"],
) -> Bool[Tensor, "B S"]:
    """Mark the first real token of each document.

    Args:
        documents: Boolean: the marks themselves. Integers: the document of each token, negative
            for padding; a document starts where the number changes.

    Returns:
        True at the first token of each document.

    Raises:
        ValueError: Not two axes, or neither boolean nor integer.
    """
    if documents.ndim != 2 or documents.is_floating_point() or documents.is_complex():
        raise ValueError(
            complaint(
                "documents must be [B, S], boolean starts or integer document numbers",
                f"documents {list(documents.shape)} of {documents.dtype}",
            )
        )
    if documents.dtype == torch.bool:
        return documents
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return starts & (documents >= 0)


def _at_most(limit: int, wanted: int) -> int:
    return max(1, min(limit, wanted))


def _slices(total: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, total)) for start in range(0, total, step))


def _part(
    tensor: Tensor | None, batch: slice, heads: slice, query_idx: Int[Tensor, " t"], end: int
) -> Tensor | None:
    """The part of a mask or bias that belongs to a block; axes of size one stay."""
    if tensor is None:
        return None
    tensor = tensor if tensor.ndim == 4 else tensor[None, None]
    tensor = tensor if tensor.shape[0] == 1 else tensor[batch]
    tensor = tensor if tensor.shape[1] == 1 else tensor[:, heads]
    tensor = tensor if tensor.shape[2] == 1 else tensor[:, :, query_idx]
    return tensor if tensor.shape[3] == 1 else tensor[..., :end]

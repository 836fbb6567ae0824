"""Attention with capped scores on a CPU, where no fused kernel bends scores.

Blocks of scores that stay in the cache of a core, computed once in the forward pass and once more
in the backward pass; no matrix of scores is kept. With

    cap tanh(x / cap) = 2 cap sigmoid(2 x / cap) - cap

the constant drops out of the softmax, and torch's sigmoid takes a fifth of the time of its tanh.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from levelhead.modes import is_transformed
from levelhead.shapes import without_autocast
from levelhead.stages.masks import AttentionMask

_BLOCK_QUERIES = 64
_BLOCK_BYTES = 2**22
"""Of one block of scores for each thread: heads enough for threads to share."""
_DTYPES = (torch.float32, torch.float64)
_SCORE_ERROR = 1e-5
"""Scores are rounded as if they were as large as the cap: accepted up to this much."""


def fits_capped_attention(
    query: Float[Tensor, "B H T D"], mask: AttentionMask, dropout_p: float, soft_cap: float
) -> bool:
    """Say whether `CappedAttention` can take a call.

    Args:
        query: ``[B, H, T, D]``.
        mask: What is visible.
        dropout_p: Probability of dropping a weight.
        soft_cap: Half-width of the band of scores.

    Returns:
        False off the CPU, in half precision, with a cap so high that it costs the scores their
        digits, with dropout or a bias that learns, for a compiler and inside ``torch.func``.
    """
    if torch.compiler.is_compiling() or is_transformed() or dropout_p > 0 or query.numel() == 0:
        return False
    learns = mask.bias is not None and mask.bias.requires_grad
    if query.device.type != "cpu" or query.dtype not in _DTYPES or learns:
        return False
    return soft_cap * torch.finfo(query.dtype).eps <= _SCORE_ERROR


def _is_batched(grad: Tensor) -> bool:
    """Whether many gradients come at once (``is_grads_batched=True``)."""
    functorch = getattr(torch._C, "_functorch", None)
    return getattr(functorch, "is_legacy_batchedtensor", lambda tensor: False)(grad)


@dataclass(frozen=True)
class _Block:
    """Some queries of some heads of one sample, and the keys up to the last that they may see."""

    sample: int
    heads: slice
    start: int
    stop: int
    num_keys: int

    def rows(self, tensor: Float[Tensor, "B H T D"]) -> Float[Tensor, "h t D"]:
        """Return the block's queries, or what stands beside them."""
        return tensor[self.sample, self.heads, self.start : self.stop]

    def keys(self, tensor: Float[Tensor, "B H S D"]) -> Float[Tensor, "h s D"]:
        """Return the block's keys, or what stands beside them."""
        return tensor[self.sample, self.heads, : self.num_keys]

    def cut(self, tensor: Tensor) -> Tensor:
        """Return the block's part of a mask, whose axes may be of size one."""
        cuts = (slice(self.sample, self.sample + 1), self.heads, slice(self.start, self.stop),
                slice(self.num_keys))  # fmt: skip
        sizes = zip(tensor.shape, cuts, strict=True)
        return tensor[tuple(slice(None) if size == 1 else cut for size, cut in sizes)][0]


class _Scores:
    """The scores of a call, block by block, in buffers that are used again."""

    def __init__(self, query, key, sink_score, mask: AttentionMask, scale: float, cap: float):
        self.query, self.key, self.sink_score, self.mask = query, key, sink_score, mask
        self.scale, self.cap = scale, cap
        self.future = torch.ones(_BLOCK_QUERIES, _BLOCK_QUERIES, dtype=torch.bool).triu(1)
        row_bytes = (key.shape[2] + 1) * key.element_size()
        room = _BLOCK_BYTES * torch.get_num_threads() // (_BLOCK_QUERIES * row_bytes)
        self.num_heads = max(1, min(query.shape[1], room))
        self.buffers = query.new_empty(
            3, self.num_heads * _BLOCK_QUERIES * (key.shape[2] + 1)
        ).unbind()

    def blocks(self) -> Iterator[_Block]:
        """Yield all of them."""
        batch, num_heads, num_queries, _ = self.query.shape
        num_keys = self.key.shape[2]
        for sample in range(batch):
            for head in range(0, num_heads, self.num_heads):
                heads = slice(head, min(head + self.num_heads, num_heads))
                for start in range(0, num_queries, _BLOCK_QUERIES):
                    stop = min(start + _BLOCK_QUERIES, num_queries)
                    hidden = num_queries - stop if self.mask.is_causal else 0
                    yield _Block(sample, heads, start, stop, num_keys - hidden)

    def buffer(self, number: int, block: _Block, extra: int = 0) -> Tensor:
        """Return a buffer for the block's scores, with room for extra keys."""
        shape = (block.heads.stop - block.heads.start, block.stop - block.start)
        size = shape[0] * shape[1] * (block.num_keys + extra)
        return self.buffers[number][:size].view(*shape, block.num_keys + extra)

    def sigmoid(self, block: _Block) -> Float[Tensor, "h t s"]:
        """Return ``sigmoid(2 scale q k^T / cap)``."""
        rows = block.rows(self.query) * (2 * self.scale / self.cap)
        found = self.buffer(0, block)
        return torch.bmm(rows, block.keys(self.key).mT, out=found).sigmoid_()

    def weights(self, block: _Block, sigmoid: Tensor) -> Float[Tensor, "h t s_and_sink"]:
        """Return the weights, that of the sink last where there is one."""
        found = self.buffer(1, block, self.sink_score is not None)
        scores = found[..., : block.num_keys]
        torch.mul(sigmoid, 2 * self.cap, out=scores)  # all scores, the sink's too, plus cap
        self._mask(block, scores)
        if self.sink_score is not None:
            found[..., -1] = self.sink_score[block.heads, None] + self.cap
        torch.softmax(found, dim=-1, out=found)
        if self.sink_score is None and (self.mask.mask is not None or self.mask.bias is not None):
            found.masked_fill_(self._empty(block), 0.0)
        return found

    def _mask(self, block: _Block, scores: Tensor) -> None:
        if self.mask.bias is not None:
            scores.add_(block.cut(self.mask.bias))
        if self.mask.mask is not None:
            scores.masked_fill_(~block.cut(self.mask.mask), -torch.inf)
        if self.mask.is_causal:
            size = block.stop - block.start
            scores[..., block.num_keys - size :].masked_fill_(
                self.future[:size, :size], -torch.inf
            )

    def _empty(self, block: _Block) -> Tensor:
        visible = self.mask.rows(block.start, block.stop).visible()
        assert visible is not None
        rows = visible.any(dim=-1, keepdim=True)
        sample = min(block.sample, len(rows) - 1)
        return ~rows[sample, block.heads if rows.shape[1] > 1 else slice(None)]


class CappedAttention(torch.autograd.Function):
    """Softmax of capped scores, with or without a sink, times values.

        attn_output = softmax([cap tanh(scale q k^T / cap) + mask, sink_score])[..., :-1] v

    ``apply(query, key, value, sink_score or None, mask, scale, cap, plain)``: keys and values
    have the heads of the query, the mask's tensors get no gradient, and ``plain(query, key,
    value, sink_score)`` is the same by public operators, for second derivatives.
    """

    @staticmethod
    def forward(ctx, query, key, value, sink_score, mask, scale, cap, plain):
        scores = _Scores(query, key, sink_score, mask, scale, cap)
        batch, num_heads, num_queries, _ = query.shape
        output = value.new_empty(batch, num_queries, num_heads, value.shape[-1]).transpose(1, 2)
        with without_autocast("cpu"):
            for block in scores.blocks():
                weights = scores.weights(block, scores.sigmoid(block))[..., : block.num_keys]
                block.rows(output).copy_(torch.bmm(weights, block.keys(value)))
        ctx.save_for_backward(query, key, value, sink_score, mask.mask, mask.bias)
        ctx.mask = replace(mask, mask=None, bias=None)
        ctx.scale, ctx.cap, ctx.plain = scale, cap, plain
        return output

    @staticmethod
    def backward(ctx, *grads):
        query, key, value, sink_score, *parts = ctx.saved_tensors
        if torch.is_grad_enabled() or _is_batched(grads[0]):
            found = _plain_gradients(ctx.plain, query, key, value, sink_score, grads[0])
            return *found, None, None, None, None
        mask = replace(ctx.mask, mask=parts[0], bias=parts[1])
        with without_autocast("cpu"):
            scores = _Scores(query, key, sink_score, mask, ctx.scale, ctx.cap)
            return *_gradients(scores, value, grads[0]), None, None, None, None


def _plain_gradients(plain, query, key, value, sink_score, grad) -> list[Tensor | None]:
    """Return the gradients by public operators: they have gradients, and may be batched."""
    has_graph = torch.is_grad_enabled()
    with torch.enable_grad(), without_autocast("cpu"):
        # Views, for one may be made of another, or be the same: no gradient shall count twice.
        given = [t if t is None else t.view_as(t) for t in (query, key, value, sink_score)]
        inputs = [t if t is not None and t.requires_grad else None for t in given]
        learning = [t for t in inputs if t is not None]
        found = iter(torch.autograd.grad(plain(*given), learning, grad, create_graph=has_graph))
    return [None if t is None else next(found) for t in inputs]


def _gradients(scores: _Scores, value: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of query, key, value and of the sink's score, None without one."""
    query, key, sink_score = scores.query, scores.key, scores.sink_score
    grad_query, grad_key, grad_value = (torch.zeros_like(t) for t in (query, key, value))
    grad_sink = None if sink_score is None else torch.zeros_like(sink_score)
    for block in scores.blocks():
        sigmoid = scores.sigmoid(block)
        weights = scores.weights(block, sigmoid)
        seen = slice(block.num_keys)
        block.keys(grad_value).baddbmm_(weights[..., seen].mT, block.rows(grad))
        moved = scores.buffer(2, block, grad_sink is not None)
        torch.bmm(block.rows(grad), block.keys(value).mT, out=moved[..., seen])
        if grad_sink is not None:
            moved[..., -1] = 0.0
        torch.ops.aten._softmax_backward_data.out(
            moved, weights, -1, weights.dtype, grad_input=moved
        )
        if grad_sink is not None:
            grad_sink[block.heads] += moved[..., -1].sum(dim=-1)
        moved = moved[..., seen]
        torch.ops.aten.sigmoid_backward.grad_input(moved, sigmoid, grad_input=moved)
        block.rows(grad_query).copy_(torch.bmm(moved, block.keys(key)))
        block.keys(grad_key).baddbmm_(moved.mT, block.rows(query))
    slope = 4 * scores.scale  # of the score: 2 cap * sigmoid' * 2 scale / cap
    return grad_query.mul_(slope), grad_key.mul_(slope), grad_value, grad_sink

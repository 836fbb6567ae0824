"""Attention with capped scores on a CPU by torch's operators, tile by tile.

Tiles of scores that stay in the caches of the cores, computed once in the forward pass and once
more in the backward pass; no matrix of scores is kept. With

    cap tanh(x / cap) = 2 cap sigmoid(2 x / cap) - cap

the constant drops out of the softmax, and torch's sigmoid takes a fifth of the time of its tanh;
weights are powers of two, which take 0.4 of the time of powers of e.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from levelhead.stages.masks import AttentionMask

_TILE_QUERIES = 256
_TILE_KEYS = 256
_DIAGONAL_KEYS = 128
_TILE_BYTES = 3 * 2**19
"""Of one tile of scores for each thread: heads enough for the threads to share."""
_LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class _Tile:
    """Some queries and some keys, of some heads of one sample."""

    sample: int
    heads: slice
    queries: slice
    keys: slice

    def of_queries(self, tensor: Float[Tensor, "B H T *"]) -> Float[Tensor, "h t *"]:
        """Return the queries' part of a tensor."""
        return tensor[self.sample, self.heads, self.queries]

    def of_keys(self, tensor: Float[Tensor, "B H S *"]) -> Float[Tensor, "h s *"]:
        """Return the keys' part of a tensor."""
        return tensor[self.sample, self.heads, self.keys]

    def of_mask(self, tensor: Tensor) -> Tensor:
        """Return the tile's part of a mask, whose axes may be of size one."""
        cuts = (slice(self.sample, self.sample + 1), self.heads, self.queries, self.keys)
        sizes = zip(tensor.shape, cuts, strict=True)
        return tensor[tuple(slice(None) if size == 1 else cut for size, cut in sizes)][0]


class CappedTiles:
    """The scores of a call, tile by tile, in buffers that are used again.

    A level is where a capped score lies in its band, 0 at ``-cap`` and 1 at ``cap``:
    ``sigmoid(2 scale q k^T / cap)``. With a bias it may lie anywhere; ``slope`` times a
    difference of levels is a difference of scores, for powers of two.

    Args:
        query: ``[B, H, T, D]``.
        key: ``[B, H, S, D]``.
        value: ``[B, H, S, Dv]``.
        mask: What is visible.
        scale: Factor on the dot product.
        cap: Half-width of the band of scores.
    """

    def __init__(
        self,
        query: Float[Tensor, "B H T D"],
        key: Float[Tensor, "B H S D"],
        value: Float[Tensor, "B H S Dv"],
        mask: AttentionMask,
        scale: float,
        cap: float,
    ):
        self.query, self.key, self.value, self.mask = query, key, value, mask
        self.to_band, self.cap = 2 * scale / cap, cap
        self.slope = 2 * cap * _LOG2_E
        area = min(query.shape[2], _TILE_QUERIES) * min(key.shape[2], _TILE_KEYS)
        room = _TILE_BYTES * torch.get_num_threads() // query.element_size()
        self.num_heads = max(1, min(query.shape[1], room // max(1, area)))
        self.buffers = query.new_empty(3, self.num_heads * area).unbind()

    def tiles(self) -> Iterator[_Tile]:
        """Yield all tiles in which a query sees a key, those of a query one after the other."""
        batch, num_heads, num_queries, _ = self.query.shape
        for sample in range(batch):
            for heads in _cuts(0, num_heads, self.num_heads):
                for queries in _cuts(0, num_queries, _TILE_QUERIES):
                    for seen, keys in self._keys(queries):
                        yield _Tile(sample, heads, seen, keys)

    def _keys(self, queries: slice) -> Iterator[tuple[slice, slice]]:
        """Yield keys and which of the queries see one of them; narrow along the diagonal."""
        if not self.mask.is_causal:
            yield from ((queries, keys) for keys in _cuts(0, self.mask.num_keys, _TILE_KEYS))
            return
        past = self.mask.num_keys - self.mask.num_queries
        diagonal = past + queries.start
        yield from ((queries, keys) for keys in _cuts(0, diagonal, _TILE_KEYS))
        for keys in _cuts(diagonal, past + queries.stop, _DIAGONAL_KEYS):
            yield slice(keys.start - past, queries.stop), keys

    def buffer(self, number: int, tile: _Tile) -> Float[Tensor, "h t s"]:
        """Return a buffer for a tile."""
        shape = [cut.stop - cut.start for cut in (tile.heads, tile.queries, tile.keys)]
        return self.buffers[number][: math.prod(shape)].view(shape)

    def levels(self, tile: _Tile) -> Float[Tensor, "h t s"]:
        """Return the levels of a tile, without its mask."""
        query = tile.of_queries(self.query) * self.to_band
        key = tile.of_keys(self.key)
        return torch.bmm(query, key.mT, out=self.buffer(0, tile)).sigmoid_()

    def biased(self, levels: Tensor, tile: _Tile, out: Tensor) -> Float[Tensor, "h t s"]:
        """Return the levels with the bias; the levels themselves, and ``out`` free, if none."""
        if self.mask.bias is None:
            return levels
        bias = tile.of_mask(self.mask.bias)
        return torch.add(levels, bias, alpha=1 / (2 * self.cap), out=out)

    def exponents(
        self, levels: Tensor, top: Tensor, log_total: Tensor, out: Tensor
    ) -> Float[Tensor, "h t s"]:
        """Return ``slope (levels - top) - log_total``; with a bias, differences come first.

        Of biases as large as 1e9, on a whole row, only the differences have digits.
        """
        if self.mask.bias is None:
            return torch.add(top * -self.slope - log_total, levels, alpha=self.slope, out=out)
        return torch.add(-log_total, torch.sub(levels, top, out=out), alpha=self.slope, out=out)

    def hide_(self, values: Float[Tensor, "h t s"], tile: _Tile) -> None:
        """Put -inf where a query may not attend."""
        if self.mask.mask is not None:
            values.masked_fill_(~tile.of_mask(self.mask.mask), -torch.inf)
        past = self.mask.num_keys - self.mask.num_queries
        num_seen = past + tile.queries.start + 1 - tile.keys.start  # by the first query
        if self.mask.is_causal and num_seen < values.shape[2]:
            values.add_(values.new_full(values.shape[1:], -torch.inf).triu_(num_seen))

    def attend(
        self, sink_level: Float[Tensor, "H 1 1"] | None
    ) -> tuple[Float[Tensor, "B H T Dv"], Float[Tensor, "B H T 1"], Float[Tensor, "B H T 1"]]:
        """Attend; sums over the tiles so far count from the highest level so far.

        Args:
            sink_level: Where the sink lies on the scale of levels, or None.

        Returns:
            The output, the highest level, and log2 of the sum of the weights from there.
        """
        batch, num_heads, num_queries, _ = self.query.shape
        # Heads of a token side by side, and no view: it may be written in place.
        output = torch.empty_permuted(
            (batch, num_heads, num_queries, self.value.shape[-1]), (0, 2, 1, 3),
            dtype=self.value.dtype,
        ).zero_()  # fmt: skip
        top, total = self.query.new_zeros(2, batch, num_heads, num_queries, 1).unbind()
        zero = total.new_zeros(())
        if sink_level is None:  # below every bias that does not forbid
            top.fill_(-0.75 * torch.finfo(top.dtype).max / max(1.0, self.slope))
        else:
            top.copy_(sink_level)
            total.fill_(1.0)
        for tile in self.tiles():
            levels = self.levels(tile)
            levels = self.biased(levels, tile, out=levels)
            self.hide_(levels, tile)
            before = tile.of_queries(top)
            highest = torch.maximum(before, levels.amax(dim=-1, keepdim=True))
            kept = ((before - highest) * self.slope).exp2_()
            weights = self.exponents(levels, highest, zero, out=levels).exp2_()
            tile.of_queries(total).mul_(kept).add_(weights.sum(dim=-1, keepdim=True))
            tile.of_queries(output).mul_(kept).add_(torch.bmm(weights, tile.of_keys(self.value)))
            before.copy_(highest)
        total.clamp_min_(0.5)  # of queries that see nothing; the others' hold a term of one
        return output.div_(total), top, total.log2_()

    def gradients(
        self, top: Tensor, log_total: Tensor, grad: Tensor, moved: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value.

        Args:
            top: The highest levels, as ``attend`` returned them.
            log_total: Likewise.
            grad: Gradient of the output.
            moved: Its products with the output, summed over the width of a head.
        """
        inputs = (self.query, self.key, self.value)
        grad_query, grad_key, grad_value = (torch.zeros_like(tensor) for tensor in inputs)
        slope = 2 * self.cap * self.to_band  # of a score by q k^T, over that of sigmoid
        for tile in self.tiles():
            levels = self.levels(tile)
            weights, change = self.buffer(1, tile), self.buffer(2, tile)
            biased = self.biased(levels, tile, out=weights)
            self.exponents(biased, *(tile.of_queries(t) for t in (top, log_total)), out=weights)
            self.hide_(weights, tile)
            grad_rows = tile.of_queries(grad)
            tile.of_keys(grad_value).add_(torch.bmm(weights.exp2_().mT, grad_rows))
            torch.bmm(grad_rows, tile.of_keys(self.value).mT, out=change)
            change.sub_(tile.of_queries(moved)).mul_(weights)
            torch.ops.aten.sigmoid_backward.grad_input(change, levels, grad_input=change)
            query, key = tile.of_queries(self.query), tile.of_keys(self.key)
            tile.of_queries(grad_query).add_(torch.bmm(change, key), alpha=slope)
            tile.of_keys(grad_key).add_(torch.bmm(change.mT, query), alpha=slope)
        return grad_query, grad_key, grad_value


def _cuts(start: int, stop: int, size: int) -> Iterator[slice]:
    return (slice(first, min(first + size, stop)) for first in range(start, stop, size))

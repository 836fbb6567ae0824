"""Attention through tiles of scores on a CPU, where a bias learns, which fused kernels know not.

A tile holds the scores of some samples and heads, and stays in the caches of the cores while its
weights, outputs and gradients are made of it, in memory that every tile uses again. The weights of
the softmax are kept for the backward pass, as torch's own operators keep them.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from levelhead.modes import is_forward_mode, is_plain, is_transformed
from levelhead.plain_gradients import needs_plain_gradients, plain_gradients
from levelhead.shapes import at_least_float32, without_autocast

_TILE_BYTES = 2**21
"""Of the scores of one tile, for each thread."""


class AffineTerms(NamedTuple):
    """What makes other weights of attention weights: ``alpha * attn_weights + shift * seen``.

    Attributes:
        alpha: Factor per query and head.
        shift: Added to the weight of every key that is seen.
        seen: True = the query sees the key, or None for all keys.
    """

    alpha: Float[Tensor, "B H T 1"]
    shift: Float[Tensor, "B H T 1"]
    seen: Bool[Tensor, "#B #H #T #S"] | None


def fits_score_tiles(
    query: Float[Tensor, "B H T D"], dropout_p: float, *others: Tensor | None
) -> bool:
    """Say whether `TiledAttention` can take a call.

    Args:
        query: Queries.
        dropout_p: Probability of dropping a weight.
        others: What else goes in, tensors or None.

    Returns:
        False off the CPU, with dropout, for a compiler, inside ``torch.func``, in forward mode and
        for tensors that are more than numbers in memory.
    """
    if torch.compiler.is_compiling() or is_transformed() or is_forward_mode():
        return False
    if not is_plain(query, *others):
        return False
    return dropout_p == 0 and query.device.type == "cpu" and query.numel() > 0


class _Tile(NamedTuple):
    """Some heads of some samples."""

    samples: slice
    heads: slice
    is_all: bool

    def of(self, tensor: Tensor) -> Tensor:
        """Return the tile's part of a tensor, whose first axes may be of size one."""
        if self.is_all:
            return tensor
        whole = slice(None)
        samples = self.samples if tensor.shape[0] > 1 else whole
        return tensor[samples, self.heads if tensor.shape[1] > 1 else whole]


class _Scores:
    """The scores of a call, tile by tile, in memory that every tile uses again.

    A sink is one more column of scores, behind those of the keys.
    """

    def __init__(self, query, key, bias, sink_score, allowed, scale, may_be_empty):
        self.query, self.key, self.bias, self.allowed = query, key, bias, allowed
        self.scale, self.may_be_empty = scale, may_be_empty
        self.dtype = at_least_float32(query.dtype)
        self.sink = None if sink_score is None else sink_score[None, :, None, None]
        self.num_sinks = int(self.sink is not None)
        self.room: dict[str, Tensor] = {}

    def tiles(self) -> Iterator[_Tile]:
        """Yield all tiles, the first one a largest."""
        batch, num_heads, num_queries, _ = self.query.shape
        area = max(1, num_queries * (self.key.shape[2] + self.num_sinks))
        room = _TILE_BYTES * torch.get_num_threads() // self.dtype.itemsize
        num_matrices = max(1, room // area)
        is_all = num_matrices >= batch * num_heads
        for samples in _cuts(batch, max(1, num_matrices // num_heads)):
            for heads in _cuts(num_heads, num_matrices):
                yield _Tile(samples, heads, is_all)

    def take(self, name: str, *shape: int) -> Tensor:
        """Return memory of a name; what the tile before left there is lost."""
        size, room = math.prod(shape), self.room.get(name)
        if room is None or room.numel() < size:
            room = self.room[name] = self.query.new_empty(size, dtype=self.dtype)
        return room[:size].view(shape)

    def dense(self, name: str, rows: Float[Tensor, "b h N D"]) -> Float[Tensor, "bh N D"]:
        """Return rows one after the other, or columns as they came."""
        if rows.dtype == self.dtype and (rows.is_contiguous() or rows.mT.is_contiguous()):
            return rows.flatten(0, 1)
        *batch, num_rows, width = rows.shape
        if lies_in_columns(rows):
            dense = self.take(name, *batch, width, num_rows).mT
        else:
            dense = self.take(name, *batch, num_rows, width)
        return dense.copy_(rows).flatten(0, 1)

    def attend(self, tile: _Tile, out: Float[Tensor, "b h T C"]) -> Float[Tensor, "b h T S"]:
        """Return the weights of a tile, in ``out``; zeros where a query sees nothing."""
        query, key = self.dense("query", tile.of(self.query)), self.dense("key", tile.of(self.key))
        num_keys = key.shape[1]
        scores = self.take("scores", *out.shape[:3], num_keys)
        torch.bmm(query, key.mT, out=scores.flatten(0, 1))
        with_sink = scores
        if self.sink is not None:
            with_sink = self.take("with sink", *out.shape)
            with_sink[..., num_keys:] = tile.of(self.sink)
        seen = with_sink[..., :num_keys]
        if self.bias is None:
            torch.mul(scores, self.scale, out=seen)
        else:
            torch.add(tile.of(self.bias).to(self.dtype), scores, alpha=self.scale, out=seen)
        if self.allowed is not None:
            with_sink[..., :num_keys].add_(self.hidden(tile.of(self.allowed)))
        torch.softmax(with_sink, dim=-1, out=out)  # a third faster than in place
        if self.may_be_empty:
            out.masked_fill_((with_sink == -torch.inf).all(dim=-1, keepdim=True), 0.0)
        return out[..., :num_keys]

    def hidden(self, allowed: Bool[Tensor, "b h T S"]) -> Float[Tensor, "b h T S"]:
        """Return 0 where a query may attend and -inf elsewhere, ``1 - 1 / allowed``."""
        return self.take("hidden", *allowed.shape).copy_(allowed).reciprocal_().neg_().add_(1.0)

    def affine(
        self, weights: Float[Tensor, "b h T S"], terms: AffineTerms, tile: _Tile
    ) -> Float[Tensor, "b h T S"]:
        """Return ``alpha * weights + shift * seen``."""
        changed = self.take("changed", *weights.shape)
        alpha, shift = (tile.of(rows).to(self.dtype) for rows in terms[:2])
        torch.mul(weights, alpha, out=changed)
        if terms.seen is None:
            return changed.add_(shift)
        seen = tile.of(terms.seen).to(self.dtype)
        return changed.addcmul_(shift, seen)

    def put(
        self, tensor: Float[Tensor, "B H N D"], tile: _Tile, left: Tensor, right: Tensor,
        factor: float = 1.0,
    ) -> None:  # fmt: skip
        """Write ``factor * left @ right`` into a tensor."""
        part = tile.of(tensor)
        if lies_in_columns(part):
            part, left, right = part.mT, right.mT, left.mT
        if part.is_contiguous() and part.dtype == self.dtype:
            _multiply(left, right, factor, part.flatten(0, 1))
            return
        product = self.take("product", len(left), *part.shape[2:])
        part.copy_(_multiply(left, right, factor, product).unflatten(0, part.shape[:2]))


def _multiply(
    left: Float[Tensor, "n N C"], right: Float[Tensor, "n C D"], factor: float, out: Tensor
) -> Float[Tensor, "n N D"]:
    if factor == 1.0:
        return torch.bmm(left, right, out=out)
    return out.baddbmm_(left, right, beta=0.0, alpha=factor)


def lies_in_columns(rows: Float[Tensor, "B H N D"]) -> bool:
    """Say whether columns, not rows, are dense, as where channels are what attends.

    Args:
        rows: Queries, keys, values or a gradient.
    """
    return rows.stride(2) == 1 and rows.stride(3) != 1


def _cuts(stop: int, most: int) -> Iterator[slice]:
    """Yield cuts of about one size, the first a largest, so that none leaves threads idle."""
    size = math.ceil(stop / math.ceil(stop / most))
    return (slice(first, min(first + size, stop)) for first in range(0, stop, size))


class TiledAttention(torch.autograd.Function):
    """Softmax of biased scores times values, and the bias's gradient.

        attn_output = [alpha * softmax(scale * query @ key^T + bias) + shift * seen] @ value

    ``apply(query, key, value, bias or None, sink_score or None, alpha or None, shift or None, seen
    or None, allowed or None, scale, plain)``: keys and values have the heads of the query, without
    alpha the weights are those of the softmax, and ``plain(query, key, value, bias, sink_score,
    alpha, shift)`` is the same by public operators, for second derivatives.
    """

    @staticmethod
    def forward(
        ctx, query, key, value, bias, sink_score, alpha, shift, seen, allowed, scale, plain
    ):
        ctx.scale, ctx.plain = scale, plain
        ctx.may_be_empty = sink_score is None and may_be_empty(bias, allowed)
        scores = _Scores(query, key, bias, sink_score, allowed, scale, ctx.may_be_empty)
        terms = None if alpha is None else AffineTerms(alpha, shift, seen)
        # Heads of a token side by side, as fused kernels lay them, and no view of anything.
        order = (0, 3, 1, 2) if lies_in_columns(value) else (0, 2, 1, 3)
        shape = (*query.shape[:3], value.shape[3])
        output = torch.empty_permuted(shape, order, dtype=value.dtype)
        num_columns = key.shape[2] + scores.num_sinks
        attn_weights = query.new_empty((*query.shape[:3], num_columns), dtype=scores.dtype)
        with without_autocast("cpu"):
            for tile in scores.tiles():
                weights = scores.attend(tile, out=tile.of(attn_weights))
                if terms is not None:
                    weights = scores.affine(weights, terms, tile)
                scores.put(
                    output, tile, weights.flatten(0, 1), scores.dense("value", tile.of(value))
                )
        inputs = (query, key, value, bias, sink_score, alpha, shift)
        ctx.save_for_backward(*inputs, seen, allowed, attn_weights)
        return output

    @staticmethod
    def backward(ctx, *grads):
        *inputs, seen, allowed, attn_weights = ctx.saved_tensors
        if needs_plain_gradients(grads[0]):
            return *plain_gradients(ctx.plain, inputs, grads[0]), None, None, None, None
        query, key, value, bias, sink_score, alpha, shift = inputs
        scores = _Scores(query, key, bias, sink_score, allowed, ctx.scale, ctx.may_be_empty)
        terms = None if alpha is None else AffineTerms(alpha, shift, seen)
        found = [
            torch.empty_like(t) if t is not None and is_needed else None
            for t, is_needed in zip(inputs, ctx.needs_input_grad, strict=False)
        ]
        for number in (3, 4):  # sums over samples
            if found[number] is not None:
                found[number] = torch.zeros_like(inputs[number], dtype=scores.dtype)
        with without_autocast("cpu"):
            for tile in scores.tiles():
                _put_gradients(found, scores, value, terms, grads[0], tile, tile.of(attn_weights))
        found = [
            t if t is None else t.to(like.dtype) for t, like in zip(found, inputs, strict=True)
        ]
        return *found, None, None, None, None


def _put_gradients(
    found: list[Tensor | None],
    scores: _Scores,
    value: Float[Tensor, "B H S Dv"],
    terms: AffineTerms | None,
    grad: Float[Tensor, "B H T Dv"],
    tile: _Tile,
    weights: Float[Tensor, "b h T C"],
) -> None:
    """Write a tile's part of the gradients of the inputs, in their order."""
    grad_query, grad_key, grad_value, grad_bias, grad_sink, grad_alpha, grad_shift = found
    rows = {"query": scores.query, "key": scores.key, "value": value, "grad": grad}
    query, key, values, grad_rows = (scores.dense(n, tile.of(t)) for n, t in rows.items())
    num_keys = key.shape[1]
    seen_weights, sink_weights = weights[..., :num_keys], weights[..., num_keys:]
    change = scores.take("scores", *seen_weights.shape)
    flat = change.flatten(0, 1)
    torch.bmm(grad_rows, values.mT, out=flat)
    if terms is not None and grad_shift is not None:
        tile.of(grad_shift).copy_(_sum_over_seen(change, terms, tile))
    moved = change.mul_(seen_weights).sum(dim=-1, keepdim=True)
    if grad_alpha is not None:
        tile.of(grad_alpha).copy_(moved)
    change.addcmul_(seen_weights, moved, value=-1)
    if terms is not None:
        alpha = tile.of(terms.alpha)
        moved, change = moved * alpha, change.mul_(alpha)
        seen_weights = scores.affine(seen_weights, terms, tile)
    if grad_value is not None:
        scores.put(grad_value, tile, seen_weights.flatten(0, 1).mT, grad_rows)
    if grad_bias is not None:
        part = tile.of(grad_bias)
        part += change.sum_to_size(part.shape)
    if grad_sink is not None:
        grad_sink[tile.heads] -= (sink_weights * moved).sum(dim=(0, 2, 3))
    if grad_query is not None:
        scores.put(grad_query, tile, flat, key, scores.scale)
    if grad_key is not None:
        scores.put(grad_key, tile, flat.mT, query, scores.scale)


def _sum_over_seen(
    change: Float[Tensor, "b h T C"], terms: AffineTerms, tile: _Tile
) -> Float[Tensor, "b h T 1"]:
    if terms.seen is None:
        return change.sum(dim=-1, keepdim=True)
    return (change * tile.of(terms.seen)).sum(dim=-1, keepdim=True)


def may_be_empty(bias: Tensor | None, allowed: Tensor | None) -> bool:
    """Say whether a query could be left without a key; looks at no full T x S matrix of floats.

    Args:
        bias: Added to the scores, or None.
        allowed: True = may attend, or None.

    Returns:
        True for a compiler and ``torch.func``, too, which cannot look.
    """
    if torch.compiler.is_compiling() or is_transformed() or not is_plain(bias, allowed):
        return True
    if bias is not None and bias.numel() > 0 and bias.amin().item() == -torch.inf:
        return True
    return allowed is not None and not bool(allowed.any(dim=-1).all())

"""Attention through tiles of scores on a CPU, where a bias learns, which fused kernels know not.

A tile holds the scores of some samples and heads, and stays in the caches of the cores. It is
computed once in the forward pass and once more in the backward pass: no matrix of scores is kept,
which costs less than to write and read it. All of a tile is made in two buffers, in place.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from levelhead.modes import is_forward_mode, is_transformed
from levelhead.plain_gradients import needs_plain_gradients, plain_gradients
from levelhead.shapes import at_least_float32, without_autocast

_TILE_BYTES = 3 * 2**19
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


def fits_score_tiles(query: Float[Tensor, "B H T D"], dropout_p: float) -> bool:
    """Say whether `TiledAttention` can take a call.

    Args:
        query: Queries.
        dropout_p: Probability of dropping a weight.

    Returns:
        False off the CPU, with dropout, for a compiler, inside ``torch.func`` and in forward mode.
    """
    if torch.compiler.is_compiling() or is_transformed() or is_forward_mode():
        return False
    return dropout_p == 0 and query.device.type == "cpu" and query.numel() > 0


class _Tile(NamedTuple):
    """Some heads of some samples."""

    samples: slice
    heads: slice

    def of(self, tensor: Tensor) -> Tensor:
        """Return the tile's part of a tensor, whose first axes may be of size one."""
        cuts = zip(tensor.shape, self, strict=False)
        return tensor[tuple(slice(None) if size == 1 else cut for size, cut in cuts)]


class _Scores:
    """The scores of a call, tile by tile, in two buffers that are used again.

    A bias with one more column than there are keys holds the score of a key of zeros, whose value
    is zero: a sink.
    """

    def __init__(self, query, key, bias, allowed, scale, may_be_empty):
        self.query, self.key, self.bias, self.allowed = query, key, bias, allowed
        self.scale, self.may_be_empty = scale, may_be_empty
        self.dtype = at_least_float32(query.dtype)
        self.num_keys = key.shape[2]
        has_sink = bias is not None and bias.shape[3] == self.num_keys + 1
        self.num_columns = self.num_keys + has_sink
        batch, num_heads, num_queries, _ = query.shape
        area = num_queries * self.num_columns
        room = _TILE_BYTES * torch.get_num_threads() // self.dtype.itemsize
        num_matrices = min(batch * num_heads, max(1, room // area))
        self.num_heads = min(num_heads, num_matrices)
        self.num_samples = num_matrices // self.num_heads
        shape = (2, self.num_samples * self.num_heads * area)
        self.buffers = query.new_empty(shape, dtype=self.dtype).unbind()

    def tiles(self) -> Iterator[_Tile]:
        """Yield all tiles."""
        for samples in _cuts(self.query.shape[0], self.num_samples):
            for heads in _cuts(self.query.shape[1], self.num_heads):
                yield _Tile(samples, heads)

    def rows(self, tensor: Float[Tensor, "B H N D"], tile: _Tile) -> Float[Tensor, "bh N D"]:
        """Return the tile's rows, dense."""
        return tile.of(tensor).to(self.dtype).flatten(0, 1)

    def keyed(self, tensor: Float[Tensor, "B H S D"], tile: _Tile) -> Float[Tensor, "bh C D"]:
        """Return the tile's keys or values, with a row of zeros for the sink."""
        rows = self.rows(tensor, tile)
        return rows if self.num_columns == self.num_keys else F.pad(rows, (0, 0, 0, 1))

    def buffer(self, number: int, tile: _Tile) -> Float[Tensor, "b h T C"]:
        """Return a buffer for a tile."""
        num_samples, num_heads = (cut.stop - cut.start for cut in tile)
        shape = (num_samples, num_heads, self.query.shape[2], self.num_columns)
        return self.buffers[number][: shape[0] * shape[1] * shape[2] * shape[3]].view(shape)

    def weights(self, query, key, tile: _Tile) -> Float[Tensor, "b h T C"]:
        """Return the weights of a tile, in the first buffer; zeros where a query sees nothing."""
        scores = self.buffer(0, tile)
        if self.bias is None:
            scores.zero_()
        else:
            scores.copy_(tile.of(self.bias))
        if self.allowed is not None:
            zero = scores.new_zeros(())
            scores[..., : self.num_keys] += torch.where(tile.of(self.allowed), zero, -torch.inf)
        scores.flatten(0, 1).baddbmm_(query, key.mT, alpha=self.scale)
        if not self.may_be_empty:
            return torch.softmax(scores, dim=-1, out=scores)
        is_empty = (scores == -torch.inf).all(dim=-1, keepdim=True)
        return torch.softmax(scores, dim=-1, out=scores).masked_fill_(is_empty, 0.0)


def _cuts(stop: int, size: int) -> Iterator[slice]:
    return (slice(first, min(first + size, stop)) for first in range(0, stop, size))


class TiledAttention(torch.autograd.Function):
    """Softmax of biased scores times values, and the bias's gradient.

        attn_output = [alpha * softmax(scale * query @ key^T + bias) + shift * seen] @ value

    ``apply(query, key, value, bias or None, alpha or None, shift or None, seen or None, allowed
    or None, scale, plain)``: keys and values have the heads of the query, a bias may have a
    column for a sink, without alpha the weights are those of the softmax, and ``plain(query, key,
    value, bias, alpha, shift)`` is the same by public operators, for second derivatives.
    """

    @staticmethod
    def forward(ctx, query, key, value, bias, alpha, shift, seen, allowed, scale, plain):
        ctx.save_for_backward(query, key, value, bias, alpha, shift, seen, allowed)
        ctx.scale, ctx.plain = scale, plain
        ctx.may_be_empty = may_be_empty(bias, allowed)
        scores = _Scores(query, key, bias, allowed, scale, ctx.may_be_empty)
        terms = None if alpha is None else AffineTerms(alpha, shift, seen)
        output = _token_major(query, value)
        with without_autocast("cpu"):
            for tile in scores.tiles():
                weights = scores.weights(scores.rows(query, tile), scores.keyed(key, tile), tile)
                if terms is not None:
                    _scale_(weights, terms, tile)
                    _shift_(weights, terms, tile)
                _put(
                    output, tile, torch.bmm(weights.flatten(0, 1), scores.keyed(value, tile)), 1.0
                )
        return output

    @staticmethod
    def backward(ctx, *grads):
        *inputs, seen, allowed = ctx.saved_tensors
        if needs_plain_gradients(grads[0]):
            return *plain_gradients(ctx.plain, inputs, grads[0]), None, None, None, None
        query, key, value, bias, alpha, shift = inputs
        scores = _Scores(query, key, bias, allowed, ctx.scale, ctx.may_be_empty)
        terms = None if alpha is None else AffineTerms(alpha, shift, seen)
        with without_autocast("cpu"):
            found = _gradients(scores, value, terms, grads[0], ctx.needs_input_grad)
        return *found, None, None, None, None


def _scale_(weights: Float[Tensor, "b h T C"], terms: AffineTerms, tile: _Tile) -> None:
    weights.mul_(tile.of(terms.alpha))


def _shift_(weights: Float[Tensor, "b h T C"], terms: AffineTerms, tile: _Tile) -> None:
    """Shift the weights of all keys that are seen; that of a sink counts for nothing."""
    shift = tile.of(terms.shift)
    if terms.seen is None:
        weights.add_(shift)
        return
    seen = tile.of(terms.seen).to(weights.dtype)
    weights[..., : seen.shape[3]].addcmul_(shift.to(weights.dtype), seen)


def _gradients(
    scores: _Scores, value: Tensor, terms: AffineTerms | None, grad: Tensor, needs
) -> list[Tensor | None]:
    """Return the gradients of query, key, value, bias, alpha and shift, those that are needed."""
    query, key, bias = scores.query, scores.key, scores.bias
    grad_query, grad_key, grad_value = (
        torch.empty_like(t) if is_needed else None
        for t, is_needed in zip((query, key, value), needs, strict=False)
    )
    grad_bias = None
    if bias is not None and needs[3]:
        grad_bias = torch.zeros_like(bias, dtype=scores.dtype)
    grad_terms = (None, None)
    if terms is not None:
        grad_terms = (torch.empty_like(terms.alpha), torch.empty_like(terms.shift))
    for tile in scores.tiles():
        query_rows, key_rows = scores.rows(query, tile), scores.keyed(key, tile)
        grad_rows = scores.rows(grad, tile)
        weights = scores.weights(query_rows, key_rows, tile)
        change = scores.buffer(1, tile)
        flat = change.flatten(0, 1)
        torch.bmm(grad_rows, scores.keyed(value, tile).mT, out=flat)
        if terms is None:
            torch.ops.aten._softmax_backward_data.out(
                change, weights, -1, change.dtype, grad_input=change
            )
        else:
            _affine_change_(change, weights, terms, tile, *grad_terms)
        if grad_value is not None:
            _put(grad_value, tile, torch.bmm(weights.flatten(0, 1).mT, grad_rows), 1.0)
        if grad_bias is not None:
            part = tile.of(grad_bias)
            part += change.sum_to_size(part.shape)
        if grad_query is not None:
            _put(grad_query, tile, torch.bmm(flat, key_rows), scores.scale)
        if grad_key is not None:
            _put(grad_key, tile, torch.bmm(flat.mT, query_rows), scores.scale)
    if grad_bias is not None:
        grad_bias = grad_bias.to(bias.dtype)
    return [grad_query, grad_key, grad_value, grad_bias, *grad_terms]


def _affine_change_(change, weights, terms: AffineTerms, tile, grad_alpha, grad_shift) -> None:
    """Turn the gradient of the changed weights into that of the scores, and the weights too."""
    if terms.seen is None:
        tile.of(grad_shift).copy_(change.sum(dim=-1, keepdim=True))
    else:
        seen = tile.of(terms.seen).to(change.dtype)
        tile.of(grad_shift).copy_((change[..., : seen.shape[3]] * seen).sum(dim=-1, keepdim=True))
    moved = (change * weights).sum(dim=-1, keepdim=True)
    tile.of(grad_alpha).copy_(moved)
    _scale_(weights, terms, tile)
    change.sub_(moved).mul_(weights)
    _shift_(weights, terms, tile)


def _put(
    tensor: Float[Tensor, "B H N D"], tile: _Tile, rows: Float[Tensor, "bh M D"], factor: float
) -> None:
    """Write a factor times a tile's rows, but for that of a sink, into a tensor."""
    part = tile.of(tensor)
    torch.mul(rows.unflatten(0, part.shape[:2])[:, :, : part.shape[2]], factor, out=part)


def _token_major(query: Float[Tensor, "B H T D"], value: Float[Tensor, "B H S Dv"]) -> Tensor:
    """Return an empty output, the heads of a token side by side as fused kernels lay them."""
    shape = (*query.shape[:3], value.shape[3])
    return torch.empty_permuted(shape, (0, 2, 1, 3), dtype=value.dtype)


def may_be_empty(bias: Tensor | None, allowed: Tensor | None) -> bool:
    """Say whether a query could be left without a key; looks at no full T x S matrix of floats.

    Args:
        bias: Added to the scores, or None.
        allowed: True = may attend, or None.

    Returns:
        True for a compiler, too, which cannot look.
    """
    if torch.compiler.is_compiling():
        return True
    if bias is not None and bias.numel() > 0 and bias.amin().item() == -torch.inf:
        return True
    return allowed is not None and not bool(allowed.any(dim=-1).all())

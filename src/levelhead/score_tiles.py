"""Attention through tiles of scores on a CPU, where a bias learns, which fused kernels know not.

A tile holds the scores of some samples and heads, and stays in the caches of the cores. It is
computed once in the forward pass and once more in the backward pass: no matrix of scores is kept,
which costs less than to write and read it. All of a tile is made in two buffers, in place.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from levelhead.modes import is_forward_mode, is_transformed
from levelhead.plain_gradients import needs_plain_gradients, plain_gradients
from levelhead.shapes import at_least_float32, without_autocast
from levelhead.tile_norms import UnitTile, inverse_norms

_TILE_BYTES = 2**20
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
        whole = slice(None)
        samples = self.samples if tensor.shape[0] > 1 else whole
        return tensor[samples, self.heads if tensor.shape[1] > 1 else whole]

    def of_factor(self, factor: Tensor | None) -> Tensor | None:
        """Return the tile's part of a factor per head; one per coordinate is that of all heads."""
        return factor if factor is None or factor.ndim == 1 else factor[self.heads]


class Learning(NamedTuple):
    """What has a gradient.

    Attributes:
        query: Queries ``[B, H, T, D]``; without keys: queries, keys and values of a fused
            projection, ``[3, B, H, T, D]``, whose gradient is laid out as the projection's.
        key: Keys, with the heads of the queries, or None.
        value: Values, likewise.
        bias: Added to the scores, or None. One more column than there are keys is the score of a
            key of zeros, whose value is zero: a sink.
        alpha: As in `AffineTerms`, or None for the weights of the softmax.
        shift: Likewise.
        query_factor: As in `RowNorm`, or None.
        key_factor: Likewise.
    """

    query: Tensor
    key: Tensor | None
    value: Tensor | None
    bias: Float[Tensor, "#B #H #T #C"] | None
    alpha: Float[Tensor, "B H T 1"] | None = None
    shift: Float[Tensor, "B H T 1"] | None = None
    query_factor: Float[Tensor, "..."] | None = None
    key_factor: Float[Tensor, "..."] | None = None

    def split(self) -> "Learning":
        """Return the same with keys and values of their own."""
        if self.query is None or self.query.ndim == 4:
            return self
        query, key, value = self.query
        return self._replace(query=query, key=key, value=value)


class _Scores:
    """The scores of a call, tile by tile, in memory that every tile uses again."""

    def __init__(self, rows: Learning, allowed, inverses, scale, may_be_empty):
        self.query, self.key, self.value, self.bias = rows[:4]
        self.factors, self.inverses = rows[6:8], inverses
        self.allowed, self.scale, self.may_be_empty = allowed, scale, may_be_empty
        self.dtype = at_least_float32(self.query.dtype)
        self.num_sinks = int(rows.bias is not None and rows.bias.shape[3] == self.key.shape[2] + 1)
        self.room: dict[str, Tensor] = {}

    def tiles(self) -> Iterator[_Tile]:
        """Yield all tiles, the first one a largest."""
        batch, num_heads, num_queries, _ = self.query.shape
        area = max(1, num_queries * (self.key.shape[2] + self.num_sinks))
        room = _TILE_BYTES * torch.get_num_threads() // self.dtype.itemsize
        num_matrices = max(1, room // area)
        for samples in _cuts(batch, max(1, num_matrices // num_heads)):
            for heads in _cuts(num_heads, num_matrices):
                yield _Tile(samples, heads)

    def take(self, name: str, *shape: int) -> Tensor:
        """Return memory of a name; what the tile before left there is lost."""
        size = math.prod(shape)
        if name not in self.room or self.room[name].numel() < size:
            self.room[name] = self.query.new_empty(size, dtype=self.dtype)
        return self.room[name][:size].view(shape)

    def dense(
        self, name: str, rows: Float[Tensor, "b h N D"], num_more: int = 0
    ) -> Float[Tensor, "bh M D"]:
        """Return rows one after the other, or columns as they came; and more rows, of zeros."""
        if rows.dtype == self.dtype and rows.is_contiguous() and num_more == 0:
            return rows.flatten(0, 1)
        num_samples, num_heads, num_rows, width = rows.shape
        if _lies_in_columns(rows):
            dense = self.take(name, num_samples, num_heads, width, num_rows + num_more).mT
        else:
            dense = self.take(name, num_samples, num_heads, num_rows + num_more, width)
        dense[:, :, :num_rows].copy_(rows)
        if num_more > 0:
            dense[:, :, num_rows:].zero_()
        return dense.flatten(0, 1)

    def queries(self, tile: _Tile) -> tuple[Float[Tensor, "bh T D"], UnitTile | None]:
        """Return the tile's queries, after their norm if there is one."""
        return self._prepared("query", self.query, tile, 0, 0)

    def keys(self, tile: _Tile) -> tuple[Float[Tensor, "bh C D"], UnitTile | None]:
        """Return the tile's keys, the sink's among them, after their norm if there is one."""
        return self._prepared("key", self.key, tile, self.num_sinks, 1)

    def _prepared(self, name: str, rows: Tensor, tile: _Tile, num_more: int, which: int):
        inverse, factor = self.inverses[which], tile.of_factor(self.factors[which])
        if inverse is None:
            return self.dense(name, tile.of(rows), num_more), None
        inverse, rows = inverse[:, tile.samples, tile.heads], tile.of(rows)
        num_samples, num_heads, num_rows, width = rows.shape
        unit = self.take(f"unit {name}", num_samples, num_heads, num_rows + num_more, width)
        unit[:, :, num_rows:].zero_()
        tile_norm = UnitTile(unit[:, :, :num_rows], inverse, factor)
        torch.mul(rows, inverse[0], out=tile_norm.unit)
        if factor is not None:
            unit = torch.mul(unit, factor, out=self.take(name, *unit.shape))
        return unit.flatten(0, 1), tile_norm

    def values(self, tile: _Tile) -> Float[Tensor, "bh C Dv"]:
        """Return the tile's values, the sink's among them."""
        return self.dense("value", tile.of(self.value), self.num_sinks)

    def empty_weights(self) -> Float[Tensor, "B H T C"]:
        """Return a place for the weights of the whole call."""
        return self.query.new_empty(
            (*self.query.shape[:3], self.key.shape[2] + self.num_sinks), dtype=self.dtype
        )

    def attend(self, tile: _Tile, out: Float[Tensor, "b h T C"]) -> Float[Tensor, "b h T C"]:
        """Return the weights of a tile, in ``out``; zeros where a query sees nothing."""
        scores = self.take("scores", *out.shape)
        query, key = self.queries(tile)[0], self.keys(tile)[0]
        torch.bmm(query, key.mT, out=scores.flatten(0, 1))
        if self.bias is None:
            scores.mul_(self.scale)
        else:
            bias = tile.of(self.bias).to(self.dtype)
            torch.add(bias, scores, alpha=self.scale, out=scores)
        if self.allowed is not None:
            scores[..., : self.key.shape[2]].add_(self.hidden(tile.of(self.allowed)))
        torch.softmax(scores, dim=-1, out=out)  # a third faster than in place
        if self.may_be_empty:
            out.masked_fill_((scores == -torch.inf).all(dim=-1, keepdim=True), 0.0)
        return out

    def hidden(self, allowed: Bool[Tensor, "b h T S"]) -> Float[Tensor, "b h T S"]:
        """Return 0 where a query may attend and -inf elsewhere, ``1 - 1 / allowed``."""
        return self.take("hidden", *allowed.shape).copy_(allowed).reciprocal_().neg_().add_(1.0)

    def affine(
        self, weights: Float[Tensor, "b h T C"], terms: AffineTerms, tile: _Tile
    ) -> Float[Tensor, "b h T C"]:
        """Return ``alpha * weights + shift * seen``; what a sink gets counts for nothing."""
        changed = self.take("changed", *weights.shape)
        alpha, shift = (tile.of(rows).to(self.dtype) for rows in terms[:2])
        torch.mul(weights, alpha, out=changed)
        if terms.seen is None:
            return changed.add_(shift)
        seen = tile.of(terms.seen).to(self.dtype)
        changed[..., : self.key.shape[2]].addcmul_(shift, seen)
        return changed

    def put(
        self, tensor: Float[Tensor, "B H N D"], tile: _Tile, left: Tensor, right: Tensor,
        factor: float = 1.0, unit: UnitTile | None = None, grad_factor: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Write ``factor * left @ right``, but for the row of a sink, into a tensor.

        It is the gradient of rows that a norm made of others where ``unit`` is given.
        """
        part = tile.of(tensor)
        if _lies_in_columns(part):
            product = self._product(right.mT, left.mT, factor).mT
        else:
            product = self._product(left, right, factor)
        product = product.unflatten(0, part.shape[:2])[:, :, : part.shape[2]]
        if unit is not None:
            room = self.take("moved", *product.shape)
            unit.gradient_(product, tile.of_factor(grad_factor), room)
        part.copy_(product)

    def _product(self, left: Tensor, right: Tensor, factor: float) -> Tensor:
        product = self.take("product", *left.shape[:2], right.shape[2])
        if factor == 1.0:
            return torch.bmm(left, right, out=product)
        return product.baddbmm_(left, right, beta=0.0, alpha=factor)


def _lies_in_columns(rows: Float[Tensor, "b h N D"]) -> bool:
    """Whether columns, not rows, are dense: channels of tokens, for one."""
    return rows.stride(2) == 1 and rows.stride(3) != 1


def _cuts(stop: int, size: int) -> Iterator[slice]:
    return (slice(first, min(first + size, stop)) for first in range(0, stop, size))


class TiledAttention(torch.autograd.Function):
    """Softmax of biased scores times values, and the bias's gradient.

        attn_output = [alpha * softmax(scale * query @ key^T + bias) + shift * seen] @ value

    ``apply(*Learning, seen or None, allowed or None, scale, query_eps or None, key_eps or None,
    plain)``: queries and keys are brought to unit length, times their factor, where an ``eps`` is
    given, and ``plain(*Learning)`` is the same by public operators, for second derivatives.
    """

    @staticmethod
    def forward(ctx, *inputs):
        *learning, seen, allowed, scale, query_eps, key_eps, plain = inputs
        rows = Learning(*learning).split()
        ctx.plain = plain
        ctx.others = scale, may_be_empty(rows.bias, allowed)
        inverses = [
            None if eps is None else inverse_norms(part, eps)
            for part, eps in ((rows.query, query_eps), (rows.key, key_eps))
        ]
        scores = _Scores(rows, allowed, inverses, *ctx.others)
        terms = None if rows.alpha is None else AffineTerms(rows.alpha, rows.shift, seen)
        # Heads of a token side by side, as fused kernels lay them, and no view of anything.
        order = (0, 3, 1, 2) if _lies_in_columns(rows.value) else (0, 2, 1, 3)
        shape = (*rows.query.shape[:3], rows.value.shape[3])
        output = torch.empty_permuted(shape, order, dtype=rows.value.dtype)
        attn_weights = scores.empty_weights()
        with without_autocast("cpu"):
            for tile in scores.tiles():
                weights = scores.attend(tile, out=tile.of(attn_weights))
                if terms is not None:
                    weights = scores.affine(weights, terms, tile)
                scores.put(output, tile, weights.flatten(0, 1), scores.values(tile))
        ctx.save_for_backward(*learning, *inverses, seen, allowed, attn_weights)
        return output

    @staticmethod
    def backward(ctx, *grads):
        *inputs, query_inverse, key_inverse, seen, allowed, attn_weights = ctx.saved_tensors
        none = (None,) * 6
        if needs_plain_gradients(grads[0]):
            return *plain_gradients(ctx.plain, inputs, grads[0]), *none
        rows = Learning(*inputs).split()
        scores = _Scores(rows, allowed, (query_inverse, key_inverse), *ctx.others)
        terms = None if rows.alpha is None else AffineTerms(rows.alpha, rows.shift, seen)
        found = Learning(*_places(inputs, ctx.needs_input_grad, scores.dtype))
        with without_autocast("cpu"):
            for tile in scores.tiles():
                _put_gradients(found, scores, terms, grads[0], tile, tile.of(attn_weights))
        pairs = zip(found, inputs, strict=True)
        return *(g if g is None else g.to(t.dtype) for g, t in pairs), *none


def _places(inputs: list[Tensor | None], needed, dtype: torch.dtype) -> Iterator[Tensor | None]:
    """Yield where gradients go; zeros, in a dtype to sum in, for what all samples share."""
    sums = {"bias", "query_factor", "key_factor"}
    for name, tensor, is_needed in zip(Learning._fields, inputs, needed, strict=False):
        if tensor is None or not is_needed:
            yield None
        elif name in sums:
            yield torch.zeros_like(tensor, dtype=dtype)
        elif tensor.ndim == 5:
            three, batch, num_heads, num_rows, width = tensor.shape
            place = tensor.new_empty(batch, num_rows, three, num_heads, width)
            yield place.permute(2, 0, 3, 1, 4)
        else:
            yield torch.empty_like(tensor)


def _put_gradients(
    places: Learning,
    scores: _Scores,
    terms: AffineTerms | None,
    grad: Float[Tensor, "B H T Dv"],
    tile: _Tile,
    weights: Float[Tensor, "b h T C"],
) -> None:
    """Write a tile's part of all gradients."""
    found = places.split()
    (query, query_unit), (key, key_unit) = scores.queries(tile), scores.keys(tile)
    grad_rows = scores.dense("grad", tile.of(grad))
    change = scores.take("scores", *weights.shape)
    flat = change.flatten(0, 1)
    torch.bmm(grad_rows, scores.values(tile).mT, out=flat)
    if found.shift is not None:
        tile.of(found.shift).copy_(_sum_over_seen(change, terms, tile))
    moved = change.mul_(weights).sum(dim=-1, keepdim=True)
    if found.alpha is not None:
        tile.of(found.alpha).copy_(moved)
    change.addcmul_(weights, moved, value=-1)
    if terms is not None:
        change.mul_(tile.of(terms.alpha))
        weights = scores.affine(weights, terms, tile)
    if found.value is not None:
        scores.put(found.value, tile, weights.flatten(0, 1).mT, grad_rows)
    if found.bias is not None:
        part = tile.of(found.bias)
        part += change.sum_to_size(part.shape)
    scale = scores.scale
    if found.query is not None:
        scores.put(found.query, tile, flat, key, scale, query_unit, found.query_factor)
    if found.key is not None:
        scores.put(found.key, tile, flat.mT, query, scale, key_unit, found.key_factor)


def _sum_over_seen(
    change: Float[Tensor, "b h T C"], terms: AffineTerms, tile: _Tile
) -> Float[Tensor, "b h T 1"]:
    if terms.seen is None:
        return change.sum(dim=-1, keepdim=True)
    seen = tile.of(terms.seen).to(change.dtype)
    return (change[..., : seen.shape[3]] * seen).sum(dim=-1, keepdim=True)


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

"""The inner attention: query, key and value to one output per head, of any variant."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from levelhead.capped import CappedAttention, fits_capped_attention
from levelhead.fused import leave_fused
from levelhead.kernels_mapped import Then, is_observed
from levelhead.parts.base import AttentionShape
from levelhead.parts.normalisers import Softmax
from levelhead.parts.outputs import Gate, Precondition
from levelhead.parts.scores import DotProduct, SoftCap
from levelhead.parts.weights import Affine
from levelhead.reference import Call, plain_weights, repeat_heads
from levelhead.score_tiles import AffineTerms
from levelhead.shapes import check_attention_inputs, complaint, describe, require
from levelhead.sizes import check_sizes
from levelhead.stages.chunks import map_query_blocks
from levelhead.stages.masks import resolve_mask
from levelhead.variants import Variant, make_parts, parse_variant
from levelhead.visible import real_queries

Rope = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class InnerAttention(nn.Module):
    """Attention from query, key and value to one output per head, of any variant.

        attn_output = output(weights(normaliser(mask(cap(scale * norm(q, k))))) @ value)

    The fused form never builds a T x S floating-point matrix (``levelhead.variants()`` states
    the exceptions); ``levelhead.reference_attention`` is the same, plain.

    Args:
        variant: Terms joined by ``+``; see ``levelhead.variants()``. Terms of the projections
            stage belong to ``Attention``.
        embed_dim: E, width of the hidden states that alpha and gates read.
        num_heads: H.
        num_kv_heads: Hkv, dividing H; H by default.
        head_dim: D; ``embed_dim / num_heads`` by default.
        scale: Factor on the dot product; ``D ** -0.5`` by default. Norms that define their own
            scale ignore it.
        dropout_p: Probability of dropping an attention weight in training.
        bias: Whether new projections get a bias where the term leaves it open.
        device: Where new parameters live.
        dtype: Of new parameters.

    Raises:
        ValueError: An illegal variant or sizes that do not fit.
    """

    norm: DotProduct
    cap: SoftCap | None
    normaliser: Softmax
    weights: Affine | None
    precondition: Precondition | None
    gate: Gate | None

    def __init__(
        self,
        variant: str | Variant = "softmax",
        *,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        scale: float | None = None,
        dropout_p: float = 0.0,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        variant = parse_variant(variant)
        require(
            not variant.has_projections,
            "terms of the projections stage act on q, k and v projections, which an "
            "InnerAttention does not have",
            f"variant={str(variant)!r}",
            "levelhead.Attention, or levelhead.convert for an existing model",
        )
        shape = check_sizes(embed_dim, num_heads, num_kv_heads, head_dim, bias, device, dtype)
        self._build(variant, shape, make_parts(variant, shape), scale, dropout_p)

    @classmethod
    def from_parts(
        cls,
        variant: Variant,
        shape: AttentionShape,
        parts: dict[str, Any],
        scale: float | None = None,
        dropout_p: float = 0.0,
    ) -> "InnerAttention":
        """Build from parts that are there already; a projections part is left to the caller.

        Args:
            variant: What the parts make up.
            shape: The host.
            parts: Slot to part.
            scale: As in the constructor.
            dropout_p: As in the constructor.

        Returns:
            The module.
        """
        inner = cls.__new__(cls)
        nn.Module.__init__(inner)
        inner._build(variant, shape, parts, scale, dropout_p)
        return inner

    def _build(
        self,
        variant: Variant,
        shape: AttentionShape,
        parts: dict[str, Any],
        scale: float | None,
        dropout_p: float,
    ) -> None:
        _check_factors(scale, dropout_p)
        self.variant, self.shape, self.dropout_p = variant, shape, dropout_p
        self.scale = shape.head_dim**-0.5 if scale is None else scale
        self.norm, self.normaliser = parts["norm"], parts["normaliser"]
        self.cap, self.weights = parts.get("cap"), parts.get("weights")
        self.precondition, self.gate = parts.get("precondition"), parts.get("gate")

    def extra_repr(self) -> str:
        return f"variant={str(self.variant)!r}, scale={self.norm.score_scale(self.scale):.6g}"

    def outputs(self) -> Iterator[Precondition | Gate]:
        """Yield the parts of the output stage, in their order."""
        for part in (self.precondition, self.gate):
            if part is not None:
                yield part

    def forward(
        self,
        query: Float[Tensor, "B H T D"],
        key: Float[Tensor, "B Hkv S D"],
        value: Float[Tensor, "B Hkv S Dv"],
        hidden_states: Float[Tensor, "B T E"] | None = None,
        *,
        attn_mask: Bool[Tensor, "..."] | None = None,
        attn_bias: Float[Tensor, "..."] | None = None,
        is_causal: bool = False,
        token_mask: Bool[Tensor, "#B T"] | None = None,
        scale: float | None = None,
        dropout_p: float | None = None,
        rope: Rope | None = None,
    ) -> Float[Tensor, "B H T Dv"]:
        """Attend.

        Args:
            query: Queries.
            key: Keys.
            value: Values.
            hidden_states: Input of the attention on the query side; needed by affine and gate.
            attn_mask: True = may attend; ``[T, S]`` or broadcastable ``[B, H, T, S]``. A query
                that may attend to nothing gives exact zeros.
            attn_bias: Added to the scores, same shapes; values at or below
                ``finfo(dtype).min / 2`` mean "may not attend".
            is_causal: Forbid the future; with more keys than queries the last query sits on the
                last key (cached decoding). Applies together with a mask.
            token_mask: True = a real token, for running means; by default read off the mask as
                in self-attention.
            scale: Factor on the dot product in this call.
            dropout_p: Probability of dropping a weight in this call, in training or not; by
                default that of the constructor, in training only.
            rope: Rotary embedding, ``(query, key) -> (query, key)``; the norm part comes before.

        Returns:
            One output per query and head.

        Raises:
            ValueError: Shapes, dtypes or masks that do not fit, hidden states missing.
        """
        query, key, value = to_autocast_dtype(query, key, value)
        self.check_fit(query, key, value, hidden_states)
        projected = query, key, value
        query, key = self.norm.prepare(query, key)
        if rope is not None:
            query, key = rope(query, key)
        query, key, value = leave_fused(projected, (query, key, value))
        call = self.check(
            query, key, value, attn_mask, attn_bias, is_causal, token_mask, scale, dropout_p
        )
        return self.attend(query, key, value, hidden_states, call)

    def check_fit(
        self, query: Tensor, key: Tensor, value: Tensor, hidden_states: Tensor | None
    ) -> None:
        """Check that a call fits the sizes this attention was built for.

        Args:
            query: Queries.
            key: Keys.
            value: Values.
            hidden_states: Input of the attention, or None.

        Raises:
            ValueError: Other heads or head_dim, or hidden states that are missing.
        """
        check_attention_inputs(query, key, value)
        shape = self.shape
        if query.shape[1] != shape.num_heads or query.shape[3] != shape.head_dim:
            raise ValueError(
                complaint(
                    "query must have the heads and head_dim this attention was built for",
                    f"query of shape {list(query.shape)}",
                    f"[B, {shape.num_heads}, T, {shape.head_dim}]",
                )
            )
        if self.variant.needs_hidden_states:
            self._check_hidden_states(query, hidden_states)

    def check(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        attn_bias: Tensor | None = None,
        is_causal: bool = False,
        token_mask: Tensor | None = None,
        scale: float | None = None,
        dropout_p: float | None = None,
    ) -> Call:
        """Check prepared queries and keys, and bring the call into one form.

        Args:
            query: Queries, as the kernel gets them: normed, rotated.
            key: Keys, likewise.
            value: Values.
            attn_mask: As in ``forward``. Likewise the others.
            attn_bias: As in ``forward``.
            is_causal: As in ``forward``.
            token_mask: As in ``forward``.
            scale: As in ``forward``.
            dropout_p: As in ``forward``.

        Returns:
            The call.

        Raises:
            ValueError: Something does not fit.
        """
        check_attention_inputs(query, key, value)
        _check_factors(scale, dropout_p)
        if token_mask is not None:
            _check_token_mask(token_mask, query)
        mask = resolve_mask(query, key, attn_mask, attn_bias, is_causal)
        _check_device(query, attn_mask=mask.mask, attn_bias=mask.bias, token_mask=token_mask)
        if token_mask is None and self.weights is not None and self.training:
            token_mask = real_queries(mask.without_finite_bias())
        factor = self.norm.score_scale(self.scale if scale is None else scale)
        if dropout_p is None:
            dropout_p = self.dropout_p if self.training else 0.0
        return Call(mask, factor, token_mask, dropout_p)

    def _check_hidden_states(self, query: Tensor, hidden_states: Tensor | None) -> None:
        batch, _, num_queries, _ = query.shape
        width = self.shape.embed_dim
        shape = (batch, num_queries, width)
        is_float = hidden_states is not None and hidden_states.is_floating_point()
        if hidden_states is None or not is_float or hidden_states.shape != shape:
            raise ValueError(
                complaint(
                    f"{self.variant} reads hidden_states, the input of the attention",
                    f"hidden_states={describe(hidden_states)}",
                    f"a float tensor [{batch}, {num_queries}, {width}]",
                )
            )

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        hidden_states: Tensor | None,
        call: Call,
    ) -> Tensor:
        """Attend with queries and keys the norm part has prepared, fused.

        Args:
            query: Prepared queries.
            key: Prepared keys.
            value: Values.
            hidden_states: Input of the attention, or None.
            call: What ``check`` returned.

        Returns:
            One output per query and head.
        """
        is_bare = self.cap is None and call.dropout_p == 0
        has_scores = is_bare and self.normaliser.builds_scores(query, key, call.mask)
        maps = list(self._maps(value, hidden_states, call, has_scores))
        attn_output = self.mix(query, key, value, call, maps[0] if maps else None)
        for then in maps[1:]:
            assert not isinstance(then, AffineTerms)
            attn_output = then(attn_output)
        return attn_output

    def _maps(
        self, value: Tensor, hidden_states: Tensor | None, call: Call, has_scores: bool
    ) -> Iterator[Then | AffineTerms]:
        """Yield what is done to the output, or to weights that are at hand, in order."""
        if self.weights is not None:
            assert hidden_states is not None
            coefficients = self.weights.coefficients(hidden_states, call.token_mask)
            if has_scores:
                yield self.weights.terms(call.mask, *coefficients)
            else:
                yield self.weights.then(value, call.mask, *coefficients)
        for part in self.outputs():
            yield _then(part, hidden_states)

    def mix(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        call: Call,
        then: Then | AffineTerms | None = None,
    ) -> Tensor:
        """Return the normalised weights times the values: scores and normaliser stage, fused.

        Args:
            query: Prepared queries.
            key: Prepared keys.
            value: Values.
            call: What ``check`` returned.
            then: What is done to the output, or to weights that are at hand.

        Returns:
            One output per query and head.
        """
        if self.cap is None:
            return self.normaliser.fused(
                query, key, value, call.mask, call.scale, call.dropout_p, then
            )
        assert not isinstance(then, AffineTerms)
        attn_output = self._mix_capped(query, key, value, call, self.cap)
        return attn_output if then is None else then(attn_output)

    def _mix_capped(
        self, query: Tensor, key: Tensor, value: Tensor, call: Call, cap: SoftCap
    ) -> Tensor:
        key, value = (repeat_heads(rows, query.shape[1]) for rows in (key, value))

        extra_score = self.normaliser.extra_score(query)

        def plain(query: Tensor, key: Tensor, value: Tensor, extra_score: Tensor | None) -> Tensor:
            def block(query: Tensor, start: int, stop: int) -> Tensor:
                mask = call.mask.rows(start, stop)
                seen = slice(0, mask.num_keys)
                weights = plain_weights(self, query, key[:, :, seen], extra_score, mask, call)
                return weights @ value[:, :, seen]

            return map_query_blocks(block, query)

        if not fits_capped_attention(query, call.mask, call.dropout_p, cap.soft_cap):
            return plain(query, key, value, extra_score)
        return CappedAttention.apply(  # pyright: ignore[reportReturnType]
            query, key, value, extra_score, call.mask, call.scale, cap.soft_cap, plain
        )  # fmt: skip


def _then(part: nn.Module, hidden_states: Tensor | None) -> Then:
    """Return what a part does: its equation where it is nothing else, or a call of the module."""
    if type(part) is Precondition and not is_observed(part):
        return part.mapped()
    return lambda attn_output: part(attn_output, hidden_states)


def _check_factors(scale: float | None, dropout_p: float | None) -> None:
    if scale is not None and not abs(scale) < math.inf:  # NaN is no less than anything
        raise ValueError(complaint("scale must be finite", f"scale={scale}"))
    if dropout_p is not None and not 0.0 <= dropout_p < 1.0:
        raise ValueError(complaint("dropout_p must be in [0, 1)", f"dropout_p={dropout_p}"))


def _check_device(query: Tensor, **masks: Tensor | None) -> None:
    for name, mask in masks.items():
        if mask is not None and mask.device != query.device:
            came = f"{name} on {mask.device}, query on {query.device}"
            raise ValueError(complaint(f"{name} must be on the device of the query", came))


def _check_token_mask(token_mask: Tensor, query: Tensor) -> None:
    batch, _, num_queries, _ = query.shape
    fits = token_mask.ndim == 2 and token_mask.shape[1] == num_queries
    if token_mask.dtype != torch.bool or not fits or token_mask.shape[0] not in (1, batch):
        rule = f"token_mask must be boolean [B, T] = [{batch}, {num_queries}]"
        raise ValueError(complaint(rule, f"token_mask={describe(token_mask)}"))


def to_autocast_dtype(*tensors: Tensor) -> list[Tensor]:
    """Bring tensors to the dtype autocast would give to a fused attention, if it is on.

    Args:
        tensors: On one device.

    Returns:
        The tensors; float64 stays.
    """
    device = tensors[0].device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return list(tensors)
    low = torch.get_autocast_dtype(device)
    return [t if t.dtype == torch.float64 else t.to(low) for t in tensors]

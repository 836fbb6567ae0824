"""The attention layer: hidden states to output, around an inner attention."""

from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from levelhead.inner import InnerAttention, Rope, to_autocast_dtype
from levelhead.parts.projections import WHICH, Projections
from levelhead.reference import attend_plainly
from levelhead.shapes import complaint, describe, require_float
from levelhead.sharding import whole_parameters
from levelhead.sizes import check_sizes
from levelhead.steps import StartsFromWeights
from levelhead.variants import Variant, make_parts, parse_variant


class KVCache(Protocol):
    """What a cache must do: take the new keys and values, return all so far."""

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append ``[B, Hkv, T, D]`` and return ``[B, Hkv, S, D]``."""
        ...


class Attention(StartsFromWeights):
    """Multi-head attention of any variant: hidden states to output.

        output = InnerAttention(hidden_states @ W_q, context @ W_k, context @ W_v) @ W_o

    Args:
        embed_dim: E.
        num_heads: H.
        variant: Terms joined by ``+``; see ``levelhead.variants()``.
        num_kv_heads: Hkv, dividing H; H by default.
        head_dim: D; ``embed_dim / num_heads`` by default.
        kv_embed_dim: Width of the context in cross attention; E by default.
        qkv_bias: Whether q, k and v projections have a bias.
        proj_bias: Whether the output projection has one.
        scale: Factor on the dot product; ``D ** -0.5`` by default.
        dropout_p: Probability of dropping an attention weight in training.
        rope: Rotary embedding of every call that does not bring its own,
            ``(query, key) -> (query, key)`` on ``[B, H, T, D]``.
        device: Where parameters live.
        dtype: Of parameters.

    Affine and sigma_reparam keep state that moves once per training step: call
    ``levelhead.track_steps(model)`` once on the outermost model.

    Example:
        >>> import torch, levelhead as lh
        >>> attention = lh.Attention(48, 3, variant="quest + gate")
        >>> attention(torch.randn(2, 7, 48), is_causal=True).shape
        torch.Size([2, 7, 48])

    Raises:
        ValueError: An illegal variant or sizes that do not fit.
    """

    projections: Projections

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        variant: str | Variant = "softmax",
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        kv_embed_dim: int | None = None,
        qkv_bias: bool = False,
        proj_bias: bool = True,
        scale: float | None = None,
        dropout_p: float = 0.0,
        rope: Rope | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.variant = parse_variant(variant)
        shape = check_sizes(
            embed_dim, num_heads, num_kv_heads, head_dim, qkv_bias, device, dtype, kv_embed_dim
        )
        self.shape, self.rope = shape, rope
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.num_kv_heads, self.head_dim = shape.num_kv_heads, shape.head_dim
        q_width, kv_width = num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        kv_dim = shape.kv_dim("k")
        self.q_proj = nn.Linear(embed_dim, q_width, bias=qkv_bias, **shape.factory)
        self.k_proj = nn.Linear(kv_dim, kv_width, bias=qkv_bias, **shape.factory)
        self.v_proj = nn.Linear(kv_dim, kv_width, bias=qkv_bias, **shape.factory)
        self.o_proj = nn.Linear(q_width, embed_dim, bias=proj_bias, **shape.factory)
        parts = make_parts(self.variant, shape)
        self.projections = parts.pop("projections")
        self.inner = InnerAttention.from_parts(self.variant, shape, parts, scale, dropout_p)
        if not self.q_proj.weight.is_meta:
            self.projections.ensure_derived(self._weights())

    @property
    def scale(self) -> float:
        """The factor on the dot product that is in use."""
        return self.inner.norm.score_scale(self.inner.scale)

    def extra_repr(self) -> str:
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, "
            f"num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, "
            f"variant={str(self.variant)!r}"
        )

    @property
    def is_derived(self) -> bool:
        return self.projections.derived

    def derive(self) -> None:
        """Let the projections part start from the weights as they are now.

        Only ``spectral(form='svd')`` and ``sigma_reparam`` keep something of the initial
        weights; call this after initialising weights by hand (on every rank, where they are
        sharded).
        """
        linears = [self._linear(which) for which in WHICH]
        with whole_parameters([*linears, *self.projections.modules()]):
            self.projections.derive(self._weights())
        self.projections.derived = True

    def derived_parameters(self) -> list[nn.Parameter]:
        return list(self.projections.parameters())

    def _weights(self) -> dict[str, Tensor]:
        return {which: self._linear(which).weight for which in WHICH}

    def _linear(self, which: str) -> nn.Linear:
        return {"q": self.q_proj, "k": self.k_proj, "v": self.v_proj}[which]

    def _project(self, which: str, hidden_states: Tensor) -> Tensor:
        linear = self._linear(which)
        projected = self.projections.project(which, hidden_states, linear.weight, linear.bias)
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(
        self,
        hidden_states: Float[Tensor, "B T E"],
        context: Float[Tensor, "B S Ekv"] | None = None,
        *,
        attn_mask: Bool[Tensor, "..."] | None = None,
        attn_bias: Float[Tensor, "..."] | None = None,
        is_causal: bool = False,
        token_mask: Bool[Tensor, "#B T"] | None = None,
        rope: Rope | None = None,
        kv_cache: KVCache | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from the hidden states to themselves, or to a context.

        The norm part comes before the rotary embedding, the cache after both.

        Args:
            hidden_states: Input.
            context: What keys and values are made of; the hidden states by default.
            attn_mask: True = may attend; ``[T, S]`` or broadcastable ``[B, H, T, S]``.
            attn_bias: Added to the scores, same shapes.
            is_causal: Forbid the future; bottom-right with more keys than queries.
            token_mask: True = a real token, for running means; by default read off the mask in
                self-attention, and all of them in cross attention.
            rope: Rotary embedding of this call, ``(query, key) -> (query, key)``.
            kv_cache: Takes the new keys and values and returns all of them.
            need_weights: Return the attention weights too, through the plain T x S form, which
                then also gives the output (with dropout in training: from its own draw).

        Returns:
            ``[B, T, E]``, or that and the weights ``[B, H, T, S]`` (before the output stage).

        Raises:
            ValueError: Shapes or masks that do not fit.
        """
        self._check_input("hidden_states", hidden_states, self.embed_dim)
        source = hidden_states if context is None else context
        self._check_input("context", source, self.shape.kv_dim("k"))
        self.projections.ensure_derived(self._weights())
        query = self._project("q", hidden_states)
        key, value = self._project("k", source), self._project("v", source)
        query, key, value = to_autocast_dtype(query, key, value)
        query, key = self.inner.norm.prepare(query, key)
        rope = self.rope if rope is None else rope
        if rope is not None:
            query, key = rope(query, key)
        if kv_cache is not None:
            key, value = kv_cache.update(key, value)
        if token_mask is None and context is not None:
            token_mask = torch.ones(1, query.shape[2], dtype=torch.bool, device=query.device)
        call = self.inner.check(query, key, value, attn_mask, attn_bias, is_causal, token_mask)
        if need_weights:
            plain = attend_plainly(self.inner, query, key, value, hidden_states, call)
            return self._merge(plain.attn_output), plain.attn_weights
        return self._merge(self.inner.attend(query, key, value, hidden_states, call))

    def _check_input(self, name: str, tensor: Tensor, width: int) -> None:
        require_float(**{name: tensor})
        if tensor.ndim != 3 or tensor.shape[-1] != width:
            rule = f"{name} must be [B, T, {width}]"
            raise ValueError(complaint(rule, f"{name}={describe(tensor)}"))

    def _merge(self, attn_output: Float[Tensor, "B H T D"]) -> Float[Tensor, "B T E"]:
        return self.o_proj(attn_output.transpose(1, 2).flatten(2))

"""One call of one attention, as its kernel sees it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from levelhead.measure.streaming import AttentionScores
from levelhead.sites.sites import AttentionSite
from levelhead.stages.masks import AttentionMask, resolve_mask


@dataclass(frozen=True)
class AttentionCall:
    """What goes into the kernel of one attention in one call, detached from the graph.

        scores = mask(cap(scale * query @ key^T))

    Query and key come after the host's norms and rotation. A host that multiplies its scale or a
    factor per head into the query (Whisper, Swin V2, unfused timm) hands over that query, with
    the rest of the factor in ``scale``: the scores are the host's in every case. Attentions over
    channels ("cross_covariance", "channel") have the channels of a head where others have tokens.

    The tensors are the host's own: a static cache overwrites its keys and values in the next
    call, so clone what must outlive the callback.

    Attributes:
        site: Where.
        call_idx: How many calls of this site came before, in this capture.
        query: ``[B, H, T, D]``.
        key: ``[B, Hkv, S, D]``.
        value: ``[B, Hkv, S, Dv]``.
        scale: The factor left to apply to the dot product.
        attn_mask: True = may attend, or None.
        attn_bias: Added to the scores, or None; values at or below ``finfo.min / 2`` forbid.
        is_causal: The future is forbidden, bottom-right, beside mask and bias.
        soft_cap: The host's tanh cap on scores, or None.
        sink_score: The score ``[H]`` of one more key without a value, or None.
        hidden_states: ``[B, T, E]``, what the queries were projected from; None where the
            host's forward got none.
    """

    site: AttentionSite
    call_idx: int
    query: Float[Tensor, "B H T D"]
    key: Float[Tensor, "B Hkv S D"]
    value: Float[Tensor, "B Hkv S Dv"]
    scale: float
    attn_mask: Bool[Tensor, "..."] | None = None
    attn_bias: Float[Tensor, "..."] | None = None
    is_causal: bool = False
    soft_cap: float | None = None
    sink_score: Float[Tensor, " H"] | None = None
    hidden_states: Float[Tensor, "B T E"] | None = None

    def mask(self) -> AttentionMask:
        """Return mask, bias and causality in the one form.

        Returns:
            What each query may attend to.
        """
        return resolve_mask(self.query, self.key, self.attn_mask, self.attn_bias, self.is_causal)

    def scores(self) -> AttentionScores:
        """Return what the measures of ``levelhead.measure`` take.

        Returns:
            All that decides the scores; nothing is computed yet.
        """
        return AttentionScores(
            self.query,
            self.key,
            scale=self.scale,
            attn_mask=self.attn_mask,
            attn_bias=self.attn_bias,
            is_causal=self.is_causal,
            sink_score=self.sink_score,
            soft_cap=self.soft_cap,
        )


@dataclass(frozen=True)
class Seen:
    """What a watcher saw go into a kernel, in the fields of ``AttentionCall``."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    attn_mask: Tensor | None = None
    attn_bias: Tensor | None = None
    is_causal: bool = False
    soft_cap: float | None = None
    sink_score: Tensor | None = None

    def with_four_axes(self, num_heads: int) -> "Seen":
        """Give tensors of fewer axes the four axes ``[B, H, T, D]`` and ``[B, H, T, S]``.

        Args:
            num_heads: H, for hosts that keep the heads inside the batch.

        Returns:
            The same with four axes everywhere.
        """
        heads_in_batch = self.query.ndim == 3

        def widen(tensor: Tensor | None) -> Any:
            if tensor is None or tensor.ndim == 4:
                return tensor
            if heads_in_batch and tensor.ndim == 3 and tensor.shape[0] > 1:
                return tensor.unflatten(0, (-1, num_heads))
            return tensor[(None,) * (4 - tensor.ndim)]

        names = ("query", "key", "value", "attn_mask", "attn_bias")
        return replace(self, **{name: widen(getattr(self, name)) for name in names})


Emit = Callable[[Seen], None]


def seen_in_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Seen:
    """Translate the arguments of ``F.scaled_dot_product_attention``.

    Its causal rule is top-left: keys past the number of queries are never attended to.

    Args:
        query: As there.
        key: As there.
        value: As there.
        attn_mask: As there: boolean or float.
        dropout_p: As there.
        is_causal: As there.
        scale: As there.
        enable_gqa: As there.

    Returns:
        The same in this library's rules.
    """
    bias = None
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask, bias = None, attn_mask
    num_queries, num_keys = query.shape[-2], key.shape[-2]
    if is_causal and num_queries < num_keys:
        key, value = key[..., :num_queries, :], value[..., :num_queries, :]
    elif is_causal and num_queries > num_keys:
        everything = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
        attn_mask, is_causal = everything.tril(), False
    factor: float = query.shape[-1] ** -0.5 if scale is None else scale
    return Seen(query, key, value, factor, attn_mask, bias, is_causal)

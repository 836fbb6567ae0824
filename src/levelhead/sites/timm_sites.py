"""How timm keeps attention. Its classes are known by name, so timm itself is never imported."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.sites.layout import Layout, Projection, Stored, fused, linear, whole
from levelhead.sites.reading import (
    check_accounted,
    dropout_of,
    real_norm,
    real_scale,
    refuse,
)
from levelhead.sites.sites import AttentionSite

MAX_LOG_SCALE = math.log(1 / 0.01)
"""Liu et al. 2022, Swin Transformer V2 (arXiv:2111.09883): the temperature stays above 0.01."""

PARTS = frozenset({
    "qkv", "q", "k", "v", "q_proj", "k_proj", "v_proj", "q_bias", "v_bias", "proj",
    "q_norm", "k_norm", "norm", "gate", "logit_scale", "temperature",
    "relative_position_bias_table", "cpb_mlp", "rel_pos",
})  # fmt: skip


@dataclass(frozen=True)
class TimmKind:
    """What the class of a timm attention says about it.

    Attributes:
        facts: Fields of ``AttentionSite`` that are the same for every module of the class.
        roles: Which third of the fused projection plays query, key and value.
        scale: The factor on the dot product where the module keeps none.
        head_scale: The learned factor of each head, as it is now.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    roles: tuple[int, int, int] = (0, 1, 2)
    scale: float | None = None
    head_scale: Callable[[Any], Tensor] | None = None


def _swin_v2_scale(module: Any) -> Tensor:
    return torch.clamp(module.logit_scale, max=MAX_LOG_SCALE).exp()


WINDOW = TimmKind({"kind": "window"})
KINDS: dict[str, TimmKind] = {
    "timm.layers.attention.Attention": TimmKind(),
    "timm.layers.attention.AttentionRope": TimmKind({"has_rope": True}),
    "timm.models.beit.Attention": TimmKind(),
    "timm.models.eva.EvaAttention": TimmKind(),
    "timm.models.vision_transformer_relpos.RelPosAttention": TimmKind(),
    "timm.models.cait.ClassAttn": TimmKind({"kind": "class"}),
    "timm.models.swin_transformer.WindowAttention": WINDOW,
    "timm.models.swin_transformer_v2.WindowAttention": TimmKind(
        {"kind": "window", "is_cosine": True}, scale=1.0, head_scale=_swin_v2_scale
    ),
    "timm.models.xcit.XCA": TimmKind(
        {"kind": "cross_covariance", "is_cosine": True},
        scale=1.0,
        head_scale=lambda module: module.temperature,
    ),
    "timm.models.davit.WindowAttention": WINDOW,
    # scores = (scale k)^T v over channels, applied to q: the names in its code are not the roles.
    "timm.models.davit.ChannelAttention": TimmKind({"kind": "channel"}, roles=(1, 2, 0)),
}


def read_timm(name: str, module: nn.Module, model: nn.Module) -> AttentionSite | None:
    """Describe an attention of timm, also of a subclass.

    Args:
        name: Dotted path in the model.
        module: Any module of it.
        model: The model.

    Returns:
        The site, or None for a module that is no attention known here.
    """
    homes = (f"{cls.__module__}.{cls.__qualname__}" for cls in type(module).__mro__)
    kind = next((KINDS[home] for home in homes if home in KINDS), None)
    return None if kind is None else _describe(name, module, model, kind)


def _describe(name: str, module: Any, model: nn.Module, kind: TimmKind) -> AttentionSite:
    check_accounted(name, module, PARTS)
    q, k, v = _projections(name, module, kind.roles)
    head_scale = kind.head_scale
    facts: dict[str, Any] = {"has_rope": _has_rope(module, model)} | kind.facts
    return AttentionSite(
        name=name,
        module=module,
        layout=Layout(q, k, v, linear(module.proj)),
        num_heads=module.num_heads,
        scale=real_scale(name, module, kind.scale),
        head_scale=None if head_scale is None else (lambda: head_scale(module)),
        q_norm=real_norm(module, ["q_norm"]),
        k_norm=real_norm(module, ["k_norm"]),
        has_position_bias=_has_position_bias(module),
        window_size=_window_size(module) if facts.get("kind") == "window" else None,
        has_gate=getattr(module, "gate", None) is not None,
        output_norm=real_norm(module, ["norm"]),
        dropout_p=dropout_of(module, ["attn_drop"]),
        **facts,
    )


def _projections(name: str, module: Any, roles: tuple[int, ...]) -> list[Projection]:
    if getattr(module, "qkv", None) is None:
        names = "{}_proj" if hasattr(module, "q_proj") else "{}"
        return [linear(getattr(module, names.format(letter))) for letter in "qkv"]
    width, rest = divmod(module.qkv.out_features, 3)
    if rest:
        refuse(name, module, f"qkv has {3 * width + rest} outputs, which is no multiple of 3")
    projections = fused(module.qkv, width, width, width)
    if getattr(module, "q_bias", None) is not None:  # EVA, BEiT, Swin v2: no bias on keys
        q, k, v = projections
        q_bias, v_bias = (Stored(module, bias, whole) for bias in ("q_bias", "v_bias"))
        projections = [Projection(q.weight, q_bias), k, Projection(v.weight, v_bias)]
    return [projections[role] for role in roles]


def _has_position_bias(module: nn.Module) -> bool:
    names = ("relative_position_bias_table", "cpb_mlp", "rel_pos")
    return any(getattr(module, name, None) is not None for name in names)


def _has_rope(module: nn.Module, model: nn.Module) -> bool:
    """EVA's attention takes the rotation as an argument; only the model says whether it comes."""
    return hasattr(module, "rotate_half") and getattr(model, "rope", None) is not None


def _window_size(module: Any) -> tuple[int, int]:
    height, width = module.window_size
    return int(height), int(width)

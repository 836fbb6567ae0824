"""How transformers keeps attention: one reader for every architecture that goes through the
attention interface, driven by the names its classes give to their parts.

transformers itself is never imported: a class is recognised by its code, a layout by its names.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from levelhead.sites.layout import Layout, Projection, fused, interleaved, linear
from levelhead.sites.reading import (
    check_accounted,
    dropout_of,
    made_by,
    parent_of,
    real_norm,
    real_scale,
    refuse,
)
from levelhead.sites.sites import AttentionSite

HOME = "transformers.models"
INTERFACE = "ALL_ATTENTION_FUNCTIONS"
OWN_FORWARD = frozenset({"NystromformerSelfAttention"})
"""Attentions that are read although they do not go through the interface."""

SEPARATE = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
)
OUTPUTS = (
    "o_proj", "out_proj", "o", "dense", "proj", "projection", "projection_layer", "out_lin",
    "c_proj", "Wo", "output",
)  # fmt: skip
THIRDS = ("qkv", "Wqkv", "c_attn")
GROUPED = ("qkv_proj",)
INTERLEAVED = ("query_key_value",)
GATED_QUERY = frozenset({"Qwen3NextAttention", "Qwen3_5Attention", "Qwen3_5MoeAttention"})
"""Their ``q_proj`` holds, head by head, the query and the logits of a gate."""

Q_NORMS = ("q_norm", "q_layernorm", "query_layernorm", "q_layer_norm", "qk_norm")
K_NORMS = ("k_norm", "k_layernorm", "key_layernorm", "k_layer_norm", "qk_norm")
VALUE_CHANGES = ("v_norm", "v_scale")
"""What makes the values something else than the stored projection; refused."""
OTHER_PARTS = ("sinks", "relative_attention_bias", "q_attn", "attn_sub_norm", "LayerNorm")
EXTRA_PARTS = {"NystromformerSelfAttention": ("conv",)}
PARTS = frozenset(
    {name for names in SEPARATE for name in names}
    | {*OUTPUTS, *THIRDS, *GROUPED, *INTERLEAVED, *Q_NORMS, *K_NORMS, *OTHER_PARTS}
)

HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
KV_HEADS = ("num_key_value_heads", "num_kv_heads")
HEAD_DIMS = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
SOFT_CAPS = ("attn_logit_softcapping", "attn_logit_softcap")
DROPOUTS = ("attention_dropout", "attn_dropout", "dropout")
CROSS_NAMES = frozenset({
    "crossattention", "cross_attn", "cross_attention", "encoder_attn", "EncDecAttention",
})  # fmt: skip
CAUSAL_BY_CALL = frozenset({
    "clip_text_model", "clipseg_text_model", "groupvit_text_model", "metaclip_2_text_model",
    "owlv2_text_model", "owlvit_text_model", "xclip_text_model",
})  # fmt: skip
"""Text encoders that say ``is_causal=True`` in the call while their modules say False."""


@dataclass(frozen=True)
class Sizes:
    """Heads and their width, as the host says them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


def read_transformers(name: str, module: nn.Module, model: nn.Module) -> AttentionSite | None:
    """Describe an attention of transformers.

    Args:
        name: Dotted path in the model.
        module: Any module of it.
        model: The model.

    Returns:
        The site, or None for a module that is no attention known here.
    """
    if not (made_by(module, HOME) and (goes_through_interface(module) or _runs_itself(module))):
        return None
    check_accounted(name, module, PARTS | set(EXTRA_PARTS.get(type(module).__name__, ())))
    _check_values(name, module)
    sizes = _sizes(name, module)
    q, k, v = _projections(name, module, sizes)
    is_cross = _is_cross(name, module)
    q_norm = real_norm(module, Q_NORMS)
    return AttentionSite(
        name=name,
        module=module,
        layout=Layout(q, k, v, _output(name, module, model)),
        num_heads=sizes.num_heads,
        scale=_scale(name, module, sizes),
        kind=_kind(module, is_cross),
        is_causal=_is_causal(module) and not is_cross,
        q_norm=q_norm,
        k_norm=real_norm(module, K_NORMS),
        norm_spans_heads=_spans_heads(q_norm, sizes),
        has_rope=_has_rope(module) and not is_cross,
        has_position_bias=hasattr(module, "has_relative_attention_bias") and not is_cross,
        soft_cap=_first(module, SOFT_CAPS),
        sink_score=getattr(module, "sinks", None),
        window_size=None if is_cross else _window_size(module),
        has_gate=type(module).__name__ in GATED_QUERY,
        output_norm=real_norm(module, ["attn_sub_norm"]),
        dropout_p=dropout_of(module, DROPOUTS),
    )


def goes_through_interface(module: nn.Module) -> bool:
    """Whether the forward of a module looks its attention function up in transformers' registry.

    Args:
        module: Any module.
    """
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and INTERFACE in code.co_names


def _runs_itself(module: nn.Module) -> bool:
    return type(module).__name__ in OWN_FORWARD


def _first(module: Any, names: tuple[str, ...]) -> Any:
    return next((v for v in (getattr(module, n, None) for n in names) if v is not None), None)


def _has(module: nn.Module, *names: str) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Module) for name in names)


def _sizes(name: str, module: nn.Module) -> Sizes:
    """Heads from the module, else from its configuration; never from a division alone."""
    config = getattr(module, "config", None)
    num_heads = _first(module, HEADS) or _first(config, HEADS)
    if num_heads is None:
        refuse(name, module, f"it has none of {', '.join(HEADS)}, nor has its configuration")
    head_dim = _first(module, HEAD_DIMS)
    if head_dim is None:
        refuse(name, module, f"it has none of {', '.join(HEAD_DIMS)}")
    num_kv_heads = _first(module, KV_HEADS)
    if num_kv_heads is None:
        num_kv_heads = num_heads // getattr(module, "num_key_value_groups", 1)
    return Sizes(int(num_heads), int(num_kv_heads), int(head_dim))


def _projections(name: str, module: nn.Module, sizes: Sizes) -> list[Projection]:
    q_width = sizes.num_heads * sizes.head_dim
    kv_width = sizes.num_kv_heads * sizes.head_dim
    projections = _named_projections(name, module, sizes, q_width, kv_width)
    found = [projection.weight.shape[0] for projection in projections[:2]]
    if found != [q_width, kv_width]:
        refuse(
            name,
            module,
            f"its q and k have {found[0]} and {found[1]} outputs, while {sizes.num_heads} and "
            f"{sizes.num_kv_heads} heads of {sizes.head_dim} need {q_width} and {kv_width}",
        )
    return projections


def _named_projections(
    name: str, module: Any, sizes: Sizes, q_width: int, kv_width: int
) -> list[Projection]:
    for names in SEPARATE:
        if _has(module, *names):
            q, k, v = (getattr(module, n) for n in names)
            if type(module).__name__ in GATED_QUERY:
                return [linear(q, interleaved(0, 2, sizes.num_heads)), linear(k), linear(v)]
            return [linear(q), linear(k), linear(v)]
    if _has(module, "c_attn", "q_attn"):
        return [linear(module.q_attn), *fused(module.c_attn, kv_width, kv_width)]
    for single in (*THIRDS, *GROUPED):
        if _has(module, single):
            return fused(getattr(module, single), q_width, kv_width, kv_width)
    for single in INTERLEAVED:
        if _has(module, single) and sizes.num_kv_heads == sizes.num_heads:
            layer = getattr(module, single)
            return [linear(layer, interleaved(i, 3, sizes.num_heads)) for i in range(3)]
    return refuse(name, module, "its q, k and v projections have no known names")


def _output(name: str, module: nn.Module, model: nn.Module) -> Projection | None:
    """The output projection: in the module, or beside it as in BERT (``output.dense``)."""
    for output in OUTPUTS:
        if _has(module, output):
            return linear(getattr(module, output))
    parent = parent_of(name, model)
    dense = getattr(getattr(parent, "output", None), "dense", None)
    return linear(dense) if isinstance(dense, nn.Linear) else None


SCALES: dict[str, Callable[[Any, Sizes], float]] = {
    "NystromformerSelfAttention": lambda module, sizes: sizes.head_dim**-0.5,
    "ModernBertAttention": lambda module, sizes: sizes.head_dim**-0.5,
    "EsmSelfAttention": lambda module, sizes: module.scaling * sizes.head_dim**-0.5,
    "OpenAIPrivacyFilterAttention": lambda module, sizes: module.scaling**2,
}
"""Classes whose attribute is not their factor on the dot product: they scale q, or q and k."""


def _scale(name: str, module: nn.Module, sizes: Sizes) -> float:
    rule = SCALES.get(type(module).__name__)
    return real_scale(name, module) if rule is None else rule(module, sizes)


def _check_values(name: str, module: nn.Module) -> None:
    for change in VALUE_CHANGES:
        found = getattr(module, change, None)
        if isinstance(found, nn.Module) or (found is not None and found != 1.0):
            refuse(name, module, f"it changes its values by {change}")


def _kind(module: nn.Module, is_cross: bool) -> str:
    if _runs_itself(module):
        return "landmark"
    return "cross" if is_cross else "self"


def _is_cross(name: str, module: nn.Module) -> bool:
    named = not CROSS_NAMES.isdisjoint(name.split("."))
    return (
        named
        or "CrossAttention" in type(module).__name__
        or bool(getattr(module, "is_cross_attention", False))
    )


def _is_causal(module: nn.Module) -> bool:
    model_type = getattr(getattr(module, "config", None), "model_type", None)
    return bool(getattr(module, "is_causal", False)) or model_type in CAUSAL_BY_CALL


def _spans_heads(norm: nn.Module | None, sizes: Sizes) -> bool:
    weight = getattr(norm, "weight", None)
    return weight is not None and sizes.num_heads > 1 and weight.numel() > sizes.head_dim


def _has_rope(module: nn.Module) -> bool:
    """Rotating architectures pass cos and sin to the attention as ``position_embeddings``."""
    if not getattr(module, "use_rope", True):
        return False
    takes = inspect.signature(inspect.unwrap(type(module).forward)).parameters
    config = vars(getattr(module, "config", None) or object)
    return "position_embeddings" in takes and any(key.startswith("rope") for key in config)


def _window_size(module: Any) -> int | None:
    """The module's own window; where it keeps none, the configuration's for its layer."""
    if hasattr(module, "sliding_window"):
        return module.sliding_window
    config = getattr(module, "config", None)
    layer_types, layer_idx = getattr(config, "layer_types", None), getattr(module, "layer_idx", 0)
    if layer_types and layer_types[layer_idx] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)

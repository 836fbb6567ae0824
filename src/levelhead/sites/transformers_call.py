"""One call of transformers' attention interface, brought into this library's words.

Whatever the host's maths needs and is not done here is refused: a keyword that is swallowed is a
model that is silently wrong.
"""

from typing import Any

from torch import Tensor, nn

from levelhead.inner import InnerAttention
from levelhead.parts.scores import UnscaledNorm
from levelhead.reference import attend_plainly
from levelhead.shapes import check_attention_inputs, complaint
from levelhead.sites.host import CHILD, Installed, installed_in

HIDDEN_STATES = "levelhead_hidden_states"
"""Keyword under which a pre-hook hands the input of the attention on to its function."""

HARMLESS = frozenset({
    "sliding_window", "position_ids", "use_cache", "cache_position", "num_items_in_batch",
    "output_hidden_states", "output_router_logits", "output_attentions", "return_dict",
    "deterministic", "layer_idx", "max_length_q", "max_length_k", "logits_to_keep",
})  # fmt: skip
"""Keywords that change nothing of one attention's maths: windows are in the mask already."""

BOUNDARIES = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"})


class AnyShape(InnerAttention):
    """An attention without parameters, for hosts of any shape."""

    def check_fit(
        self, query: Tensor, key: Tensor, value: Tensor, hidden_states: Tensor | None
    ) -> None:
        check_attention_inputs(query, key, value)


def run_installed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **call: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as the child of the module says: the function behind names with parameters.

    Args:
        module: The host's attention.
        query: ``[B, H, T, D]``.
        key: ``[B, Hkv, S, D]``.
        value: ``[B, Hkv, S, Dv]``.
        attention_mask: Boolean (True = may attend), or float and added; or None.
        call: The rest of what the host sends.

    Returns:
        ``[B, T, H, Dv]``, and the attention weights where the host asks for them.

    Raises:
        ValueError: The module holds no parts, or the host sends what is not implemented.
    """
    installed = installed_in(module)
    if installed is None:
        raise ValueError(
            f"{type(module).__name__} runs a converted attention but holds no {CHILD!r} parts; "
            "load the checkpoint with levelhead.from_pretrained, or call levelhead.convert"
        )
    _check_host_terms(installed, call)
    return _attend(
        installed.inner, installed.scale, module, query, key, value, attention_mask, call
    )


def run_by_name(
    inner: InnerAttention,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **call: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend by name alone: the function behind ``levelhead.register``.

    Args:
        inner: The variant, without parameters; a converted module's own child goes first.
        module: As in ``run_installed``, and so are the others.
        query: ``[B, H, T, D]``.
        key: ``[B, Hkv, S, D]``.
        value: ``[B, Hkv, S, Dv]``.
        attention_mask: As in ``run_installed``.
        call: As in ``run_installed``.

    Returns:
        As ``run_installed``.

    Raises:
        ValueError: The host sends what is not implemented.
    """
    if installed_in(module) is not None:
        return run_installed(module, query, key, value, attention_mask, **call)
    for name in ("softcap", "s_aux"):
        if call.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} sends {name}, which a variant chosen by name alone "
                "cannot take in; use levelhead.convert(model, variant)"
            )
    scale = getattr(module, "scaling", None)
    scale = call.get("scaling") if not isinstance(scale, float) else scale
    return _attend(inner, scale, module, query, key, value, attention_mask, call)


def _check_host_terms(installed: Installed, call: dict[str, Any]) -> None:
    """The host's cap and sink must be those that were built in.

    Raises:
        ValueError: They are others.
    """
    soft_cap, cap = call.get("softcap"), installed.inner.cap
    if soft_cap is not None and (cap is None or cap.soft_cap != soft_cap):
        built = None if cap is None else cap.soft_cap
        raise ValueError(
            complaint("the host's cap must be the one it had when converted",
                      f"softcap={soft_cap}, built for {built}")
        )  # fmt: skip
    if call.get("s_aux") is not None and not hasattr(installed.inner.normaliser, "owner"):
        raise ValueError(
            complaint("the host's sink must be known when converted", "s_aux of an unknown host")
        )


def _attend(
    inner: InnerAttention,
    scale: float | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    call: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    _refuse_unknown(module, call)
    sent = call.get("scaling")
    sent = query.shape[-1] ** -0.5 if sent is None else sent
    scale = sent if scale is None else scale
    if scale != sent and isinstance(inner.norm, UnscaledNorm):
        # The host has scaled its queries already (Whisper): give the norm what was projected.
        query = query * (sent / scale)
    else:
        scale = sent
    key, value, masks = _masks(module, query, key, value, attention_mask, call)
    masks |= {"scale": scale, "dropout_p": call.get("dropout", 0.0)}
    hidden_states = call.get(HIDDEN_STATES)
    if call.get("output_attentions"):
        inner.check_fit(query, key, value, hidden_states)
        query, key = inner.norm.prepare(query, key)
        checked = inner.check(query, key, value, **masks)
        plain = attend_plainly(inner, query, key, value, hidden_states, checked)
        return plain.attn_output.transpose(1, 2).contiguous(), plain.attn_weights
    attn_output = inner(query, key, value, hidden_states, **masks)
    return attn_output.transpose(1, 2).contiguous(), None


def _masks(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    call: dict[str, Any],
) -> tuple[Tensor, Tensor, dict[str, Any]]:  # fmt: skip
    """Translate the host's mask, bias and causality; crop keys nobody may see yet."""
    is_causal = call.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    num_queries = query.shape[2]
    is_causal = bool(is_causal) and mask is None and num_queries > 1
    bias = call.get("position_bias")
    if is_causal and key.shape[2] > num_queries:
        # Prefill of a static cache: without a mask the host means top-left alignment.
        key, value = key[:, :, :num_queries], value[:, :, :num_queries]
        bias = None if bias is None else bias[..., :num_queries]
    if mask is not None and not mask.dtype.is_floating_point:
        return key, value, {"attn_mask": mask, "attn_bias": bias, "is_causal": False}
    if mask is not None:
        bias = mask if bias is None else bias + mask
    return key, value, {"attn_mask": None, "attn_bias": bias, "is_causal": is_causal}


KNOWN = HARMLESS | {
    "scaling", "dropout", "is_causal", "position_bias", "softcap", "s_aux", HIDDEN_STATES,
}  # fmt: skip


def _refuse_unknown(module: nn.Module, call: dict[str, Any]) -> None:
    for name, sent in call.items():
        if sent is None or name in KNOWN:
            continue
        if name in BOUNDARIES:
            raise ValueError(
                f"{name} says where packed documents begin, which this attention does not read; "
                "pass position_ids that restart and no attention_mask instead"
            )
        raise ValueError(
            f"{type(module).__name__} sends {name}={type(sent).__name__}, whose meaning for the "
            f"attention is not known here; known: {', '.join(sorted(KNOWN))}"
        )

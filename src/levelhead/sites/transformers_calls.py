"""How transformers runs attention: through functions it looks up by name at every call.

While a capture is active the look-up hands out the same function with an ear at its arguments.
Nothing else changes: not the implementation, not its name, not the arguments.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.shapes import require
from levelhead.sites.calls import Seen
from levelhead.stages.masks import sliding_window_mask

Listener = Callable[[nn.Module, Callable[[], Seen]], None]
_listeners: list[Listener] = []


def listen(listener: Listener) -> Callable[[], None]:
    """Tell a listener of every attention that goes through the interface.

    Args:
        listener: Gets the host's module, and a function that translates the arguments.

    Returns:
        Call it to stop; the look-up is put back with the last listener.
    """
    if not _listeners:
        _wrap_lookup()
    _listeners.append(listener)

    def stop() -> None:
        _listeners.remove(listener)
        if not _listeners:
            _interface().get_interface = _interface().get_interface.__wrapped__

    return stop


def _interface() -> Any:
    return sys.modules["transformers.modeling_utils"].AttentionInterface


def _wrap_lookup() -> None:
    original = _interface().get_interface

    @functools.wraps(original)
    def get_interface(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Any:
        function = original(self, attn_implementation, default)

        @functools.wraps(function)
        def attention(module, query, key, value, attention_mask=None, *args, **kwargs):
            for listener in tuple(_listeners):
                listener(
                    module,
                    lambda: seen_in_interface(
                        attn_implementation, module, query, key, value, attention_mask, **kwargs
                    ),
                )
            return function(module, query, key, value, attention_mask, *args, **kwargs)

        return attention

    _interface().get_interface = get_interface


def seen_in_interface(
    implementation: str | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> Seen:
    """Translate the arguments of an attention function of transformers.

    Eager attention reads everything from its mask. The others take no mask with more than one
    query as causal, and then mean the top-left alignment (a prefill into a static cache), except
    flash attention, whose mask is ``[B, S]`` and whose causality and window come as arguments.

    Args:
        implementation: Name under which the function was looked up.
        module: The host's attention.
        query: ``[B, H, T, D]``.
        key: ``[B, Hkv, S, D]``.
        value: ``[B, Hkv, S, D]``.
        attention_mask: None, boolean, float, ``[B, S]`` or a block mask.
        scaling: Factor on the dot product; ``D ** -0.5`` when None.
        is_causal: Overrides the module's own.
        position_bias: Added to the scores.
        softcap: Tanh cap on the scores.
        s_aux: Score of a sink per head.
        sliding_window: Used by flash attention only; elsewhere it is in the mask.

    Returns:
        The same in this library's rules.
    """
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    name, num_queries = implementation or "eager", query.shape[2]
    require(
        not name.startswith("paged|"),
        "capture needs attention over whole sequences",
        f"attn_implementation={name!r}",
        "'eager', 'sdpa', 'flex_attention', flash attention",
    )
    is_flash = "flash" in name
    mask, bias = _split_mask(attention_mask, query, key)
    if name == "eager" or num_queries == 1 or (attention_mask is not None and not is_flash):
        causal = False
    if is_flash and sliding_window is not None:
        window = sliding_window_mask(num_queries, key.shape[2], sliding_window, query.device)
        mask = window if mask is None else mask & window
    elif causal and not is_flash and key.shape[2] > num_queries:
        key, value = key[:, :, :num_queries], value[:, :, :num_queries]
        position_bias = None if position_bias is None else position_bias[..., :num_queries]
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return Seen(query, key, value, scale, mask, bias, causal, softcap, s_aux)


def _split_mask(mask: Any, query: Tensor, key: Tensor) -> tuple[Tensor | None, Tensor | None]:
    if mask is None:
        return None, None
    if not isinstance(mask, Tensor):
        return _dense(mask, query, key), None
    if mask.ndim == 2:
        return mask.bool()[:, None, None, :], None
    return (mask, None) if mask.dtype == torch.bool else (None, mask)


def _dense(block_mask: Any, query: Tensor, key: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import create_mask

    sizes = (query.shape[0], 1, query.shape[2], key.shape[2])
    return create_mask(block_mask.mask_mod, *sizes, device=str(query.device))

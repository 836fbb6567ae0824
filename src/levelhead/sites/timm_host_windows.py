"""Attention inside windows with a bias that learns."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from levelhead.inner import to_autocast_dtype
from levelhead.score_tiles import fits_score_tiles
from levelhead.sites.host import Installed
from levelhead.stages.score_matrix import attention_of_thirds, learns_on_cpu


def attend_in_windows(
    installed: Installed,
    thirds: Float[Tensor, "3 B H T D"],
    hidden_states: Float[Tensor, "B T E"],
    attn_mask: Bool[Tensor, "B 1 T T"] | None,
    attn_bias: Float[Tensor, "1 H T T"],
) -> Float[Tensor, "B H T D"]:
    """Attend inside windows.

    While the bias learns on a CPU, norms, scores and all their gradients are computed tile by
    tile; else as in every other attention, which also runs where
    somebody listens to it.

    Args:
        installed: What conversion put into the host.
        thirds: Queries, keys and values.
        hidden_states: Input of the attention.
        attn_mask: True = may attend, or None.
        attn_bias: Position bias.

    Returns:
        One output per query and head.
    """
    inner = installed.inner
    (thirds,) = to_autocast_dtype(thirds)
    query, key, value = thirds
    if not _takes_thirds(installed, thirds, attn_bias):
        call = {"attn_mask": attn_mask, "attn_bias": attn_bias}
        return installed(query, key, value, hidden_states, **call)
    inner.check_fit(query, key, value, hidden_states)
    call = inner.check(query, key, value, attn_mask, attn_bias)
    assert call.mask.bias is not None
    attn_output = attention_of_thirds(
        thirds, inner.norm.row_norms(), call.mask.bias, call.mask.allowed(), call.scale,
        inner.normaliser.extra_score(query), inner.affine_terms(hidden_states, call),
    )  # fmt: skip
    for part in inner.outputs():
        attn_output = part(attn_output, hidden_states)
    return attn_output


def _takes_thirds(installed: Installed, thirds: Tensor, attn_bias: Tensor) -> bool:
    inner = installed.inner
    dropout_p = inner.dropout_p if inner.training else 0.0
    is_watched = _has_hooks(installed) or _has_hooks(inner) or "check" in vars(inner)
    if is_watched or inner.cap is not None:
        return False
    return learns_on_cpu(attn_bias) and fits_score_tiles(thirds, dropout_p)


def _has_hooks(module: torch.nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )

"""Attention with capped scores on a CPU, where no fused kernel of torch bends scores."""

import math
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from levelhead.capped_kernel import CappedKernel
from levelhead.capped_tiles import CappedTiles
from levelhead.modes import is_forward_mode, is_transformed
from levelhead.plain_gradients import needs_plain_gradients, plain_gradients
from levelhead.shapes import without_autocast
from levelhead.stages.masks import AttentionMask

_DTYPES = (torch.float32, torch.float64)
_SCORE_ERROR = 1e-5
"""Scores are rounded as if they were as large as the cap: accepted up to this much."""


def fits_capped_attention(
    query: Float[Tensor, "B H T D"], mask: AttentionMask, dropout_p: float, soft_cap: float
) -> bool:
    """Say whether `CappedAttention` can take a call.

    Args:
        query: ``[B, H, T, D]``.
        mask: What is visible.
        dropout_p: Probability of dropping a weight.
        soft_cap: Half-width of the band of scores.

    Returns:
        False off the CPU, in half precision, with a cap so high that it costs the scores their
        digits, with dropout or a bias that learns, for a compiler, inside ``torch.func`` and in
        forward mode.
    """
    if torch.compiler.is_compiling() or is_transformed() or is_forward_mode():
        return False
    if dropout_p > 0 or query.numel() == 0:
        return False
    learns = mask.bias is not None and mask.bias.requires_grad
    if query.device.type != "cpu" or query.dtype not in _DTYPES or learns:
        return False
    return soft_cap * torch.finfo(query.dtype).eps <= _SCORE_ERROR


class CappedAttention(torch.autograd.Function):
    """Softmax of capped scores, with or without a sink, times values.

        attn_output = softmax([cap tanh(scale q k^T / cap) + mask, sink_score])[..., :-1] v

    ``apply(query, key, value, sink_score or None, mask, scale, cap, plain)``: keys and values
    have the heads of the query, the mask's tensors get no gradient, and ``plain(query, key,
    value, sink_score)`` is the same by public operators, for second derivatives.
    """

    @staticmethod
    def forward(ctx, query, key, value, sink_score, mask, scale, cap, plain):
        with without_autocast("cpu"):
            form = _form(query, mask, key, value, sink_score)
            attention = form(query, key, value, mask, scale, cap)
            output, *normaliser = attention.attend(_sink_level(sink_score, query.dtype, cap))
        inputs = (query, key, value, sink_score, mask.mask, mask.bias)
        ctx.save_for_backward(*inputs, output, *normaliser)
        ctx.mask = replace(mask, mask=None, bias=None)
        ctx.scale, ctx.cap, ctx.plain = scale, cap, plain
        return output

    @staticmethod
    def backward(ctx, *grads):
        query, key, value, sink_score, *parts, output, top, log_total = ctx.saved_tensors
        if needs_plain_gradients(grads[0]):
            found = plain_gradients(ctx.plain, (query, key, value, sink_score), grads[0])
            return *found, None, None, None, None
        mask = replace(ctx.mask, mask=parts[0], bias=parts[1])
        with without_autocast("cpu"):
            form = _form(query, mask, key, value, sink_score, *grads)
            attention = form(query, key, value, mask, ctx.scale, ctx.cap)
            moved = (grads[0] * output).sum(dim=-1, keepdim=True)
            found = attention.gradients(top, log_total, grads[0], moved)
            level = _sink_level(sink_score, top.dtype, ctx.cap)
            grad_sink = None
            if level is not None:
                slope = 2 * ctx.cap * math.log2(math.e)
                weights = ((level - top) * slope - log_total).exp2_()
                grad_sink = -(weights * moved).sum(dim=(0, 2, 3))
        return *found, grad_sink, None, None, None, None


def _form(
    query: Tensor, mask: AttentionMask, *others: Tensor | None
) -> type[CappedKernel] | type[CappedTiles]:
    return CappedKernel if CappedKernel.fits(query, mask, *others) else CappedTiles


def _sink_level(
    sink_score: Float[Tensor, " H"] | None, dtype: torch.dtype, cap: float
) -> Float[Tensor, "H 1 1"] | None:
    """Return where the sink lies on the scale of levels."""
    return (
        None if sink_score is None else ((sink_score.to(dtype) + cap) / (2 * cap))[:, None, None]
    )

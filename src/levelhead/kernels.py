"""Attention kernels that hand back the log of their normaliser: private torch operators, isolated.

A flash backward uses the output ``O`` only through ``delta = rowsum(dO * O)``. With
``out = O * keep``, ``keep = sigmoid(lse - sink)`` and a gradient ``G`` of ``out``, the exact score
gradient is the same formula with ``delta - dlse``, which is what the kernel computes when it is
handed ``O - (1 - keep) * (G . O) G / ||G||^2`` in place of ``O`` (and ``keep * G`` as ``dO``). So
a learned sink needs no kernel of its own, forward or backward.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from levelhead.modes import is_transformed
from levelhead.shapes import at_least_float32

_FLASH_HALF = (torch.float16, torch.bfloat16)
_CUDA_FLASH_MAX_HEAD_DIM = 256


class Kernel(NamedTuple):
    """A fused attention and its gradient.

    Attributes:
        forward: ``(query, key, value, attn_bias, is_causal, scale) -> output, lse, saved``.
        backward: ``(grad, query, key, value, attn_bias, output, lse, is_causal, scale, saved)
            -> gradients of query, key and value``.
    """

    forward: Callable[..., tuple[Tensor, Tensor, tuple[Any, ...]]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def _cpu_forward(query, key, value, attn_bias, is_causal, scale):
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=attn_bias, scale=scale
    )
    return output, lse, ()


def _cpu_backward(grad, query, key, value, attn_bias, output, lse, is_causal, scale, saved):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, output, lse, 0.0, is_causal, attn_mask=attn_bias, scale=scale
    )


def _cuda_forward(query, key, value, attn_bias, is_causal, scale):
    output, lse, *saved, _ = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, is_causal, False, scale=scale
    )
    return output, lse, tuple(saved)


def _cuda_backward(grad, query, key, value, attn_bias, output, lse, is_causal, scale, saved):
    cum_seq_q, cum_seq_k, max_q, max_k, rng_state, unused = saved
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, query, key, value, output, lse, cum_seq_q, cum_seq_k, max_q, max_k,
        0.0, is_causal, rng_state, unused, scale=scale,
    )  # fmt: skip


_CPU = Kernel(_cpu_forward, _cpu_backward)
_CUDA_FLASH = Kernel(_cuda_forward, _cuda_backward)
_NEEDED = {
    "cpu": (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    ),
    "cuda": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_backward",
    ),
}


def find_lse_kernel(query: Tensor, key: Tensor, value: Tensor, has_mask: bool) -> Kernel | None:
    """Return a kernel that hands back its log-sum-exp for these tensors, or None.

    Args:
        query: ``[B, H, T, D]``.
        key: ``[B, Hkv, S, D]``.
        value: ``[B, Hkv, S, Dv]``.
        has_mask: Whether a mask or bias goes along (causality is not one).

    Returns:
        A kernel, or None where this torch, device, dtype or shape has none, where flash kernels
        are switched off (``torch.nn.attention.sdpa_kernel``) and inside ``torch.func``.
    """
    device = query.device.type
    if _is_ruled_out() or not all(
        hasattr(torch.ops.aten, name) for name in _NEEDED.get(device, ("",))
    ):
        return None
    if value.shape[-1] != query.shape[-1] or 0 in query.shape or 0 in key.shape:
        return None
    if device == "cpu":
        return _CPU
    fits = query.dtype in _FLASH_HALF and query.shape[-1] <= _CUDA_FLASH_MAX_HEAD_DIM
    aligned = query.shape[-1] % 8 == 0 and query.shape[1] == key.shape[1]
    recent = torch.cuda.get_device_capability(query.device)[0] >= 8
    return _CUDA_FLASH if fits and aligned and recent and not has_mask else None


def _is_ruled_out() -> bool:
    if torch.compiler.is_compiling():
        return False
    return not torch.backends.cuda.flash_sdp_enabled() or is_transformed()


class SinkAttention(torch.autograd.Function):
    """``softmax`` attention times ``sigmoid(lse - sink_score)``: the weights a sink leaves.

    Where digits allow, its result alone is kept, which whatever follows keeps anyway: the kernel's
    own output is the result over the share, and counts in a gradient by the share again.
    """

    @staticmethod
    def forward(ctx, query, key, value, sink_score, attn_bias, is_causal, scale, kernel):
        query, key, value = (dense_rows(rows) for rows in (query, key, value))
        output, lse, saved = kernel.forward(query, key, value, attn_bias, is_causal, scale)
        keep = _above(lse, sink_score).sigmoid()
        tensors = [item for item in saved if isinstance(item, Tensor)]
        result = (output * keep).to(output.dtype)
        ctx.keeps_result = output.dtype == keep.dtype
        kept = result if ctx.keeps_result else output
        ctx.save_for_backward(query, key, value, sink_score, attn_bias, kept, lse, *tensors)
        ctx.others = [None if isinstance(item, Tensor) else item for item in saved]
        ctx.is_tensor = [isinstance(item, Tensor) for item in saved]
        ctx.is_causal, ctx.scale, ctx.kernel = is_causal, scale, kernel
        return result

    @staticmethod
    def backward(ctx, *grads):
        refuse_second_derivative("a sink")
        query, key, value, sink_score, attn_bias, output, lse, *tensors = ctx.saved_tensors
        remaining = iter(tensors)
        saved = [
            next(remaining) if is_tensor else other
            for is_tensor, other in zip(ctx.is_tensor, ctx.others, strict=True)
        ]
        above = _above(lse, sink_score)
        keep, taken = above.sigmoid(), above.neg().sigmoid()  # 1 - keep would lose its digits
        if ctx.keeps_result:
            output = (output / keep).masked_fill_(keep == 0, 0.0)
        (grad,) = grads
        wide = grad.to(keep.dtype)
        direction, size = _without_size(wide)
        lost = taken * (direction * output).sum(dim=-1, keepdim=True)
        square = direction.square().sum(dim=-1, keepdim=True).clamp_min(1.0)
        grad_qkv = ctx.kernel.backward(
            dense_rows((wide * keep).to(grad.dtype)), query, key, value, attn_bias,
            dense_rows((output - lost * direction / square).to(output.dtype)), lse,
            ctx.is_causal, ctx.scale, saved,
        )  # fmt: skip
        grad_sink = -(keep * lost * size).sum(dim=(0, 2, 3)).to(sink_score.dtype)
        return *grad_qkv, grad_sink, None, None, None, None


def refuse_second_derivative(what: str) -> None:
    """Refuse where the gradient shall have a gradient: the kernel's has none.

    Args:
        what: Goes with the attention; its second derivative would silently miss a term.

    Raises:
        RuntimeError: Gradients are enabled in a backward pass.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            f"the fused attention with {what} has no second derivative (create_graph=True); run "
            "forward and backward under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        )


def dense_rows(rows: Tensor) -> Tensor:
    """Return rows with a dense last axis, which the kernels take for granted.

    Args:
        rows: Of any strides.

    Returns:
        The rows, copied if need be.
    """
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _above(lse: Tensor, sink_score: Float[Tensor, " H"]) -> Float[Tensor, "B H T 1"]:
    """Return how far the keys' log-sum-exp lies above the sink's score."""
    compute_dtype = at_least_float32(lse.dtype, sink_score.dtype)
    return (lse.to(compute_dtype) - sink_score.to(compute_dtype)[None, :, None]).unsqueeze(-1)


def _without_size(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows over their largest entry, and that entry: tiny numbers are never squared."""
    size = rows.abs().amax(dim=-1, keepdim=True)
    return rows / size.masked_fill(size == 0, 1.0), size


BACKENDS = {-1: "error", 0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}
"""``torch.nn.attention.SDPBackend`` by number."""
LARGE_SCORES = 2**20
"""Scores per head from which a plain fallback is worth a warning: 1,024 x 1,024."""


def attention_backend(
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B Hkv S D"],
    value: Float[Tensor, "B Hkv S Dv"],
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
) -> str:
    """Name the kernel torch's scaled-dot-product attention takes for these tensors.

    Args:
        query: Queries.
        key: Keys.
        value: Values.
        attn_mask: Boolean or float, or None.
        is_causal: Whether the causal kernel is asked for.
        dropout_p: Probability of dropping a weight.

    Returns:
        "flash", "efficient", "cudnn", "overrideable", or "math", which builds the T x S matrix;
        "unknown" where this torch does not tell.
    """
    choose = getattr(torch, "_fused_sdp_choice", None)
    if choose is None:
        return "unknown"
    grouped = query.shape[1] != key.shape[1]
    choice = choose(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa=grouped)
    return BACKENDS.get(int(choice), "unknown")


def warn_if_plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    dropout_p: float,
) -> None:
    """Warn when torch will build a large T x S matrix, since no fused kernel takes these tensors.

    Looks only at eager calls with many scores, where the look costs nothing beside the work.

    Args:
        query: Queries.
        key: Keys.
        value: Values.
        attn_mask: Boolean or float, or None.
        is_causal: Whether the causal kernel is asked for.
        dropout_p: Probability of dropping a weight.
    """
    if torch.compiler.is_compiling() or query.shape[2] * key.shape[2] < LARGE_SCORES:
        return
    if attention_backend(query, key, value, attn_mask, is_causal, dropout_p) == "math":
        warnings.warn(
            "no fused kernel takes this attention, so torch builds the whole matrix of "
            f"{query.shape[2]} x {key.shape[2]} scores per head (query {list(query.shape)}, "
            f"value {list(value.shape)}, {query.dtype} on {query.device.type}, "
            f"dropout_p={dropout_p}, mask with gradient: "
            f"{attn_mask is not None and attn_mask.requires_grad})",
            stacklevel=2,
        )

"""Fused attention and a map of its output, of which only the map's result is kept.

A flash backward wants the attention's own output. Where the map can be undone row by row, its
result gives that output back, and whatever comes next keeps the result anyway: one tensor of
hidden states less per layer.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn

from levelhead.kernels import Kernel, dense_rows, find_lse_kernel, refuse_second_derivative
from levelhead.modes import is_forward_mode, is_plain
from levelhead.shapes import at_least_float32, without_autocast

LEAST_BYTES = 2**20
"""Of the queries: undoing takes a dozen calls, which smaller outputs are not worth."""


class OutputMap(Protocol):
    """A map of attention outputs that can be undone.

    Attributes:
        apply: ``(attn_output, *tensors) -> result``, by operators with a gradient.
        remember: ``(attn_output, *tensors) -> tensors`` that undoing needs beside the result:
            something small.
        undo: ``(result, remembered, *tensors) -> attn_output``, a tensor of its own.
    """

    @property
    def apply(self) -> Callable[..., Tensor]: ...  # noqa: D102

    @property
    def remember(self) -> Callable[..., tuple[Tensor, ...]]: ...  # noqa: D102

    @property
    def undo(self) -> Callable[..., Tensor]: ...  # noqa: D102


class Mapped(NamedTuple):
    """What is done to an attention output.

    Attributes:
        output_map: How.
        tensors: What it reads beside the output.
    """

    output_map: OutputMap
    tensors: tuple[Tensor, ...] = ()

    def __call__(self, attn_output: Float[Tensor, "B H T Dv"]) -> Tensor:
        """Return the result."""
        return self.output_map.apply(attn_output, *self.tensors)


Then = Callable[[Tensor], Tensor]
"""What is done to an attention output: `Mapped`, which may be fused, or any other call."""


def is_observed(part: nn.Module) -> bool:
    """Whether somebody hooks a module's forward or has put another in its place.

    Args:
        part: Of which only an equation is wanted otherwise.

    Returns:
        True if it must be called as a module.
    """
    hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks)
    if any(hooks) or part._backward_pre_hooks or "forward" in vars(part):
        return True
    return getattr(nn.modules.module, "_has_any_global_hook", lambda: False)()


def find_mapped_kernel(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float
) -> Kernel | None:
    """Return a kernel for `MappedAttention`, or None where it would save nothing.

    Args:
        query: ``[B, H, T, D]``.
        key: ``[B, Hkv, S, D]``.
        value: ``[B, Hkv, S, Dv]``.
        attn_mask: Boolean or float, or None.
        dropout_p: Probability of dropping a weight.

    Returns:
        A kernel in training on a CPU, in a dtype whose rows have all their digits; None
        for little, with dropout or a mask that learns, for a compiler and in forward mode.
    """
    if torch.compiler.is_compiling() or is_forward_mode() or not torch.is_grad_enabled():
        return None
    if query.device.type != "cpu" or query.dtype != at_least_float32(query.dtype):
        return None
    if not is_plain(query, key, value, attn_mask):
        return None
    if query.numel() * query.element_size() < LEAST_BYTES:
        return None
    learns = any(rows.requires_grad for rows in (query, key, value))
    if not learns or dropout_p > 0 or (attn_mask is not None and attn_mask.requires_grad):
        return None
    return find_lse_kernel(query, key, value, attn_mask is not None)


class MappedAttention(torch.autograd.Function):
    """Softmax attention and a map of its output.

        result = output_map(softmax(scale q k^T + bias) v, *tensors)

    ``apply(query, key, value, attn_bias, is_causal, scale, kernel, output_map, *tensors)``.
    """

    @staticmethod
    def forward(
        ctx, query, key, value, attn_bias, is_causal, scale, kernel, output_map, *tensors
    ) -> Tensor:
        rows = [dense_rows(part) for part in (query, key, value)]
        output, lse, _ = kernel.forward(*rows, attn_bias, is_causal, scale)
        with without_autocast(query.device.type):
            result = output_map.apply(output, *tensors)
            # Not saved as the others are: how much it is may differ when checkpointing repeats it.
            ctx.remembered = output_map.remember(output, *tensors)
        if result._is_view():  # of something made here: whoever changes it in place may
            result = result.data
        ctx.save_for_backward(*rows, attn_bias, lse, result, *tensors)
        ctx.others = is_causal, scale, kernel, output_map
        return result

    @staticmethod
    def backward(ctx, *grads) -> Any:
        refuse_second_derivative("a map of its output")
        query, key, value, attn_bias, lse, result, *tensors = ctx.saved_tensors
        is_causal, scale, kernel, output_map = ctx.others
        needed = ctx.needs_input_grad[-len(tensors) :] if tensors else ()
        with without_autocast(query.device.type):
            output = output_map.undo(result, ctx.remembered, *tensors)
            grad, found = _gradients(output_map, output, tensors, needed, grads[0])
        grad_qkv = kernel.backward(
            dense_rows(grad), query, key, value, attn_bias, output, lse, is_causal, scale, ()
        )
        return *grad_qkv, None, None, None, None, None, *found


def _gradients(
    output_map: OutputMap, output: Tensor, tensors: list[Tensor], needed: tuple, grad: Tensor
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the gradients of a map's output and tensors, None for those that need none."""
    with torch.enable_grad():
        output = output.detach().requires_grad_()
        inputs = [t.detach().requires_grad_(n) for t, n in zip(tensors, needed, strict=True)]
        result = output_map.apply(output, *inputs)
        learning = [tensor for tensor in inputs if tensor.requires_grad]
        grad_output, *found = torch.autograd.grad(result, [output, *learning], grad)
    remaining = iter(found)
    return grad_output, [next(remaining) if t.requires_grad else None for t in inputs]

"""Watch the operations of an attention written in torch, fused or by hand.

A fused attention calls ``F.scaled_dot_product_attention``. One written by hand multiplies two
tensors, changes the product (scale, biases, masks, views), takes a softmax over the last axis and
multiplies by a third tensor. Both are seen without changing anything that is computed. A step
that is not understood ends the trace, and the capture then says that it saw nothing.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from levelhead.sites.calls import Emit, Seen, seen_in_sdpa

LOWEST = -1e4
"""A fill at or below this means "may not attend" (-inf, finfo.min, and the -1e4 of fp16 code)."""

SAME = frozenset({
    "view", "reshape", "unsqueeze", "squeeze", "contiguous", "clone", "detach", "to", "type",
    "type_as", "float", "double", "half", "bfloat16", "dropout", "dropout_",
})  # fmt: skip
TIMES = frozenset({"mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply"})
OVER = frozenset({"div", "div_", "true_divide", "__truediv__", "__itruediv__", "divide"})
PLUS = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__"})
FILLS = frozenset({"masked_fill", "masked_fill_"})
PRODUCTS = frozenset({"matmul", "__matmul__", "bmm"})


@dataclass(frozen=True)
class Trace:
    """A product of two tensors on its way to being attention weights."""

    query: Tensor
    key: Tensor
    shape: torch.Size
    scale: float = 1.0
    attn_mask: Tensor | None = None
    attn_bias: Tensor | None = None
    is_weights: bool = False

    def fit(self, tensor: Tensor, shape: torch.Size) -> Tensor:
        """Bring what met the scores in another shape (Swin's windows) to their own shape."""
        if shape == self.shape:
            return tensor[(None,) * (len(shape) - tensor.ndim)]
        return tensor.expand(shape).reshape(self.shape)


class OperationWatcher(TorchFunctionMode):
    """Emits what goes into every attention that runs while the mode is active.

    Args:
        emit: Called with what was seen, when the values come in.
    """

    def __init__(self, emit: Emit):
        super().__init__()
        self._emit = emit
        self._traces: dict[int, tuple[weakref.ref[Tensor], Trace]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            self._emit(seen_in_sdpa(*args, **kwargs))
            return func(*args, **kwargs)
        before = self._trace_of(args)  # an operation in place changes what its input is
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            trace = self._follow(name, before, args, kwargs)
            if trace is not None:
                self._traces[id(result)] = (weakref.ref(result), trace)
            elif before is not None and any(result is arg for arg in args):
                self._traces.pop(id(result), None)
        return result

    def _trace_of(self, args: tuple[Any, ...]) -> tuple[Tensor, Trace, torch.Size] | None:
        for arg in args[:2]:
            if isinstance(arg, Tensor) and id(arg) in self._traces:
                reference, trace = self._traces[id(arg)]
                if reference() is arg:
                    return arg, trace, arg.shape
        return None

    def _follow(
        self,
        name: str,
        before: tuple[Tensor, Trace, torch.Size] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Trace | None:
        if before is None:
            return _start(args) if name in PRODUCTS else None
        tensor, trace, shape = before
        if name in PRODUCTS:
            if trace.is_weights and tensor is args[0]:
                self._emit(_seen(trace, args[1]))
            return None
        if name in SAME:
            return trace
        if trace.is_weights:
            return None
        if name in ("softmax", "_safe_softmax"):
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            return replace(trace, is_weights=True) if dim in (-1, len(shape) - 1) else None
        step = next((step for names, step in STEPS if name in names), None)
        others = [arg for arg in args if arg is not tensor] + list(kwargs.values())
        return None if step is None else step(trace, shape, *others)


def _start(args: tuple[Any, ...]) -> Trace | None:
    left, right = args[:2]
    if left.ndim != right.ndim or left.ndim < 3 or not left.is_floating_point():
        return None
    return Trace(left, right.mT, torch.Size((*left.shape[:-1], right.shape[-1])))


def _times(trace: Trace, shape: torch.Size, factor: Any) -> Trace | None:
    if isinstance(factor, (int, float)):
        return replace(trace, scale=trace.scale * factor)
    if trace.attn_bias is not None or factor.numel() > 1 and factor.shape[-2:] != (1, 1):
        return None
    return replace(trace, query=trace.query * factor)


def _over(trace: Trace, shape: torch.Size, divisor: Any) -> Trace | None:
    return _times(trace, shape, 1 / divisor)


def _plus(trace: Trace, shape: torch.Size, bias: Any) -> Trace | None:
    if not isinstance(bias, Tensor):
        return trace  # a constant does not change the weights
    bias = trace.fit(bias, shape)
    return replace(trace, attn_bias=bias if trace.attn_bias is None else trace.attn_bias + bias)


def _fill(trace: Trace, shape: torch.Size, forbidden: Any, value: Any) -> Trace | None:
    if float(value) > LOWEST:
        return None
    allowed = trace.fit(~forbidden, shape)
    return replace(
        trace, attn_mask=allowed if trace.attn_mask is None else trace.attn_mask & allowed
    )


STEPS: tuple[tuple[frozenset[str], Callable[..., Trace | None]], ...] = (
    (TIMES, _times),
    (OVER, _over),
    (PLUS, _plus),
    (FILLS, _fill),
)


def _seen(trace: Trace, value: Tensor) -> Seen:
    return Seen(trace.query, trace.key, value, trace.scale, trace.attn_mask, trace.attn_bias)

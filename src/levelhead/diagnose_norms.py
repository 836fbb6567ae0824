"""Find the LayerNorms that sit on the residual stream (post-LN) and how much they contract.

A LayerNorm whose very output is both read by a projection and added to what came of it is on the
stream. In a pre-LN block the norm's output is read but not added; where only the branch is normed
(Swin V2) it is added but not read.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from levelhead.measure.layernorm import layer_norm_contraction

PLUS = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__"})
SAME = frozenset({"dropout", "to", "contiguous", "float", "view", "reshape", "transpose"})
READS = frozenset({"linear", "matmul", "__matmul__", "addmm", "multi_head_attention_forward"})


@dataclass
class _Norm:
    where: str
    factor: float
    is_read: bool = False


class NormWatcher(TorchFunctionMode):
    """Watches ``F.layer_norm`` and sums while the mode is active.

    Args:
        where: Called at each norm; says after which attention it ran.
        tokens: Called at each norm; False for padding ``[B, T]``, or None.
    """

    def __init__(self, where: Callable[[], str], tokens: Callable[[], Tensor | None]):
        super().__init__()
        self._where, self._tokens = where, tokens
        self._outputs: dict[int, tuple[weakref.ref[Tensor], _Norm]] = {}
        self.on_stream: list[tuple[str, float]] = []
        """For each norm on the stream: the attention before it, and the median over tokens of
        its factor."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "layer_norm":
            result = func(*args, **kwargs)
            self._start(result, *args, **kwargs)
            return result
        if name in PLUS or name in READS:
            for norm in filter(None, map(self._norm_of, args[:3])):
                self._note(norm, name in READS)
        norm = self._norm_of(args[0]) if name in SAME and args else None
        result = func(*args, **kwargs)
        if norm is not None and isinstance(result, Tensor):
            self._outputs[id(result)] = (weakref.ref(result), norm)
        return result

    def _norm_of(self, value: Any) -> _Norm | None:
        reference, norm = self._outputs.get(id(value), (None, None))
        return norm if reference is not None and reference() is value else None

    def _note(self, norm: _Norm, is_read: bool) -> None:
        if is_read:
            norm.is_read = True
        elif norm.is_read:
            norm.is_read = False  # counted once
            self.on_stream.append((norm.where, norm.factor))

    def _start(
        self,
        result: Tensor,
        states: Tensor,
        shape: Any,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> None:
        if len(shape) != 1:
            return
        tokens = self._tokens()
        if tokens is not None and tokens.shape == states.shape[:-1]:
            states = states[tokens]
        if not bool(states.isfinite().all()):
            return
        if weight is not None and not bool(weight.isfinite().all()):
            return
        with torch.no_grad():
            factor = float(layer_norm_contraction(states, weight, eps).factor.median())
        self._outputs[id(result)] = (weakref.ref(result), _Norm(self._where(), factor))


def contraction_by_site(watcher: NormWatcher, num_sites: int) -> dict[str, float]:
    """Multiply the factors of the norms that follow each attention.

    Args:
        watcher: After the forward.
        num_sites: Attentions of the model: fewer norms on the stream are no post-LN stack.

    Returns:
        Site to the product of ``||gamma||_inf / sigma`` (median over tokens) of its norms; empty
        where the model is not post-LN.
    """
    factors: dict[str, float] = {}
    for site, factor in watcher.on_stream:
        if site:
            factors[site] = factors.get(site, 1.0) * factor
    return factors if len(factors) >= max(1, num_sites - 1) else {}


def has_layer_norm(model: nn.Module) -> bool:
    """Whether a model holds a LayerNorm at all.

    Args:
        model: Any module.

    Returns:
        True where one is found.
    """
    return any(isinstance(module, nn.LayerNorm) for module in model.modules())

"""Attention with capped scores on a CPU in float32, by a kernel compiled for this machine."""

import ctypes
import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from levelhead.compiled import load_library
from levelhead.modes import is_plain
from levelhead.stages.masks import AttentionMask

_SOURCE = Path(__file__).with_suffix(".c")
_SCORES_PER_THREAD = 2**17
"""Fewer are done before another thread has begun."""


class _Rows(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("sample", "head", "row")),
    )

    @classmethod
    def of(cls, tensor: Tensor) -> "_Rows":
        """Say where a tensor's rows lie; strides count elements, 0 along axes of size one."""
        strides = [
            0 if size == 1 else stride
            for size, stride in zip(tensor.shape[:3], tensor.stride(), strict=False)
        ]
        return cls(tensor.data_ptr(), *strides)


class _Call(ctypes.Structure):
    """``Call`` of capped_compiled.c."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                "num_samples", "num_heads", "num_queries", "num_keys", "width", "value_width",
                "is_causal",
            )
        ),
        *((name, ctypes.c_float) for name in ("band", "slope", "factor")),
        *(
            (name, _Rows)
            for name in (
                "query", "key", "value", "output", "grad_output", "grad_query", "grad_key",
                "grad_value", "mask",
            )
        ),
        *((name, ctypes.c_void_p) for name in ("sink_level", "top", "log_total", "moved")),
    )  # fmt: skip


def has_compiled_kernel() -> bool:
    """Say whether this machine has the kernel, which is compiled if it is not there yet."""
    return load_library(_SOURCE) is not None


class CompiledCapped:
    """The scores of a call, in a kernel. ``CappedTiles`` is the same by torch's operators.

    Args:
        query: ``[B, H, T, D]``.
        key: ``[B, H, S, D]``.
        value: ``[B, H, S, Dv]``.
        mask: What is visible, without a bias.
        scale: Factor on the dot product.
        cap: Half-width of the band of scores.
    """

    def __init__(
        self,
        query: Float[Tensor, "B H T D"],
        key: Float[Tensor, "B H S D"],
        value: Float[Tensor, "B H S Dv"],
        mask: AttentionMask,
        scale: float,
        cap: float,
    ):
        self.query, self.key, self.value = (_readable(t) for t in (query, key, value))
        self.mask, self.scale, self.cap = mask, scale, cap

    @staticmethod
    def fits(query: Tensor, mask: AttentionMask, *others: Tensor | None) -> bool:
        """Say whether the kernel can take a call.

        Args:
            query: ``[B, H, T, D]``, on a CPU.
            mask: What is visible.
            others: Whatever else comes in.

        Returns:
            False for float64, a bias, a mask whose keys do not lie side by side, where something
            watches the operators, and where there is no kernel.
        """
        if query.dtype != torch.float32 or mask.bias is not None:
            return False
        keys = None if mask.mask is None else (mask.mask.shape[-1], mask.mask.stride(-1))
        if keys not in (None, (mask.num_keys, 1)):
            return False
        return is_plain(query, mask.mask, *others) and has_compiled_kernel()

    def attend(
        self, sink_level: Float[Tensor, "H 1 1"] | None
    ) -> tuple[Float[Tensor, "B H T Dv"], Float[Tensor, "B H T 1"], Float[Tensor, "B H T 1"]]:
        """Attend.

        Args:
            sink_level: Where the sink lies on the scale of levels, or None.

        Returns:
            The output, the highest level, and log2 of the sum of the weights from there.
        """
        batch, num_heads, num_queries, _ = self.query.shape
        # Heads of a token side by side, and no view: it may be written in place.
        output = torch.empty_permuted(
            (batch, num_heads, num_queries, self.value.shape[-1]), (0, 2, 1, 3),
            dtype=self.value.dtype,
        )  # fmt: skip
        top, log_total = self.query.new_empty(2, batch, num_heads, num_queries, 1).unbind()
        sink_level = None if sink_level is None else sink_level.contiguous()
        self._run(
            "forward", {"output": output}, sink_level=sink_level, top=top, log_total=log_total
        )
        return output, top, log_total

    def gradients(
        self, top: Tensor, log_total: Tensor, grad: Tensor, moved: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value.

        Args:
            top: The highest levels, as ``attend`` returned them.
            log_total: Likewise.
            grad: Gradient of the output.
            moved: Its products with the output, summed over the width of a head.
        """
        inputs = (self.query, self.key, self.value)
        query, key, value = (_readable(torch.empty_like(t)) for t in inputs)
        rows = {"grad_output": _readable(grad), "grad_query": query, "grad_key": key}
        rows["grad_value"] = value
        numbers = {"top": top, "log_total": log_total, "moved": moved}
        self._run("backward", rows, **{name: t.contiguous() for name, t in numbers.items()})
        return query, key, value

    def _run(self, name: str, rows: Mapping[str, Tensor], **numbers: Tensor | None) -> None:
        """Call the kernel with rows and numbers of these names."""
        library = load_library(_SOURCE)
        assert library is not None
        batch, num_heads, num_queries, width = self.query.shape
        rows = {"query": self.query, "key": self.key, "value": self.value, **rows}
        call = _Call(
            batch, num_heads, num_queries, self.mask.num_keys, width, self.value.shape[-1],
            int(self.mask.is_causal),
            band=-2 * self.scale * math.log2(math.e) / self.cap,
            slope=2 * self.cap * math.log2(math.e),
            factor=4 * self.scale,
            **{key: _Rows.of(tensor) for key, tensor in rows.items()},
            **{key: None if t is None else t.data_ptr() for key, t in numbers.items()},
        )  # fmt: skip
        if self.mask.mask is not None:
            call.mask = _Rows.of(self.mask.mask)
        kept = (*rows.values(), *numbers.values(), self.mask.mask)
        num_scores = batch * num_heads * num_queries * self.mask.num_keys
        num_threads = min(
            torch.get_num_threads(), batch * num_heads, 1 + num_scores // _SCORES_PER_THREAD
        )
        _share_out(library, name, call, kept, num_threads)


def _share_out(library: Any, name: str, call: _Call, kept: Sequence[Any], num: int) -> None:
    """Let threads take heads until none is left; the caller is one of them.

    A thread holds what it reads and writes: it may outlive a caller that was interrupted.

    Raises:
        RuntimeError: A thread ended early.
    """
    measure = getattr(library, f"{name}_room")
    measure.restype = ctypes.c_int64
    rooms = torch.empty(num, measure(ctypes.byref(call)), dtype=torch.float32)
    taken = ctypes.c_int64(0)

    def work(room: Tensor, _: Sequence[Any] = kept) -> None:
        address = ctypes.c_void_p(room.data_ptr())
        getattr(library, name)(ctypes.byref(call), address, ctypes.byref(taken))

    threads = [threading.Thread(target=work, args=(room,)) for room in rooms[1:]]
    for thread in threads:
        thread.start()
    work(rooms[0])
    for thread in threads:
        thread.join()
    if taken.value != call.num_samples * call.num_heads + num:  # each looks once in vain
        raise RuntimeError(f"a thread of the {name} pass ended before its work did")


def _readable(tensor: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H N D"]:
    """Return a tensor with numbers in memory and rows without gaps."""
    tensor = tensor.resolve_neg()
    is_dense = tensor.stride(-1) == 1 or tensor.shape[-1] == 1
    if is_dense and tensor.data_ptr() != 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)

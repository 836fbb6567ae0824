"""Attention with capped scores on a CPU in float32, by a kernel compiled for this machine."""

import contextlib
import ctypes
import functools
import math
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from levelhead.compiled import load_library
from levelhead.modes import is_plain
from levelhead.stages.masks import AttentionMask

_SOURCE = Path(__file__).with_suffix(".c")
_SCORES_PER_THREAD = 2**17
"""A tenth of a millisecond's work, about what it takes to begin another thread."""
_LARGEST = 3e38
"""A factor beyond it, of a tiny cap, would be infinite in float32, and NaN times zero."""


class _Rows(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("sample", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("row", ctypes.c_int64),
    )

    @classmethod
    def of(cls, tensor: Tensor) -> "_Rows":
        """Say where the rows of four axes lie; an axis of size one is the same everywhere."""
        axes = zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
        return cls(tensor.data_ptr(), *(0 if size == 1 else stride for size, stride in axes))


class _Call(ctypes.Structure):
    """``Call`` of capped_kernel.c."""

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


@functools.cache
def load_kernel() -> ctypes.CDLL | None:
    """Return the kernel, compiled if it is not there yet, or None where it cannot be had."""
    library = load_library(_SOURCE)
    if library is None:
        return None
    library.size_of_call.restype = ctypes.c_int64
    assert library.size_of_call() == ctypes.sizeof(_Call)
    for name in ("forward", "backward"):
        getattr(library, f"{name}_room").restype = ctypes.c_int64
        getattr(library, f"{name}_room").argtypes = (ctypes.c_void_p,)
        getattr(library, name).restype = None
        getattr(library, name).argtypes = (ctypes.c_void_p,) * 3
    return library


class CappedKernel:
    """Softmax of capped scores, with or without a sink, times values; see capped_kernel.c.

        attn_output = softmax([cap tanh(scale q k^T / cap) + mask, sink_score])[..., :-1] v

    Output and gradients are those of ``CappedTiles`` to rounding, and the same to the last digit
    on any number of threads; a head is one thread's work.

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
        self.query, self.key, self.value = (_with_dense_rows(t) for t in (query, key, value))
        self.mask, self.scale, self.cap = mask, scale, cap

    @staticmethod
    def fits(query: Tensor, mask: AttentionMask, *others: Tensor | None) -> bool:
        """Say whether the kernel can take a call.

        Args:
            query: ``[B, H, T, D]``.
            mask: What is visible.
            others: Whatever else comes in.

        Returns:
            False for float64, a bias, a mask whose keys do not lie side by side, tensors without
            numbers in this machine's memory, where something watches the operators, and where
            there is no kernel.
        """
        if query.dtype != torch.float32 or mask.bias is not None:
            return False
        tensors = [t for t in (query, mask.mask, *others) if t is not None]
        if not is_plain(*tensors) or not all(map(_is_in_memory, tensors)):
            return False
        keys = None if mask.mask is None else (mask.mask.shape[-1], mask.mask.stride(-1))
        return keys in (None, (mask.num_keys, 1)) and load_kernel() is not None

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
        numbers = {"sink_level": sink_level, "top": top, "log_total": log_total}
        self._run("forward", {"output": output}, numbers)
        return output, top, log_total

    def gradients(
        self,
        top: Float[Tensor, "B H T 1"],
        log_total: Float[Tensor, "B H T 1"],
        grad: Float[Tensor, "B H T Dv"],
        moved: Float[Tensor, "B H T 1"],
    ) -> tuple[Float[Tensor, "B H T D"], Float[Tensor, "B H S D"], Float[Tensor, "B H S Dv"]]:
        """Differentiate.

        Args:
            top: The highest levels, as ``attend`` returned them.
            log_total: Likewise.
            grad: Gradient of the output.
            moved: Its products with the output, summed over the width of a head.

        Returns:
            The gradients of query, key and value.
        """
        grad_query, grad_key, grad_value = map(_room_like, (self.query, self.key, self.value))
        rows = {
            "grad_output": _with_dense_rows(grad), "grad_query": grad_query,
            "grad_key": grad_key, "grad_value": grad_value,
        }  # fmt: skip
        numbers = {"top": top, "log_total": log_total, "moved": moved}
        self._run("backward", rows, {name: t.contiguous() for name, t in numbers.items()})
        return grad_query, grad_key, grad_value

    def _run(
        self, name: str, rows: Mapping[str, Tensor], numbers: Mapping[str, Tensor | None]
    ) -> None:
        """Call a pass of the kernel with rows and numbers by their names in ``Call``."""
        batch, num_heads, num_queries, width = self.query.shape
        rows = {"query": self.query, "key": self.key, "value": self.value, **rows}
        if self.mask.mask is not None:
            rows = {**rows, "mask": self.mask.mask}
        band = -2 * self.scale * math.log2(math.e) / self.cap
        call = _Call(
            batch, num_heads, num_queries, self.mask.num_keys, width, self.value.shape[-1],
            int(self.mask.is_causal),
            band=max(-_LARGEST, min(band, _LARGEST)),
            slope=2 * self.cap * math.log2(math.e),
            factor=4 * self.scale,
            **{key: _Rows.of(tensor) for key, tensor in rows.items()},
            **{key: None if t is None else t.data_ptr() for key, t in numbers.items()},
        )  # fmt: skip
        num_scores = batch * num_heads * num_queries * self.mask.num_keys
        num_threads = min(
            torch.get_num_threads(), batch * num_heads, 1 + num_scores // _SCORES_PER_THREAD
        )
        _share_out(name, call, num_threads, [*rows.values(), *numbers.values()])


def _share_out(name: str, call: _Call, num_threads: int, in_use: Sequence[Tensor | None]) -> None:
    """Let threads take heads until none is left; the caller is one of them.

    Args:
        name: Of the pass.
        call: What the kernel gets.
        num_threads: How many, at most.
        in_use: What the kernel reads and writes. Threads hold it, for they may outlive a caller
            that is interrupted.
    """
    kernel = load_kernel()
    assert kernel is not None
    address = ctypes.byref(call)
    room_size = getattr(kernel, f"{name}_room")(address)
    rooms = torch.empty(num_threads, room_size, dtype=torch.float32)
    taken, cores = ctypes.c_int64(0), _cores(num_threads)

    def work(room: Tensor) -> None:
        getattr(kernel, name)(address, room.data_ptr(), ctypes.byref(taken))

    def help_out(room: Tensor, _in_use: Sequence[Tensor | None]) -> None:
        if cores is not None:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, cores)  # of this thread
        work(room)

    started = []
    try:
        for room in rooms[1:]:
            thread = threading.Thread(target=help_out, args=(room, in_use))
            with contextlib.suppress(RuntimeError):  # none to be had: the others do its work
                thread.start()
                started.append(thread)
        work(rooms[0])
        for thread in started:
            thread.join()
    except BaseException:
        taken.value = call.num_samples * call.num_heads  # nothing is left to take
        raise


def _cores(num_threads: int) -> set[int] | None:
    """Return the cores of all threads of this process, if this thread is held to too few.

    OpenMP may bind every thread of its own to one core (``OMP_PROC_BIND``), the caller's too,
    and a new thread would inherit that.
    """
    if len(os.sched_getaffinity(0)) >= num_threads:
        return None
    cores = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended
            cores |= os.sched_getaffinity(int(thread))
    return cores


def _is_in_memory(tensor: Tensor) -> bool:
    is_here = tensor.device.type == "cpu" and tensor.layout == torch.strided
    return is_here and tensor.numel() > 0 and tensor.data_ptr() != 0


def _has_dense_rows(tensor: Float[Tensor, "B H N D"]) -> bool:
    return tensor.stride(-1) == 1 or tensor.shape[-1] == 1


def _with_dense_rows(tensor: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H N D"]:
    tensor = tensor.resolve_neg()
    return tensor if _has_dense_rows(tensor) else tensor.contiguous()


def _room_like(tensor: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H N D"]:
    """Return room for a gradient, which lies as the tensor does where rows have no gaps."""
    room = torch.empty_like(tensor)
    return room if _has_dense_rows(room) else torch.empty(tensor.shape, dtype=tensor.dtype)

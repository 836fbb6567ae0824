"""The letters of the library and the checks that speak to the user.

    B  batch                  T  query positions      D  head_dim
    H  query heads            S  key positions        E  embed_dim
    Hkv  key/value heads      L  layers

Every signature of the library uses these letters in its shape types; every check names what
must hold, what came and what is valid.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

HiddenStates = Float[Tensor, "B T E"]
Query = Float[Tensor, "B H T D"]
Key = Float[Tensor, "B Hkv S D"]
Value = Float[Tensor, "B Hkv S Dv"]
Scores = Float[Tensor, "B H T S"]
AttnWeights = Float[Tensor, "B H T S"]
AttnOutput = Float[Tensor, "B H T Dv"]
AttnMask = Bool[Tensor, "#B #H #T #S"]
AttnBias = Float[Tensor, "#B #H #T #S"]


def complaint(must: str, came: str, valid: str = "") -> str:
    """Return the library's one form of complaint.

    On a path that is compiled write ``if not ...: raise ValueError(complaint(...))``: a size in
    a message that is built would tie the compiled graph to that size.

    Args:
        must: The rule, as a sentence without a full stop.
        came: What came instead, as ``name=value`` pairs.
        valid: What would be accepted; left out where the rule already says it.

    Returns:
        One line.
    """
    return f"{must}, got {came}" + (f"; valid: {valid}" if valid else "")


def require(condition: bool, must: str, came: str, valid: str = "") -> None:
    """Raise the library's one form of complaint when ``condition`` is false.

    Args:
        condition: What must be true.
        must: The rule, as a sentence without a full stop.
        came: What came instead, as ``name=value`` pairs.
        valid: What would be accepted; left out where the rule already says it.

    Raises:
        ValueError: ``condition`` is false.
    """
    if not condition:
        raise ValueError(complaint(must, came, valid))


def require_known(kind: str, name: str, known: Iterable[str]) -> None:
    """Raise unless ``name`` is one of ``known``, listing them all.

    Args:
        kind: What the name names, for the message ("variant term", "initializer").
        name: The name that came.
        known: The names that exist.

    Raises:
        ValueError: ``name`` is not known.
    """
    known = list(known)
    if name not in known:
        raise ValueError(f"unknown {kind} {name!r}; known: {', '.join(known)}")


def require_float(**tensors: Tensor) -> None:
    """Raise unless every tensor holds floating-point numbers.

    Args:
        tensors: Tensors under the names the user knows them by.

    Raises:
        ValueError: A tensor of another dtype.
    """
    for name, tensor in tensors.items():
        require(
            tensor.is_floating_point(),
            f"{name} must be a floating-point tensor",
            f"{name}.dtype={tensor.dtype}",
            "torch.float16, bfloat16, float32, float64",
        )


def require_divides(divisor: str, divisor_value: int, total: str, total_value: int) -> None:
    """Raise unless one positive size divides another.

    Args:
        divisor: Name of the size that must divide.
        divisor_value: Its value.
        total: Name of the size to be divided.
        total_value: Its value.

    Raises:
        ValueError: A size is not positive or the division leaves a rest.
    """
    require(
        divisor_value > 0 and total_value > 0 and total_value % divisor_value == 0,
        f"{divisor} must divide {total}",
        f"{divisor}={divisor_value}, {total}={total_value}",
    )


def check_attention_inputs(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Check that query, key and value belong together.

    Args:
        query: ``[B, H, T, D]``.
        key: ``[B, Hkv, S, D]``, ``Hkv`` dividing ``H``.
        value: ``[B, Hkv, S, Dv]``.

    Raises:
        ValueError: A rank, dtype, batch, head count, key count or head_dim that does not fit.
    """
    problem = _attention_problem(query, key, value)
    if problem:
        shapes = (
            f"query {list(query.shape)} {query.dtype}, key {list(key.shape)} {key.dtype}, "
            f"value {list(value.shape)} {value.dtype}"
        )
        raise ValueError(complaint(problem, shapes))


def _attention_problem(query: Tensor, key: Tensor, value: Tensor) -> str:
    if not (query.dtype == key.dtype == value.dtype and query.is_floating_point()):
        return "query, key and value must share one floating-point dtype"
    if not query.ndim == key.ndim == value.ndim == 4:
        return "query, key and value must have four axes [B, H, T, D]"
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        return "query, key and value must share the batch size"
    if key.shape[1] != value.shape[1] or key.shape[2] != value.shape[2]:
        return "key and value must share heads and length"
    if query.shape[3] != key.shape[3]:
        return "query and key must share head_dim"
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        return "the key heads must divide the query heads"
    return ""


def at_least_float32(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in: the widest of the given ones, and float32 at the least.

    Args:
        dtypes: The dtypes of what goes in.

    Returns:
        float32, or float64 when one of them is float64.
    """
    compute_dtype = torch.float32
    for dtype in dtypes:
        compute_dtype = torch.promote_types(compute_dtype, dtype)
    return compute_dtype


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Return a context in which no operator is brought to a lower precision.

    Args:
        device_type: Where it computes, as ``tensor.device.type``.

    Returns:
        A context; one that does nothing where the device has no autocast.
    """
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def describe(value: Any) -> str:
    """Say in a few words what a value is, for an error message.

    Args:
        value: Anything.

    Returns:
        Shape and dtype of a tensor, else the type and a short form of the value.
    """
    if isinstance(value, Tensor):
        return f"Tensor{list(value.shape)} of {value.dtype}"
    return f"{type(value).__name__} {value!r:.80}"

"""How this library runs attention: the check of every ``InnerAttention`` sees all of a call."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from levelhead.inner import InnerAttention
from levelhead.reference import Call
from levelhead.sites.calls import Emit, Seen
from levelhead.sites.reading import CONVERTED


class ListenedCheck:
    """Stands in for ``InnerAttention.check``, which gets prepared queries and keys, while somebody
    listens."""

    def __init__(self, inner: InnerAttention):
        self.inner = inner
        self.emits: list[Emit] = []

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        call = InnerAttention.check(self.inner, query, key, value, *args, **kwargs)
        seen = _seen(self.inner, query, key, value, call)
        for emit in tuple(self.emits):
            emit(seen)
        return call


def _seen(inner: InnerAttention, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Seen:
    sink_score = getattr(inner.normaliser, "sink_score", None)
    return Seen(
        query,
        key,
        value,
        call.scale,
        call.mask.mask,
        call.mask.bias,
        call.mask.is_causal,
        None if inner.cap is None else inner.cap.soft_cap,
        None if sink_score is None else sink_score(query),
    )


def inner_of(module: nn.Module) -> InnerAttention | None:
    """Return the ``InnerAttention`` a host computes with, None where it has none.

    Args:
        module: The host's attention.
    """
    runs = module._modules.get(CONVERTED) or module
    return next((part for part in runs.modules() if isinstance(part, InnerAttention)), None)


def listen_to(module: nn.Module, emit: Emit) -> Callable[[], None]:
    """Emit what every call of a host's ``InnerAttention`` gets, after its norms.

    Args:
        module: The host.
        emit: Called with what was seen.

    Returns:
        Call it to stop.
    """
    inner = inner_of(module)
    assert inner is not None
    check = vars(inner).get("check") or ListenedCheck(inner)
    check.emits.append(emit)
    object.__setattr__(inner, "check", check)

    def stop() -> None:
        check.emits.remove(emit)
        if not check.emits:
            vars(inner).pop("check", None)

    return stop


def is_listened_to(inner: InnerAttention) -> bool:
    """Say whether somebody hears what goes into an inner attention.

    Args:
        inner: The inner attention.
    """
    return "check" in vars(inner)

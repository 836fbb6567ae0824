"""Give a module another forward by giving it another class, and take that back.

The module stays the same object with the same attributes, so parameters, hooks, state-dict keys
and ``isinstance`` checks hold. A swapped module can be copied, pickled, compiled and exported.
"""

from functools import cache
from typing import Any

from torch import nn


class Swapped:
    """Mixed into every class that ``swap_class`` makes."""

    host_class: type[nn.Module]
    forward_class: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, _, *state = super().__reduce_ex__(protocol)
        return _empty, (self.host_class, self.forward_class), *state


@cache
def _swapped_class(host_class: type[nn.Module], forward_class: type[nn.Module]) -> type:
    return type(
        f"Levelhead{host_class.__name__}",
        (Swapped, forward_class, host_class),
        {"host_class": host_class, "forward_class": forward_class, "__module__": __name__},
    )


def _empty(host_class: type[nn.Module], forward_class: type[nn.Module]) -> Any:
    return object.__new__(_swapped_class(host_class, forward_class))


def swap_class(module: nn.Module, forward_class: type[nn.Module]) -> None:
    """Let a module run the forward of another class.

    Args:
        module: The host.
        forward_class: What is mixed in front of the host's class.
    """
    module.__class__ = _swapped_class(type(module), forward_class)


def swap_back(module: nn.Module) -> None:
    """Undo ``swap_class``; does nothing to a module that was not swapped.

    Args:
        module: The host.
    """
    if isinstance(module, Swapped):
        object.__setattr__(module, "__class__", module.host_class)

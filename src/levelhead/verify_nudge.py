"""Small changes to what was installed, for as long as a check needs them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from levelhead.sites.host import Installed
from levelhead.verify_subject import Subject


def noise(like: Tensor) -> Tensor:
    """Return standard normal noise, the same each time.

    Args:
        like: Gives shape, dtype and device.

    Returns:
        Noise.
    """
    generator = torch.Generator().manual_seed(0)
    return torch.randn(like.shape, generator=generator).to(like)


def nudged(tensor: Tensor, size: float = 1.0) -> Tensor:
    """Add noise of a size relative to the largest entry.

    Args:
        tensor: Any.
        size: Relative to one plus the largest entry.

    Returns:
        The sum.
    """
    return tensor + size * (1 + tensor.abs().amax()) * noise(tensor)


@contextmanager
def nudged_parameters(installed: Installed) -> Iterator[None]:
    """Move the parameters of one attention away from where they are while the block runs.

    Args:
        installed: What conversion put in.
    """
    parameters: Sequence[Tensor] = list(installed.parameters())
    kept = [parameter.clone() for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.add_(parameter.abs() + 0.5 + 0.5 * noise(parameter))
        yield
    finally:
        for parameter, values in zip(parameters, kept, strict=True):
            parameter.copy_(values)


@contextmanager
def all_nudged(subject: Subject) -> Iterator[None]:
    """Do so for all attentions at once: then no part is neutral, and none can hide what it does.

    Args:
        subject: What is checked.
    """
    with ExitStack() as stack:
        for _, installed in subject.parts():
            stack.enter_context(nudged_parameters(installed))
        yield


def has_parameters(subject: Subject) -> bool:
    """Whether any of the attentions has parameters of its own.

    Args:
        subject: What is checked.
    """
    return any(next(part.parameters(), None) is not None for _, part in subject.parts())

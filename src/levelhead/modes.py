"""How torch is being run: what its transforms look into, on how many threads."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` looks into what is computed.

    Read from a private part of torch; one without it is taken not to transform.
    """
    return getattr(torch._C, "_are_functorch_transforms_active", lambda: False)()


def is_forward_mode() -> bool:
    """Whether tangents may go along with what is computed (``torch.autograd.forward_ad``).

    Read from a private part of torch; one without it is taken to be out of that mode.
    """
    return getattr(forward_ad, "_current_level", -1) >= 0


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether tensors are numbers in memory, and nobody stands between them and the operators.

    Neither a subclass (distributed, fake, quantised) nor a dispatch mode (tracing, counting).
    Read in part from a private part of torch; one without it is taken not to have a mode.

    Args:
        tensors: Any, or None.
    """
    if getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)():
        return False
    return all(t is None or type(t) in (Tensor, nn.Parameter) for t in tensors)


def is_in_backward() -> bool:
    """Whether a backward pass runs: a forward then is one that checkpointing repeats.

    Read from a private part of torch; one without it, and a compiler, are taken not to be in one.
    """
    if torch.compiler.is_compiling():
        return False
    return getattr(torch._C, "_current_graph_task_id", lambda: -1)() != -1


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: small operations lose more by waiting than they gain.

    Sums keep their order, too.

    Yields:
        Nothing.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

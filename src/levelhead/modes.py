"""How torch is being run: what its transforms look into, on how many threads."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` looks into what is computed.

    Read from a private part of torch; one without it is taken not to transform.
    """
    return getattr(torch._C, "_are_functorch_transforms_active", lambda: False)()


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

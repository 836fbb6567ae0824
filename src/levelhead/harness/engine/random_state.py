"""The state of every source of random numbers that a training may draw from."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from levelhead.harness.seeding import named_seed

NUMPY_SEED_BITS = 32  # numpy's legacy generator takes 32-bit seeds


def seed_all(seed: int, name: str) -> None:
    """Start python's, numpy's and torch's generators anew.

    Args:
        seed: The run's seed.
        name: What the numbers are for.
    """
    mixed = named_seed(seed, name)
    torch.manual_seed(mixed)
    random.seed(mixed)
    np.random.seed(mixed % 2**NUMPY_SEED_BITS)


def random_state() -> dict[str, Any]:
    """Return the state of all generators as tensors, numbers and lists.

    Returns:
        ``python``, ``numpy``, ``torch``, and ``cuda`` where one is in use.
    """
    version, words, gauss = random.getstate()
    numpy: Any = np.random.get_state(legacy=False)
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": numpy | {"state": {**numpy["state"], "key": numpy["state"]["key"].tolist()}},
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Go on drawing where ``random_state`` was called.

    Args:
        state: What it returned.
    """
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    numpy = state["numpy"]
    key = np.array(numpy["state"]["key"], dtype=np.uint32)
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": key}})
    torch.set_rng_state(_as_bytes(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_as_bytes(state["cuda"]))


@contextmanager
def forked_random() -> Iterator[None]:
    """Leave all generators at the end as they were at the start.

    Yields:
        Nothing.
    """
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)


def _as_bytes(state: Tensor) -> Tensor:
    return state.cpu().to(torch.uint8)

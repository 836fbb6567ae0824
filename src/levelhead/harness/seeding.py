"""Random numbers that pair: variants of one seed share every parameter they have in common.

Each module draws from a source of its own, named by the seed and the module's path. So a variant
with more parameters does not shift the numbers that the others get.
"""

import hashlib
from typing import Protocol, TypeVar

import torch
from torch import nn

SEED_BITS = 63  # torch takes signed 64-bit seeds


class InitializesModules(Protocol):
    """A model that can start each of its modules by itself."""

    def init_module_(self, name: str, module: nn.Module) -> None: ...


def named_seed(seed: int, name: str) -> int:
    """Mix a seed with a name.

    Args:
        seed: The run's seed.
        name: What the numbers are for.

    Returns:
        A number in ``[0, 2^63)``, the same on every machine.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - SEED_BITS)


Model = TypeVar("Model", bound=nn.Module)


def paired_init_(model: Model, seed: int) -> Model:
    """Start every parameter of a model anew, in place.

    Args:
        model: Has ``init_module_``, which starts one module without its children.
        seed: Of the run.

    Returns:
        The model.
    """
    with torch.random.fork_rng(devices=[]):
        for name, module in model.named_modules():
            torch.manual_seed(named_seed(seed, name))
            model.init_module_(name, module)  # pyright: ignore[reportCallIssue]
    return model

"""Sharded parameters (FSDP2, tensor parallelism) seen whole for a moment."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is spread over ranks as a DTensor.

    Args:
        tensor: Any tensor.

    Returns:
        True for a DTensor.
    """
    # Who made a DTensor has loaded its module, which takes more than a second: never load it here.
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def is_gathered(parameter: Tensor, root: nn.Module) -> bool:
    """Whether an FSDP2 root in its forward holds a parameter whole, so that writing is lost.

    Args:
        parameter: Of the root or below.
        root: The outermost module.

    Returns:
        False also where the root is not sharded.
    """
    from torch.distributed.fsdp import FSDPModule

    return isinstance(root, FSDPModule) and not is_sharded(parameter)


@contextmanager
def whole_parameters(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let modules hold whole parameters instead of shards while the context lasts.

    What is written to them is sent back to the shards at the end, rank 0's values to all, so that
    the whole matrix is the same on every rank. After an exception the shards stay as they were.
    Every rank must enter, in the same order. Parameters that are not sharded are not touched.

    Args:
        modules: Whose own parameters are needed whole, children not included.

    Yields:
        Nothing.
    """
    with borrowed_parameters(modules) as whole:
        yield
        for shard, values in whole:
            _send_back(values, shard)


@contextmanager
def borrowed_parameters(modules: Iterable[nn.Module]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Let modules hold whole parameters, to be read: what is written to them is lost.

    Every rank must enter, in the same order. Parameters that are not sharded are not touched.

    Args:
        modules: Whose own parameters are needed whole, children not included.

    Yields:
        Each shard with its whole parameter.
    """
    held = [
        (module, name, parameter)
        for module in dict.fromkeys(modules)
        for name, parameter in module._parameters.items()
        if parameter is not None and is_sharded(parameter)
    ]
    shards = {id(shard): shard for _, _, shard in held}
    whole = {key: _gathered(shard) for key, shard in shards.items()}
    for module, name, shard in held:
        module._parameters[name] = whole[id(shard)]
    try:
        yield [(shard, whole[key]) for key, shard in shards.items()]
    finally:
        for module, name, shard in held:
            module._parameters[name] = shard


@torch.no_grad()
def _gathered(shard) -> nn.Parameter:
    return nn.Parameter(shard.full_tensor(), requires_grad=shard.requires_grad)


@torch.no_grad()
def _send_back(whole: Tensor, shard) -> None:
    shard.to_local().copy_(distribute_like(whole, shard).to_local())  # pyright: ignore


def distribute_like(values: Tensor, like: Tensor) -> Tensor:
    """Spread whole values over ranks in the way another tensor is spread.

    Args:
        values: The whole tensor; rank 0's counts.
        like: Where it shall go.

    Returns:
        A DTensor placed as ``like`` where that is one, else ``values`` as they are.
    """
    if not is_sharded(like):
        return values
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    values = values.detach().to(like.device, like.dtype)
    return distribute_tensor(values, like.device_mesh, like.placements)

"""The norm of all gradients, sharded or not: at most one number to add over the ranks."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def gradient_squares(model: nn.Module, num_processes: int) -> tuple[float, float] | None:
    """Sum the squares of all gradients.

        ||g||^2 = shared + sum over ranks of own

    Args:
        model: After backward.
        num_processes: Of the process group.

    Returns:
        ``shared``, the part that every rank knows, and ``own``, this rank's part of sharded
        gradients; None without gradients.
    """
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if not grads:
        return None
    sharded = [grad for grad in grads if _num_shards(grad) > 1]
    whole = [_local(grad) for grad in grads if _num_shards(grad) == 1]
    # A mesh of replicas holds each shard several times.
    own = sum(_square([_local(grad)]) * _num_shards(grad) / num_processes for grad in sharded)
    return _square(whole), float(own)


def _local(grad: Any) -> Tensor:
    return grad.to_local() if hasattr(grad, "to_local") else grad


def _num_shards(grad: Any) -> int:
    """Into how many parts a gradient is split; 1 for one that every rank holds."""
    placements = getattr(grad, "placements", ())
    sizes = [
        size for placement, size in zip(placements, _mesh_shape(grad), strict=True)
        if placement.is_shard()
    ]  # fmt: skip
    return torch.Size(sizes).numel()


def _mesh_shape(grad: Any) -> tuple[int, ...]:
    return tuple(grad.device_mesh.shape) if hasattr(grad, "device_mesh") else ()


def _square(tensors: Iterable[Tensor]) -> float:
    tensors = list(tensors)
    return float(torch.nn.utils.get_total_norm(tensors).double().square()) if tensors else 0.0

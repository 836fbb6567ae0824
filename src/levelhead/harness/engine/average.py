"""The moving average of the weights, by torch's own update; sharded weights stay sharded."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.swa_utils import get_ema_multi_avg_fn

from levelhead.sharding import is_sharded


class WeightAverage:
    """An exponential moving average of parameters; buffers are taken as they are.

        average <- decay * average + (1 - decay) * weight,   once per optimiser step

    Args:
        model: Whose parameters are averaged; the average starts from them.
        decay: In [0, 1].
    """

    def __init__(self, model: nn.Module, decay: float):
        self.parameters = dict(model.named_parameters())
        self.averages = {name: p.detach().clone() for name, p in self.parameters.items()}
        self._move = get_ema_multi_avg_fn(decay)

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights as they are now."""
        self._move(self._local(self.averages), self._local(self.parameters), 0)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model hold the averages instead of its weights while the context lasts.

        Yields:
            Nothing.
        """
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        own, averages = self._local(self.parameters), self._local(self.averages)
        for weight, average in zip(own, averages, strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

    @staticmethod
    def _local(tensors: Mapping[str, Tensor]) -> list[Tensor]:
        return [local_part(tensor) for tensor in tensors.values()]


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, sharing its memory.

    Args:
        tensor: Sharded or not.

    Returns:
        A plain tensor.
    """
    return tensor.to_local() if is_sharded(tensor) else tensor  # pyright: ignore


def drop_gathered(model: nn.Module) -> None:
    """Let FSDP2 forget weights it still holds whole after a forward without a backward.

    They would be used by the next forward although the shards may have changed since.

    Args:
        model: Sharded or not.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()

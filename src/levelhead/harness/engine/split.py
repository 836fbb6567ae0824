"""How a recipe's global batch falls to ranks and micro-batches, so that it stays the same."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from levelhead.shapes import require


@dataclass(frozen=True, kw_only=True)
class Split:
    """One rank's part of a global batch.

        batch_size = num_ranks * num_micro * micro_size

    Micro-batch m of rank r holds the rows from ``(m * num_ranks + r) * micro_size`` on.

    Attributes:
        num_ranks: Processes that share the batch.
        rank: This one.
        num_micro: Forwards of one optimiser step.
        micro_size: Samples of one forward.
    """

    num_ranks: int
    rank: int
    num_micro: int
    micro_size: int

    @property
    def is_whole(self) -> bool:
        """Whether one forward takes all of it."""
        return self.num_ranks * self.num_micro == 1

    def parts(self, batch: Any) -> list[Any]:
        """Take this rank's micro-batches out of a global batch.

        Args:
            batch: Tensors, or tuples, lists and mappings of them, with the samples along axis 0.

        Returns:
            One a forward.

        Raises:
            ValueError: A tensor that does not hold the global batch.
        """
        if self.is_whole:
            return [batch]
        size = self.num_ranks * self.num_micro * self.micro_size
        firsts = [
            (m * self.num_ranks + self.rank) * self.micro_size for m in range(self.num_micro)
        ]
        return [_rows(batch, slice(first, first + self.micro_size), size) for first in firsts]


def split_batch(batch_size: int, largest: int | None, num_ranks: int, rank: int) -> Split:
    """Divide a global batch equally, in as few forwards as fit a device.

    Args:
        batch_size: Samples of one optimiser step.
        largest: Most samples one device takes at a time; None for all of its share.
        num_ranks: Processes that share it.
        rank: This one.

    Returns:
        The split.

    Raises:
        ValueError: The ranks cannot share it equally.
    """
    fitting = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
    require(
        batch_size % num_ranks == 0,
        "the number of processes must divide the global batch, so that the batch stays as it is",
        f"batch_size={batch_size} on {num_ranks} processes",
        f"{', '.join(map(str, fitting))} processes",
    )
    share = batch_size // num_ranks
    sizes = [size for size in fitting if share % size == 0 and size <= (largest or share)]
    micro_size = max(sizes)
    return Split(
        num_ranks=num_ranks, rank=rank, num_micro=share // micro_size, micro_size=micro_size
    )


def _rows(batch: Any, rows: slice, size: int) -> Any:
    if isinstance(batch, Tensor):
        require(
            batch.shape[0] == size,
            f"a batch that is split must hold batch_size={size} samples along axis 0",
            f"{list(batch.shape)}",
        )
        return batch[rows]
    if isinstance(batch, Mapping):
        return {name: _rows(value, rows, size) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(_rows(value, rows, size) for value in batch)
    return batch

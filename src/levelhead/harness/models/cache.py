"""What a decoder keeps of the tokens it has read."""

import torch
from torch import Tensor


class GrowingCache:
    """The keys and values of one block so far."""

    def __init__(self):
        self.key: Tensor | None = None
        self.value: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of tokens held."""
        return 0 if self.key is None else self.key.shape[2]

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append ``[B, Hkv, T, D]`` and return all of them, ``[B, Hkv, S, D]``."""
        if self.key is not None and self.value is not None:
            key = torch.cat([self.key, key], dim=2)
            value = torch.cat([self.value, value], dim=2)
        self.key, self.value = key, value
        return key, value

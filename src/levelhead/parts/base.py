"""What all parts share."""

from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(frozen=True)
class AttentionShape:
    """What a part must know of its host.

    Attributes:
        embed_dim: E.
        num_heads: H.
        num_kv_heads: Hkv.
        head_dim: D.
        bias: Whether the host's q, k, v projections have a bias.
        kv_embed_dim: Width of what keys and values are projected from; E unless given.
        factory: ``device`` and ``dtype`` for new parameters.
    """

    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias: bool = False
    kv_embed_dim: int | None = None
    factory: dict[str, Any] = field(default_factory=dict)

    def kv_dim(self, which: str) -> int:
        """Return the input width of one projection.

        Args:
            which: "q", "k" or "v".
        """
        return self.embed_dim if which == "q" else self.kv_embed_dim or self.embed_dim


class Part(nn.Module):
    """One stage of attention."""

    def __init__(self):
        super().__init__()

    def reset_parameters(self) -> None:
        """Set the part's own parameters to their start."""

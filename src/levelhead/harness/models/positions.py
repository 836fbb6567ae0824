"""How a model knows where a token stands: learned, sinusoidal or rotary positions.

Each is a part with two sides, of which one does nothing: ``forward`` adds to the embeddings,
``rotation`` turns queries and keys inside the attention.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from levelhead.shapes import require, require_known

Rotation = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

WAVELENGTH_BASE = 10_000.0  # Vaswani et al. 2017, section 3.5; Su et al. 2021, section 3.2.2


class LearnedPositions(nn.Module):
    """One learned vector for each position, added to the embeddings."""

    def __init__(self, num_positions: int, embed_dim: int, head_dim: int):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(num_positions, embed_dim))

    def forward(
        self, hidden_states: Float[Tensor, "B T E"], first: int = 0
    ) -> Float[Tensor, "B T E"]:
        return hidden_states + self.table[first : first + hidden_states.shape[1]]

    def rotation(self, first: int, length: int) -> Rotation | None:
        return None


class SinusoidalPositions(nn.Module):
    """Fixed sines and cosines of geometric wavelengths, added to the embeddings.

        table[t, 2 i] = sin(t / base^(2 i / E)),   table[t, 2 i + 1] = cos(t / base^(2 i / E))

    Source: Vaswani et al. 2017, section 3.5, arXiv 1706.03762.
    """

    table: Tensor

    def __init__(self, num_positions: int, embed_dim: int, head_dim: int):
        super().__init__()
        table = torch.empty(num_positions, embed_dim)
        self.register_buffer("table", table, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the table, which the state dict leaves out."""
        angles = _angles(*self.table.shape)
        table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
        self.table.copy_(table[:, : self.table.shape[1]])

    def forward(
        self, hidden_states: Float[Tensor, "B T E"], first: int = 0
    ) -> Float[Tensor, "B T E"]:
        return hidden_states + self.table[first : first + hidden_states.shape[1]]

    def rotation(self, first: int, length: int) -> Rotation | None:
        return None


class RotaryPositions(nn.Module):
    """Queries and keys turned by an angle that grows with the position (RoPE).

        (a, b) -> (a cos - b sin, b cos + a sin),   angle = t / base^(2 i / D)

    for the pair ``(i, i + D / 2)`` of a head's coordinates, the pairing of Llama and GPT-NeoX.

    Source: Su et al. 2021, arXiv 2104.09864.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, num_positions: int, embed_dim: int, head_dim: int):
        super().__init__()
        require(head_dim % 2 == 0, "rotary positions need an even head_dim", f"{head_dim=}")
        for name in ("cos", "sin"):
            table = torch.empty(num_positions, head_dim // 2)
            self.register_buffer(name, table, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the tables, which the state dict leaves out."""
        angles = _angles(self.cos.shape[0], 2 * self.cos.shape[1])
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(
        self, hidden_states: Float[Tensor, "B T E"], first: int = 0
    ) -> Float[Tensor, "B T E"]:
        return hidden_states

    def rotation(self, first: int, length: int) -> Rotation | None:
        cos, sin = self.cos[first : first + length], self.sin[first : first + length]
        return lambda query, key: (rotate(query, cos, sin), rotate(key, cos, sin))


def rotate(
    heads: Float[Tensor, "B H T D"], cos: Float[Tensor, "T R"], sin: Float[Tensor, "T R"]
) -> Float[Tensor, "B H T D"]:
    """Turn each head's coordinate pairs by the angles of their positions.

    Args:
        heads: Queries or keys.
        cos: Cosines, one for each position and pair (``R = D / 2``).
        sin: Sines, likewise.

    Returns:
        The turned vectors; every pair keeps its length.
    """
    a, b = heads.chunk(2, dim=-1)
    cos, sin = cos.to(heads.dtype), sin.to(heads.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


POSITIONS: dict[str, type[LearnedPositions | SinusoidalPositions | RotaryPositions]] = {
    "learned": LearnedPositions,
    "sinusoidal": SinusoidalPositions,
    "rope": RotaryPositions,
}


def make_positions(
    kind: str, num_positions: int, embed_dim: int, num_heads: int
) -> LearnedPositions | SinusoidalPositions | RotaryPositions:
    """Build the part that ``kind`` names.

    Args:
        kind: A key of ``POSITIONS``.
        num_positions: Longest sequence it must serve.
        embed_dim: E.
        num_heads: H.

    Returns:
        The part.

    Raises:
        ValueError: ``kind`` is not known, or rotary positions with an odd head_dim.
    """
    require_known("positions", kind, POSITIONS)
    return POSITIONS[kind](num_positions, embed_dim, embed_dim // num_heads)


def _angles(num_positions: int, width: int) -> Float[Tensor, "N R"]:
    frequencies = WAVELENGTH_BASE ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    return torch.outer(torch.arange(num_positions, dtype=torch.float64), frequencies)

"""The logical weights of one attention, taken apart by head."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from levelhead.shapes import require, require_divides, require_float


@dataclass(frozen=True)
class HeadWeights:
    """The projections of one attention by head, in float64.

    Attributes:
        query: ``[H, E, D]``.
        key: ``[Hkv, Ekv, D]``.
        value: ``[Hkv, Ekv, Dv]``.
        output: ``[H, Dv, E]``, or None where the host has no output projection.
    """

    query: Float[Tensor, "H E D"]
    key: Float[Tensor, "Hkv Ekv D"]
    value: Float[Tensor, "Hkv Ekv Dv"]
    output: Float[Tensor, "H Dv E"] | None

    def repeated(self, weight: Float[Tensor, "Hkv Ekv D"]) -> Float[Tensor, "H Ekv D"]:
        """A key or value weight once for each query head it serves.

        Args:
            weight: ``key`` or ``value``.

        Returns:
            As many matrices as query heads.
        """
        return weight.repeat_interleave(len(self.query) // len(weight), dim=0)


def split_heads(
    q_weight: Float[Tensor, "E HD"],
    k_weight: Float[Tensor, "Ekv HkvD"],
    v_weight: Float[Tensor, "Ekv HkvDv"],
    o_weight: Float[Tensor, "HDv E"] | None,
    num_heads: int,
    num_kv_heads: int | None = None,
) -> HeadWeights:
    """Take the logical weights apart by head.

    Args:
        q_weight: ``[E, H D]``; head h owns columns ``h D .. (h + 1) D``.
        k_weight: ``[Ekv, Hkv D]``.
        v_weight: ``[Ekv, Hkv Dv]``.
        o_weight: ``[H Dv, E]``; head h owns the rows; or None.
        num_heads: H.
        num_kv_heads: Hkv, dividing H; H unless given.

    Returns:
        Copies in float64, without a graph.
    """
    weights = {"q_weight": q_weight, "k_weight": k_weight, "v_weight": v_weight}
    weights |= {} if o_weight is None else {"o_weight": o_weight}
    require_float(**weights)
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    require_divides("num_kv_heads", kv_heads, "num_heads", num_heads)
    shapes = ", ".join(f"{name} {list(weight.shape)}" for name, weight in weights.items())
    shapes += f", num_heads={num_heads}, num_kv_heads={kv_heads}"
    valid = "q_weight [E, H D], k_weight [E, Hkv D], v_weight [E, Hkv D], o_weight [H D, E]"
    matrices = all(w.ndim == 2 and w.numel() > 0 for w in weights.values())
    require(matrices, "weights must be matrices with entries", shapes, valid)
    heads = {"q_weight": num_heads, "k_weight": kv_heads, "v_weight": kv_heads}
    divides = all(weights[name].shape[1] % count == 0 for name, count in heads.items())
    require(divides, "the number of heads must divide the columns", shapes, valid)
    query, key, value = (_by_columns(weights[name], count) for name, count in heads.items())
    fits = query.shape[2] == key.shape[2] and k_weight.shape[0] == v_weight.shape[0]
    if o_weight is not None:
        fits = fits and o_weight.shape[0] == num_heads * value.shape[2]
    require(fits, "weights must fit together", shapes, valid)
    output = None
    if o_weight is not None:
        output = o_weight.detach().to(torch.float64).unflatten(0, (num_heads, -1))
    return HeadWeights(query, key, value, output)


def _by_columns(weight: Tensor, count: int) -> Tensor:
    """``[E, count D]`` as ``[count, E, D]`` in float64."""
    return weight.detach().to(torch.float64).unflatten(1, (count, -1)).movedim(1, 0)

"""What an initialiser promises, measured on the matrices it made."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from levelhead.init.blocks import split_heads
from levelhead.linalg import symmetric_eigenvalues
from levelhead.shapes import at_least_float32


@dataclass(frozen=True)
class HeadFacts:
    """What the head blocks of one projection look like.

    Attributes:
        orthogonality_residual: Largest entry of ``|G / g - I|`` over the heads, ``G`` the Gram
            matrix of a block's shorter side and ``g`` the mean of all their diagonals: 0 for
            semi-orthogonal blocks of one scale.
        kappa_median: Median condition number over the heads; inf for a rank-deficient block.
        kappa_max: Largest condition number over the heads.
        spectral_norm: Largest singular value over the heads.
        frobenius_norm: Of the whole matrix.
    """

    orthogonality_residual: float
    kappa_median: float
    kappa_max: float
    spectral_norm: float
    frobenius_norm: float


@dataclass(frozen=True)
class ProductFacts:
    """What the product of two projections looks like.

    Attributes:
        diagonal_mean: Mean diagonal entry, over all heads.
        off_diagonal_std: Root mean square of the other entries.
    """

    diagonal_mean: float
    off_diagonal_std: float


@torch.no_grad()
def head_facts(weight: Float[Tensor, "E HD"], num_heads: int) -> HeadFacts:
    """Measure the head blocks of a projection in float64.

    The singular values come from the Gram matrices, whose eigenvalues are their squares: kappa is
    exact to float32 up to 1e4, and a block with a larger one than 1e7 reads inf.

    Args:
        weight: Projection in the logical layout (an output projection transposed).
        num_heads: How many heads share its columns.

    Returns:
        The facts; NaN throughout where the weight is not finite.
    """
    # Head by head, so that only one head at a time is held in float64.
    gram = torch.stack(
        [_gram(block.to(torch.float64)) for block in split_heads(weight, num_heads)]
    )
    spectrum = symmetric_eigenvalues(gram)
    largest, smallest = spectrum.values[:, 0], spectrum.values[:, -1]
    deficient = spectrum.rank < spectrum.values.shape[-1]
    kappa = (largest / smallest.clamp_min(0)).sqrt()
    kappa = torch.where(deficient & largest.isfinite(), torch.inf, kappa)
    return HeadFacts(
        orthogonality_residual=_residual(gram),
        kappa_median=float(kappa.quantile(0.5, interpolation="nearest")),
        kappa_max=float(kappa.max()),
        spectral_norm=float(largest.max().sqrt()),
        frobenius_norm=float(gram.diagonal(dim1=1, dim2=2).sum().sqrt()),
    )


def _gram(block: Float[Tensor, "rows cols"]) -> Tensor:
    """Inner products of the columns, of the rows where there are fewer."""
    tall = block if block.shape[0] >= block.shape[1] else block.mT
    return tall.mT @ tall


def _residual(gram: Float[Tensor, "H D D"]) -> float:
    """Largest entry of ``|G / mean diagonal - I|``; NaN for a zero or non-finite matrix."""
    scaled = gram / gram.diagonal(dim1=1, dim2=2).mean()
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    return float((scaled - identity).abs().max())


@torch.no_grad()
def product_facts(left: Float[Tensor, "H E D"], right: Float[Tensor, "H D Eout"]) -> ProductFacts:
    """Measure ``left @ right`` head by head, the products formed only where D is large.

        sum_ij (L R)_ij^2 = <L^T L, R R^T>,    (L R)_ii = sum_d L_id R_di

    Args:
        left: For example the query blocks.
        right: For example the key blocks, transposed.

    Returns:
        The statistics over all heads, computed in float32 or wider.
    """
    compute_dtype = at_least_float32(left.dtype, right.dtype)
    left, right = left.to(compute_dtype), right.to(compute_dtype)
    size = min(left.shape[1], right.shape[2])
    diagonal = (left[:, :size] * right.mT[:, :size]).sum(-1)
    squares = _squares_of_products(left, right)
    others = left.shape[0] * left.shape[1] * right.shape[2] - diagonal.numel()
    rest = (squares - diagonal.square().sum()).clamp_min(0)
    return ProductFacts(float(diagonal.mean()), float((rest / max(others, 1)).sqrt()))


def _squares_of_products(left: Tensor, right: Tensor) -> Tensor:
    """Sum of the squared entries of ``left @ right``, by whichever form multiplies less."""
    rows, rank, columns = left.shape[1], left.shape[2], right.shape[2]
    if rows * columns < rank * (rows + columns):
        return torch.linalg.vector_norm(left @ right).square()
    return ((left.mT @ left) * (right @ right.mT)).sum()


@dataclass(frozen=True)
class AttentionFacts:
    """What the projections of one attention look like.

    Attributes:
        matrices: By name, "q", "k", "v", "o".
        products: By name, "q k^T" (per head) and "v o" (over the layer); empty unless asked for.
    """

    matrices: dict[str, HeadFacts]
    products: dict[str, ProductFacts]

    def over(self, other: "AttentionFacts") -> "AttentionFacts":
        """Return these facts, and the other's where these have none.

        Args:
            other: Facts of the same attention.

        Returns:
            All facts, in the order of ``other``.
        """
        return AttentionFacts(other.matrices | self.matrices, other.products | self.products)


def attention_facts(
    weights: Mapping[str, Tensor], num_heads: int, num_kv_heads: int, *, products: bool
) -> AttentionFacts:
    """Measure the projections of one attention.

    Args:
        weights: Some of "q" ``[E, H D]``, "k" and "v" ``[Ekv, Hkv D]``, "o" ``[H D, E]``.
        num_heads: H.
        num_kv_heads: Hkv.
        products: Whether to measure the products too, where both factors are there.

    Returns:
        The facts; the output projection is cut into heads along its rows.
    """
    heads = {"q": num_heads, "k": num_kv_heads, "v": num_kv_heads, "o": num_heads}
    columns = {name: w.mT if name == "o" else w for name, w in weights.items()}
    matrices = {name: head_facts(w, heads[name]) for name, w in columns.items()}
    found: dict[str, ProductFacts] = {}
    if products and {"q", "k"} <= weights.keys():
        found["q k^T"] = _query_key_facts(weights["q"], weights["k"], num_heads, num_kv_heads)
    if products and {"v", "o"} <= weights.keys():
        found["v o"] = _value_output_facts(weights["v"], weights["o"], num_heads, num_kv_heads)
    return AttentionFacts(matrices, found)


def _query_key_facts(q: Tensor, k: Tensor, num_heads: int, num_kv_heads: int) -> ProductFacts:
    key = split_heads(k, num_kv_heads).repeat_interleave(num_heads // num_kv_heads, dim=0)
    return product_facts(split_heads(q, num_heads), key.mT)


def _value_output_facts(v: Tensor, o: Tensor, num_heads: int, num_kv_heads: int) -> ProductFacts:
    """The layer's map under equal attention: each value head meets the sum of its group's rows."""
    group_sums = o.unflatten(0, (num_kv_heads, num_heads // num_kv_heads, -1)).sum(1)
    return product_facts(v.unsqueeze(0), group_sums.flatten(0, 1).unsqueeze(0))

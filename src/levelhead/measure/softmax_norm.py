"""Norms of the softmax Jacobian ``diag(p) - p p^T`` of a row, without forming it."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from levelhead.measure.sensitivity import checked_rows, require_row_sums, sensitivity
from levelhead.shapes import require_known

_CHUNK_NUMBERS = 1 << 18
_MAX_STEPS = 60  # the rational steps below converge quadratically; five or six are usual
_Norm = Callable[[Float[Tensor, "R S"]], Float[Tensor, " R"]]


def softmax_jacobian_norm(
    attn_weights: Float[Tensor, "*rows S"],
    ord: int | str | tuple[float, int] = 2,  # noqa: A002 - torch.linalg's word
) -> Float[Tensor, "*rows"]:
    """Norm of ``diag(p) - p p^T`` for every row p, divided by its sum in float64.

        (inf, 1): theta(p), to 5e-7     2: the largest eigenvalue, at most theta / 2     "fro"

    Args:
        attn_weights: Rows of softmax weights.
        ord: ``(inf, 1)``, ``2`` or ``"fro"``.

    Returns:
        float64, in [0, 1], [0, 1/2] and [0, 1/2]; NaN for rows without weight. For the bounds of
        the (inf, 1) norm see ``sensitivity``.

    Raises:
        ValueError: Another ``ord``, or rows that ``sensitivity`` refuses.

    Source: the 2-norm is the root of the secular equation of a rank-one change (Golub 1973).
    """
    require_known("ord", str(ord), map(str, _NORMS))
    rows = checked_rows(attn_weights)
    parts = rows.split(max(1, _CHUNK_NUMBERS // rows.shape[1]))
    norms = torch.cat([_NORMS[ord](_probabilities(part)) for part in parts])
    return norms.view(attn_weights.shape[:-1])


def _probabilities(rows: Float[Tensor, "R S"]) -> Float[Tensor, "R S"]:
    total = rows.sum(-1, dtype=torch.float64)
    require_row_sums(rows, total)
    return rows.double() / total[:, None]


def _inf_one_norm(p: Float[Tensor, "R S"]) -> Float[Tensor, " R"]:
    return sensitivity(p.nan_to_num(0)).midpoint


def _frobenius_norm(p: Float[Tensor, "R S"]) -> Float[Tensor, " R"]:
    """Sum of ``p_i^2 (1 - p_i)^2`` and ``p_i^2 p_j^2``, so that nothing cancels when p_i is 1."""
    largest, others = _split_largest(p)
    rest, square, fourth = others.sum(-1), others.square().sum(-1), others.pow(4).sum(-1)
    diagonal = (largest * rest).square() + (others * (1 - others)).square().sum(-1)
    products = 2 * largest.square() * square + (square.square() - fourth).clamp(min=0)
    return (diagonal + products).sqrt()


def _spectral_norm(p: Float[Tensor, "R S"]) -> Float[Tensor, " R"]:
    """The root x in [p_2, p_1] of ``p_1 / (p_1 - x) = sum_{i>1} p_i / (x - p_i)``.

    Each step replaces the right side by ``slope / (x - p_2) + level``, equal to it in value and
    derivative, and solves the quadratic equation.
    """
    largest, others = _split_largest(p)
    second = others.amax(-1)
    width = largest - second
    above = width / 2
    for _ in range(_MAX_STEPS):
        distance = (second + above)[:, None] - others
        terms = others / distance
        slope = above.square() * (terms / distance).sum(-1)
        level = (terms.sum(-1) - slope / above).clamp(min=0)
        linear = largest + slope - level * width
        root = (linear.square() + 4 * level * slope * width).sqrt()
        # Of the two forms of the positive root, the one without cancellation.
        following = torch.where(
            linear >= 0, 2 * slope * width / (linear + root), (root - linear) / (2 * level)
        )
        following = following.clamp(min=0).minimum(width)
        change = (following - above).abs()
        above = torch.where(following > 0, following, above)
        if not (change > 1e-15 * (second + above)).any():
            break
    norm = second + torch.where(width > 0, above, 0)
    norm = torch.where(second > 0, norm, torch.zeros_like(norm))
    return torch.where(largest.isnan(), largest, norm)


def _split_largest(p: Float[Tensor, "R S"]) -> tuple[Float[Tensor, " R"], Float[Tensor, "R S"]]:
    largest, where = p.max(-1, keepdim=True)
    return largest[:, 0], p.scatter(-1, where, 0)


_NORMS: dict[int | str | tuple[float, int], _Norm] = {
    (math.inf, 1): _inf_one_norm,
    2: _spectral_norm,
    "fro": _frobenius_norm,
}

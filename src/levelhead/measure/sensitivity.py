"""How strongly a softmax row answers to its scores: theta, in certified bounds, and other norms.

    theta(p) = max over S of 4 p(S) (1 - p(S)) = 1 - min over S of |p(S) - p(S^c)|^2

is the (inf, 1) norm of the Jacobian ``diag(p) - p p^T`` of the softmax: how far the row can move,
in total variation, per unit of the largest change of a score. It is 1 where the row can be split
evenly, near 0 where one key holds all.

Source: Emadi 2026, arXiv 2602.18849.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from levelhead.measure.partition import EXACT_KEYS, imbalance, sort_rows
from levelhead.shapes import at_least_float32, require, require_float

_UNIT_ROUNDOFF = 2.0**-53
_ROUNDING = 8  # bounds move outward by _ROUNDING * (S + 8) roundings: see rounding_slack
_MIN_TOL = 1e-10
# Below 1 / EXACT_KEYS^2 no row of at most EXACT_KEYS keys passes the shortcut for many small keys.
_MAX_RESOLUTION = 0.99 / EXACT_KEYS**2
_ROW_SUM_SLACK = 1e-4  # a float32 softmax stays well below it; half precision: one eps
_CHUNK_NUMBERS = {"cpu": 1 << 18, "cuda": 1 << 24}
_HARD_NUMBERS = {"cpu": 1 << 18, "cuda": 1 << 24}


@dataclass(frozen=True)
class Sensitivity:
    """Certified bounds, one pair for each row: ``lower <= theta / temperature <= upper``.

    Attributes:
        lower: ``[...]`` float64; NaN for a row without any weight, which has no theta.
        upper: ``[...]`` float64, likewise.
    """

    lower: Float[Tensor, "..."]
    upper: Float[Tensor, "..."]

    @property
    def midpoint(self) -> Float[Tensor, "..."]:
        """The value that is at most half the width away from the truth."""
        return (self.lower + self.upper) / 2

    @property
    def is_empty(self) -> Bool[Tensor, "..."]:
        """True for the rows without any weight."""
        return self.upper.isnan()

    @property
    def num_empty(self) -> int:
        """Number of rows without any weight; they are left out of statistics."""
        return int(self.is_empty.sum())


def sensitivity(
    attn_weights: Float[Tensor, "*rows S"], temperature: float = 1.0, tol: float = 1e-6
) -> Sensitivity:
    """Bound the (inf, 1) norm of the softmax Jacobian of every row, with proof.

        ||d softmax(u / temperature) / du||_{inf -> 1} = theta(p) / temperature

    The bounds hold for the row as it came, divided by its sum in exact arithmetic: they are moved
    outward by the rounding of every step. They meet (up to that rounding) where one key holds
    half of the weight or more, and for rows of at most 18 positive weights.

    Theta belongs to probabilities. For weights with a sink use ``sink_sensitivity``. For affine
    weights ``alpha p + beta`` the norm is ``|alpha| theta(p)``: pass the softmax weights p.

    Args:
        attn_weights: Rows of softmax weights, masked keys zero; a row without weight is skipped.
        temperature: What the scores were divided by, positive.
        tol: Largest width of the bounds on theta, in 1e-10 .. 1. Widths are smaller than 1e-5.

    Returns:
        Bounds in [0, 1 / temperature] for each row.

    Raises:
        ValueError: Not floating-point, no key, a weight negative or not finite, a row whose sum is
            neither one nor zero, ``temperature`` or ``tol`` out of range.

    Source: Emadi 2026, arXiv 2602.18849; the algorithm is described in ``measure.partition``.
    """
    rows = checked_rows(attn_weights)
    _check_settings(rows.shape[1], temperature, tol)
    bounds, _ = _theta_bounds(rows, tol)
    return _shaped(bounds / temperature, attn_weights)


def sink_sensitivity(
    attn_weights: Float[Tensor, "*rows S"], temperature: float = 1.0, tol: float = 1e-6
) -> Sensitivity:
    """Bound the same norm for rows that lost mass to a sink: outputs and scores of the keys only.

        m = sum(p),   norm = (m - m^2 + m^2 theta(p / m)) / temperature

    Args:
        attn_weights: Rows that sum to at most one; the missing mass is the sink's. A row without
            weight has norm 0 (all of it is on the sink).
        temperature: What the scores were divided by, positive.
        tol: Largest width of the bounds, in 1e-10 .. 1.

    Returns:
        Bounds in [0, 1 / temperature] for each row.

    Raises:
        ValueError: As for ``sensitivity``, and a row whose sum exceeds one.

    Source: the argument of Emadi 2026 for ``max over signs of (m - (p . signs)^2)``.
    """
    rows = checked_rows(attn_weights)
    _check_settings(rows.shape[1], temperature, tol)
    bounds, total = _theta_bounds(rows, tol, at_most_one=True)
    mass = total.clamp(max=1)
    bounds = (mass * (1 - mass) + mass.square() * bounds.nan_to_num(0)).clamp(0, 1)
    outward = torch.tensor([[-1.0], [1.0]], dtype=torch.float64, device=bounds.device)
    bounds = (bounds + outward * rounding_slack(rows.shape[1]) * (mass > 0)).clamp(0, 1)
    return _shaped(bounds / temperature, attn_weights)


def rounding_slack(num_keys: int) -> float:
    """Bound what float64 rounding can do to theta of a row of ``num_keys`` weights.

    With u = 2^-53 the sum of S non-negative numbers is off by at most S u of itself in any order.
    Dividing by the sum, adding up and subtracting from one each cost so much, so a signed sum of
    the divided row is off by at most 4 S u + 8 u. The imbalance d is below 1/2 unless one key
    dominates, so theta = 1 - d^2 is off by less; the factor 8 leaves room.

    Args:
        num_keys: S.

    Returns:
        An absolute error of theta.
    """
    return _ROUNDING * (num_keys + 8) * _UNIT_ROUNDOFF


def checked_rows(attn_weights: Float[Tensor, "*rows S"]) -> Float[Tensor, "R S"]:
    """Return the rows of floating-point weights, detached, as a matrix.

    Args:
        attn_weights: Weights with the keys in the last axis.

    Returns:
        A view where possible.

    Raises:
        ValueError: Not floating-point, or no key.
    """
    require_float(attn_weights=attn_weights)
    require(
        attn_weights.ndim >= 1 and attn_weights.shape[-1] >= 1,
        "attn_weights must have at least one key in its last axis",
        f"attn_weights {list(attn_weights.shape)}",
    )
    return attn_weights.detach().reshape(-1, attn_weights.shape[-1])


def require_row_sums(
    rows: Float[Tensor, "R S"], total: Float[Tensor, " R"], *, most: bool = False
) -> None:
    """Raise unless the weights are finite and not negative and every row sums to one or zero.

    Args:
        rows: The weights.
        total: Their sums in float64.
        most: Accept every sum up to one.

    Raises:
        ValueError: A weight negative or not finite, or a sum that is off by more than 1e-4 or, in
            half precision, one eps of the dtype.
    """
    least = rows.amin() if rows.numel() else total.new_zeros(())
    num_broken = int((~total.isfinite()).sum())
    require(
        num_broken == 0 and bool(least >= 0),
        "attn_weights must be finite and not negative",
        f"a smallest weight of {least.item():.6g} and {num_broken} rows without a finite sum",
        "softmax weights; of affine weights their softmax part",
    )
    slack = max(_ROW_SUM_SLACK, torch.finfo(rows.dtype).eps)
    wrong = (total > 1 + slack) if most else ((total - 1).abs() > slack) & (total != 0)
    first = total[wrong][:1].tolist()
    require(
        not first,
        "rows of attn_weights must sum to " + ("at most one" if most else "one"),
        f"a row sum of {first[0] if first else 1:.6g}",
        "softmax weights; sink weights in sink_sensitivity; of affine weights their softmax part",
    )


def _check_settings(num_keys: int, temperature: float, tol: float) -> None:
    require(
        math.isfinite(temperature) and temperature > 0,
        "temperature must be a positive number",
        f"temperature={temperature}",
    )
    least = max(_MIN_TOL, 8 * rounding_slack(num_keys))
    require(
        least <= tol <= 1,
        "tol must be above the rounding of float64 and at most 1",
        f"tol={tol}",
        f"{least:.1e} .. 1 for rows of {num_keys}",
    )


def _shaped(bounds: Float[Tensor, "2 R"], attn_weights: Tensor) -> Sensitivity:
    lower, upper = bounds.view(2, *attn_weights.shape[:-1])
    return Sensitivity(lower, upper)


def _theta_bounds(
    rows: Float[Tensor, "R S"], tol: float, *, at_most_one: bool = False
) -> tuple[Float[Tensor, "2 R"], Float[Tensor, " R"]]:
    """Lower and upper bound of every row, and the row sums."""
    slack = rounding_slack(rows.shape[1])
    resolution = min(math.sqrt(tol - 4 * slack), _MAX_RESOLUTION)
    bounds = torch.full((2, len(rows)), torch.nan, dtype=torch.float64, device=rows.device)
    total = torch.empty(len(rows), dtype=torch.float64, device=rows.device)
    hard = []
    step = max(1, _CHUNK_NUMBERS.get(rows.device.type, 1 << 18) // rows.shape[1])
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        total[part] = rows[part].sum(-1, dtype=torch.float64)
        require_row_sums(rows[part], total[part], most=at_most_one)
        open_rows = _easy_bounds(rows[part], total[part], resolution, slack, bounds[:, part])
        hard.append(open_rows + start)
    hard = torch.cat(hard) if hard else torch.empty(0, dtype=torch.long, device=rows.device)
    for which in (
        hard.split(max(1, _HARD_NUMBERS.get(rows.device.type, 1 << 18) // rows.shape[1]))
        if len(hard)
        else ()
    ):
        bounds[:, which] = _hard_bounds(rows[which], total[which], resolution, slack)
    return bounds, total


def _easy_bounds(
    rows: Float[Tensor, "R S"],
    total: Float[Tensor, " R"],
    resolution: float,
    slack: float,
    bounds: Float[Tensor, "2 R"],
) -> Int[Tensor, " N"]:
    """Fill in the rows that need no sorting; return the indices of the others.

    Many small keys: those above the resolution, largest first, can be split with an imbalance of
    at most the largest; if the others weigh as much, they bring it below the resolution.
    """
    rows = rows.to(at_least_float32(rows.dtype))
    largest = rows.amax(-1).double()
    threshold = (resolution * (1 - 1e-6) * total).to(rows.dtype)
    small_mass = torch.where(rows <= threshold[:, None], rows, 0).sum(-1, dtype=torch.float64)
    is_dominant = (2 * largest >= total) & (total > 0)
    is_diffuse = (small_mass >= largest) & (total > 0) & ~is_dominant
    bounds[0, is_diffuse] = 1 - resolution**2 - slack
    bounds[1, is_diffuse] = 1.0
    dominant = is_dominant.nonzero()[:, 0]
    if len(dominant):
        bounds[:, dominant] = _dominant_bounds(rows[dominant], total[dominant], slack)
    return ((total > 0) & ~is_dominant & ~is_diffuse).nonzero()[:, 0]


def _dominant_bounds(
    rows: Float[Tensor, "R S"], total: Float[Tensor, " R"], slack: float
) -> Float[Tensor, "2 R"]:
    """theta = 4 p_max (1 - p_max), to a relative error: 1 - p_max is summed, not subtracted."""
    others = rows.double()
    largest, where = others.max(-1, keepdim=True)
    rest = others.scatter_(-1, where, 0).sum(-1)
    theta = 4 * (largest[:, 0] / total) * (rest / total)
    return torch.stack([theta * (1 - slack), (theta * (1 + slack)).clamp(max=1)])


def _hard_bounds(
    rows: Float[Tensor, "R S"], total: Float[Tensor, " R"], resolution: float, slack: float
) -> Float[Tensor, "2 R"]:
    ascending = sort_rows(rows.to(at_least_float32(rows.dtype)))
    low, high = imbalance(ascending, total, resolution)
    lower, upper = 1 - high.square() - slack, 1 - low.square() + slack
    return torch.stack([lower, upper]).clamp(0, 1)

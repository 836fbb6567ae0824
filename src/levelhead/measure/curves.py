"""What a training curve says: divergence, the first broken value, epochs to a target.

Curves are sequences of numbers, one for each step or epoch, as they stand in a log.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from levelhead.measure.spikes import as_curve, median_and_mad
from levelhead.shapes import complaint, require

_REGAINED = 0.5  # a curve that keeps less than half of its progress has lost it
_NOISE_FACTOR = 6.0  # in median absolute deviations, as for spikes


def first_nonfinite(values: ArrayLike) -> int | None:
    """Return the position of the first NaN or infinite value.

    Args:
        values: One number a step.

    Returns:
        The position, from 0, or None.

    Raises:
        ValueError: Not one axis.
    """
    broken = np.flatnonzero(~np.isfinite(as_curve(values)))
    return int(broken[0]) if len(broken) else None


def divergence_step(values: ArrayLike, window: int = 16) -> int | None:
    """Return the step from which a loss is lost for good, or None.

    A loss has diverged if it ends non-finite, or if it gave back more than half of what it had
    gained and never regained it::

        level = running median over ``window`` steps
        limit = best level + max((first level - best level) / 2, 6 MAD(loss - level))
        diverged from the first step after which the level stays above the limit

    Args:
        values: Losses, lower is better.
        window: Steps of the running median, at least 1; shorter curves use their own length.

    Returns:
        A position from 0. A single spike, however high, is no divergence.

    Raises:
        ValueError: Not one axis, or ``window`` below 1.
    """
    curve = as_curve(values)
    require(window >= 1, "window must be at least 1", f"window={window}")
    if not len(curve):
        return None
    finite = np.flatnonzero(np.isfinite(curve))
    if not len(finite):
        return 0
    if finite[-1] < len(curve) - 1:
        return int(finite[-1]) + 1
    kept = curve[finite]
    window = min(window, len(kept))
    level = np.median(np.lib.stride_tricks.sliding_window_view(kept, window), -1)
    noise = median_and_mad(kept[window - 1 :] - level)[1]
    limit = level.min() + max(_REGAINED * (level[0] - level.min()), _NOISE_FACTOR * noise)
    below = np.flatnonzero(level <= limit)
    if below[-1] == len(level) - 1:
        return None
    return int(finite[below[-1] + 1 + window // 2])


@dataclass(frozen=True)
class Crossing:
    """When a curve reached a target; all three are infinite if it never did.

    Attributes:
        estimate: By linear interpolation between the two epochs.
        lower: The last epoch looked at before it was reached; the first epoch if that reached it.
        upper: The first epoch at which it was reached.
    """

    estimate: float
    lower: float
    upper: float


def epochs_to_target(
    epochs: ArrayLike, values: ArrayLike, target: float, *, rising: bool = True
) -> Crossing:
    """Say when a curve first reached a target.

    Args:
        epochs: Where the values were taken, ascending: epochs, steps or tokens.
        values: For instance accuracies. NaN reaches nothing.
        target: The value to reach.
        rising: True for accuracies (at least the target), False for losses (at most).

    Returns:
        The estimate and the interval that contains the moment for certain.

    Raises:
        ValueError: Not one axis each, lengths that differ, or epochs that do not ascend.
    """
    at, curve = as_curve(epochs), as_curve(values)
    require(
        len(at) == len(curve) and bool((np.diff(at) > 0).all()),
        "epochs must ascend, one for each value",
        f"{len(at)} epochs, {len(curve)} values",
    )
    sign = 1 if rising else -1
    reached = np.flatnonzero(sign * curve >= sign * target)
    if not len(reached):
        return Crossing(math.inf, math.inf, math.inf)
    first = int(reached[0])
    upper = float(at[first])
    if first == 0:
        return Crossing(upper, upper, upper)
    lower, before = float(at[first - 1]), float(curve[first - 1])
    if not math.isfinite(before):
        return Crossing(upper, lower, upper)
    share = (target - before) / (float(curve[first]) - before)
    return Crossing(lower + share * (upper - lower), lower, upper)


@dataclass(frozen=True)
class MedianInterval:
    """Median over seeds with an interval that assumes nothing about their distribution.

    Attributes:
        median: Middle value; infinite if half of the seeds or more never reached the target.
        lower: Lower end of the interval.
        upper: Upper end; infinite if too few seeds reached the target.
        coverage: Probability that such an interval contains the true median, for few seeds less
            than was asked for: then the interval is the whole range of the seeds.
    """

    median: float
    lower: float
    upper: float
    coverage: float


def median_interval(values: Sequence[float], confidence: float = 0.95) -> MedianInterval:
    """Return the median of several seeds with its order-statistics interval.

        P(x_(r) <= median <= x_(n+1-r)) >= 1 - 2 P(Binomial(n, 1/2) < r)

    Seeds that never reached the target enter as infinity; they need no special treatment.

    Args:
        values: One number a seed, for instance ``Crossing.estimate``.
        confidence: Wanted coverage, in (0, 1); the narrowest interval that has it is returned.

    Returns:
        The median, the interval, its coverage.

    Raises:
        ValueError: No value, a NaN, or ``confidence`` outside (0, 1).

    Source: the sign-test interval, e.g. Conover 1999, section 3.2.
    """
    ordered = np.sort(as_curve(values))
    require(0 < confidence < 1, "confidence must lie between 0 and 1", f"confidence={confidence}")
    count = len(ordered)
    if not count or np.isnan(ordered).any():
        raise ValueError(complaint("values must hold at least one number and no NaN", f"{values}"))
    rank, coverage = 1, 1 - 2 * _binomial_below(count, 1)
    while 2 * (rank + 1) <= count and 1 - 2 * _binomial_below(count, rank + 1) >= confidence:
        rank, coverage = rank + 1, 1 - 2 * _binomial_below(count, rank + 1)
    low, high = ordered[(count - 1) // 2], ordered[count // 2]
    median = high if math.isinf(high) else (low + high) / 2
    return MedianInterval(
        float(median), float(ordered[rank - 1]), float(ordered[count - rank]), max(0.0, coverage)
    )


def _binomial_below(count: int, rank: int) -> float:
    """P(Binomial(count, 1/2) < rank)."""
    return sum(math.comb(count, hits) for hits in range(rank)) / 2**count

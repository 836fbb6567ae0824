"""Spikes of a training curve: values far above the usual ones, over a stretch or as it moves on.

Curves are sequences of numbers, one for each step or epoch, as they stand in a log.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from levelhead.shapes import require

SPIKE_FACTORS = (6.0, 9.0)
"""The two thresholds of Bae et al. 2026, Table 5, in median absolute deviations."""
SPIKE_WINDOW, SPIKE_ENOUGH = 32, 16
"""Values before a step that say what is usual there, and how few still say it; such a short window
knows its MAD to about a third, so the stricter factor is taken."""
_SCORE_WINDOW, _SCORE_SIGMAS = 128, 6.0  # OLMo-core's StabilityMonitorCallback
_SCORE_FLAT = 1e-10  # likewise: a window this flat has no spikes


@dataclass(frozen=True)
class Spikes:
    """Spikes of a curve.

    Attributes:
        steps: Positions of the spikes, ascending from 0.
        threshold: What a value must exceed to be a spike.
        num_nonfinite: Values that are NaN or infinite; they are no spikes and set no threshold.
    """

    steps: tuple[int, ...]
    threshold: float
    num_nonfinite: int

    @property
    def count(self) -> int:
        """Number of spikes."""
        return len(self.steps)


def find_spikes(values: ArrayLike, factor: float = SPIKE_FACTORS[0]) -> Spikes:
    """Find values far above the usual ones.

        spike: g > median(g) + factor * MAD(g),   MAD = median |g - median(g)|

    Args:
        values: One number a step, for instance gradient norms of the first 500 steps.
        factor: How many median absolute deviations (not scaled to a standard deviation).

    Returns:
        The spikes; none where no value is finite (the threshold is NaN then).

    Raises:
        ValueError: Not one axis, or ``factor`` negative or not finite.

    Source: Bae et al. 2026, arXiv 2602.23057, Table 5 (factors 6 and 9, 500 steps).
    """
    curve = as_curve(values)
    require(0 <= factor < math.inf, "factor must be finite and not negative", f"factor={factor}")
    is_finite = np.isfinite(curve)
    if not is_finite.any():
        return Spikes((), math.nan, len(curve))
    middle, deviation = median_and_mad(curve[is_finite])
    threshold = middle + factor * deviation
    steps = np.flatnonzero(is_finite & (curve > threshold))
    return Spikes(tuple(steps.tolist()), threshold, int((~is_finite).sum()))


def is_spike(value: float, before: Iterable[float]) -> bool:
    """Whether a value stands far above the ones before it: the rule of monitor and report.

        spike: x_t > m + 9 MAD,   m and MAD of the finite ones of x_{t-32} .. x_{t-1}

    The window moves along, so that a falling loss does not make its own start a spike.

    Args:
        value: The newest one.
        before: Earlier values in their order; the last 32 count.

    Returns:
        False for what is not finite, before sixteen finite values, and after a flat stretch.
    """
    window = [x for x in deque(before, maxlen=SPIKE_WINDOW) if math.isfinite(x)]
    if len(window) < SPIKE_ENOUGH or not math.isfinite(value) or max(window) == min(window):
        return False
    return value > find_spikes(window, SPIKE_FACTORS[1]).threshold


def running_spikes(values: ArrayLike) -> tuple[int, ...]:
    """Find the spikes of a curve while it moves, see ``is_spike``.

    Args:
        values: One number a step; NaN and infinite ones are no spikes.

    Returns:
        Positions of the spikes, ascending from 0.

    Raises:
        ValueError: Not one axis.
    """
    curve = as_curve(values).tolist()
    return tuple(t for t, value in enumerate(curve) if is_spike(value, curve[:t][-SPIKE_WINDOW:]))


def spike_score(
    values: ArrayLike, window: int = _SCORE_WINDOW, sigmas: float = _SCORE_SIGMAS
) -> float:
    """Share of the steps that lie far above the steps before them.

        spike at t: x_t > mean(x_{t-w} .. x_{t-1}) + sigmas * std(x_{t-w} .. x_{t-1})

    Only finite values enter; a step counts as a possible spike once ``window`` finite values lie
    before it, and never after a flat window (std below 1e-10, population formula).

    Args:
        values: One number a step: losses or gradient norms.
        window: How many values before a step set its threshold, at least 2.
        sigmas: Standard deviations above the mean.

    Returns:
        Spikes divided by finite steps, in [0, 1]; 0 for a curve without finite values.

    Raises:
        ValueError: Not one axis, or ``window`` below 2.

    Source: SpikeScore (total) of OLMo-core's stability monitor (window 128, 6 sigma).
    """
    curve = as_curve(values)
    require(window >= 2, "window must be at least 2", f"window={window}")
    curve = curve[np.isfinite(curve)]
    if len(curve) <= window:
        return 0.0
    before = np.lib.stride_tricks.sliding_window_view(curve, window)[:-1]
    mean, std = before.mean(-1), before.std(-1)
    is_spike = (curve[window:] > mean + sigmas * std) & (std >= _SCORE_FLAT)
    return int(is_spike.sum()) / len(curve)


def median_and_mad(values: NDArray) -> tuple[float, float]:
    """Return the median and the median absolute deviation from it.

    Args:
        values: Finite numbers, at least one.

    Returns:
        Both; the deviation is not scaled to a standard deviation.
    """
    middle = float(np.median(values))
    return middle, float(np.median(np.abs(values - middle)))


def as_curve(values: ArrayLike) -> NDArray:
    """Return a curve as an array.

    Args:
        values: One number a step.

    Returns:
        One axis, float64.

    Raises:
        ValueError: Not one axis.
    """
    curve = np.asarray(values, dtype=np.float64)
    require(curve.ndim == 1, "a curve must have one axis", f"shape {list(curve.shape)}", "[steps]")
    return curve

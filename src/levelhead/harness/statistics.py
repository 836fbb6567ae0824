"""Is one variant better than another? Paired by seed, with an interval, and with n in sight.

Two intervals are given, and the one that errs on the safe side decides.

- **Paired t** (decides). Exact when differences are normal; with n = 3 it is wide, as it should
  be: three runs say little.
- **Percentile bootstrap over seeds** (shown beside it). It resamples the n differences, so it can
  never reach beyond the smallest and largest of them. For n = 3 the resample that repeats the
  smallest three times has probability 1/27 = 3.7 %, more than the 2.5 % of a tail: the "95 %"
  interval *is* the range of the three values, and that range covers the true median in only
  1 - 2 / 2^3 = 75 % of experiments. From about 20 seeds on the two agree.

An interval that spans zero reads "no difference shown", which is not "no difference": the
smallest detectable difference says how large a true one would have had to be to show, with a
stated power, at the spread that was observed.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from scipy import special

from levelhead.shapes import require

CONFIDENCE = 0.95
ENUMERATED_UP_TO = 6  # 6^6 = 46,656 resamples: all of them, no chance involved
NUM_RESAMPLES = 9_999
BOOTSTRAP_SEED = 0
POWER = 0.8  # Cohen's convention


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """What n paired differences show.

    Attributes:
        n: Number of pairs.
        mean: Mean difference, in the metric's unit; None without pairs.
        t_interval: Paired-t interval of the mean, or None below two pairs or without any spread
            (equal differences of a coarse metric say nothing about chance).
        bootstrap_interval: Percentile bootstrap interval of the mean, or None likewise.
        half_width: Half of the t interval: an observed difference below it does not show.
        detectable: The smallest true difference that so many pairs with this spread show in
            80 % of experiments; None where the interval is.
        p_value: Two-sided paired t-test; None where the interval is.
    """

    n: int
    mean: float | None = None
    t_interval: tuple[float, float] | None = None
    bootstrap_interval: tuple[float, float] | None = None
    half_width: float | None = None
    detectable: float | None = None
    p_value: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; an interval becomes a list of two."""
        values = asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    @property
    def sign(self) -> int:
        """1 or -1 where the t interval lies on one side of zero, else 0: no difference shown."""
        if self.t_interval is None or self.t_interval[0] <= 0 <= self.t_interval[1]:
            return 0
        return 1 if self.t_interval[0] > 0 else -1


def paired_difference(
    differences: Sequence[float], confidence: float = CONFIDENCE
) -> PairedDifference:
    """Summarise the differences of runs that share seed and data order.

        mean +- t_{n-1} s / sqrt(n)

    Args:
        differences: Variant minus baseline, one for each seed; all finite.
        confidence: Share of experiments whose interval shall hold the truth, in (0, 1).

    Returns:
        Mean, both intervals and the p value.

    Raises:
        ValueError: A difference that is not finite.
    """
    values = np.asarray(differences, dtype=np.float64)
    require(bool(np.isfinite(values).all()), "differences must be finite", f"{list(values)}")
    n = len(values)
    if n == 0:
        return PairedDifference(n=0)
    mean = float(values.mean())
    if n == 1 or np.ptp(values) <= 1e-9 * np.abs(values).max():
        return PairedDifference(n=n, mean=mean)
    standard_error = float(values.std(ddof=1)) / n**0.5
    half_width = float(special.stdtrit(n - 1, (1 + confidence) / 2)) * standard_error
    return PairedDifference(
        n=n,
        mean=mean,
        t_interval=(mean - half_width, mean + half_width),
        bootstrap_interval=bootstrap_interval(values, confidence),
        half_width=half_width,
        detectable=detectable_in_errors(n, POWER, confidence) * standard_error,
        p_value=float(2 * special.stdtr(n - 1, -abs(mean) / standard_error)),
    )


def paired_power(noncentrality: float, n: int, confidence: float = CONFIDENCE) -> float:
    """Probability that a two-sided paired t-test shows a difference that is there.

        P(|Z + noncentrality| > t sqrt(V / (n-1))),  Z normal, V chi-squared with n-1 degrees

    The integral over V is done numerically: scipy's ``nct`` returns NaN for few pairs.

    Args:
        noncentrality: True difference over its standard error, ``delta sqrt(n) / sigma``.
        n: Number of pairs, at least 2.
        confidence: 1 - alpha, in (0, 1).

    Returns:
        A probability, ``1 - confidence`` where there is no difference.
    """
    from scipy import integrate  # half a second that the start of a grid need not wait for

    degrees = n - 1
    critical = special.stdtrit(degrees, (1 + confidence) / 2) / degrees**0.5

    def shown(tail: float) -> float:
        reach = critical * special.chdtri(degrees, tail) ** 0.5  # V's tail probability is uniform
        return float(special.ndtr(noncentrality - reach) + special.ndtr(-noncentrality - reach))

    return float(integrate.quad(shown, 0, 1, epsabs=1e-9, limit=200)[0])


@lru_cache
def detectable_in_errors(n: int, power: float = POWER, confidence: float = CONFIDENCE) -> float:
    """Smallest true difference that n pairs show with a given power, in standard errors.

        the delta sqrt(n) / sigma at which  paired_power = power

    Args:
        n: Number of pairs, at least 2.
        power: Share of experiments in which it shall show, above ``1 - confidence``.
        confidence: Of the interval.

    Returns:
        Times ``s / sqrt(n)``, the difference in the metric's unit. The spread s is itself an
        estimate: with three pairs the true one is easily twice or half as large.
    """
    from scipy import optimize  # as above

    highest = 100 * float(special.stdtrit(n - 1, (1 + confidence) / 2))
    found: Any = optimize.brentq(
        lambda errors: paired_power(errors, n, confidence) - power, 0, highest, xtol=1e-6
    )
    return float(found)


def bootstrap_interval(
    values: Sequence[float] | np.ndarray, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Percentile bootstrap interval of a mean: every resample for few values, drawn ones for many.

    Args:
        values: One for each seed.
        confidence: In (0, 1).

    Returns:
        Both ends. With fewer than six values it is narrower than it claims: see the module's head.
    """
    values = np.asarray(values, dtype=np.float64)
    n = len(values)
    if n <= ENUMERATED_UP_TO:
        picks = np.array(list(itertools.product(range(n), repeat=n)))
    else:
        picks = np.random.default_rng(BOOTSTRAP_SEED).integers(n, size=(NUM_RESAMPLES, n))
    means = values[picks].mean(axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail], method="inverted_cdf")
    return float(low), float(high)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Adjust p values for having looked several times (Holm 1979).

        adjusted of the k-th smallest of m = max over j <= k of (m - j + 1) p_(j),   at most 1

    Args:
        p_values: One for each comparison.

    Returns:
        Under the same names, the adjusted values: below .05, the comparison stands although m
        were made.
    """
    adjusted, highest = {}, 0.0
    for rank, (name, p_value) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_value))
        adjusted[name] = highest
    return {name: adjusted[name] for name in p_values}

"""Intervals hold what they promise, and the one that does not is not the one that decides."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from levelhead.harness.statistics import (
    PairedDifference,
    bootstrap_interval,
    detectable_in_errors,
    holm,
    paired_difference,
    paired_power,
)


@pytest.mark.parametrize("n", [2, 3, 7, 19])
def test_t_interval_and_p_value_are_those_of_scipy(n):
    rng = np.random.default_rng(n)
    own, base = rng.normal(0.3, 1, n), rng.normal(0, 1, n)
    shown = paired_difference(list(own - base))
    expected = stats.ttest_rel(own, base)
    interval = expected.confidence_interval(0.95)
    assert shown.t_interval == pytest.approx((interval.low, interval.high), rel=1e-12)
    assert shown.p_value == pytest.approx(expected.pvalue, rel=1e-12)
    assert shown.mean == pytest.approx(np.mean(own - base))
    assert shown.half_width == pytest.approx((interval.high - interval.low) / 2)


def test_bootstrap_of_few_enumerates_and_of_three_is_just_the_range():
    values = [0.3, -1.1, 2.4, 0.9]
    means = sorted(np.mean(pick) for pick in itertools.product(values, repeat=4))
    low, high = bootstrap_interval(values, confidence=0.8)
    assert low == pytest.approx(means[math.ceil(0.1 * 256) - 1])
    assert high == pytest.approx(means[math.ceil(0.9 * 256) - 1])
    assert bootstrap_interval([5.0, 2.0, 3.0]) == (2.0, 5.0)


def test_bootstrap_of_many_agrees_with_scipys():
    values = np.random.default_rng(0).normal(1, 2, 41)
    expected = stats.bootstrap(
        (values,), np.mean, method="percentile", n_resamples=20_000, rng=np.random.default_rng(1)
    ).confidence_interval
    assert bootstrap_interval(values) == pytest.approx((expected.low, expected.high), abs=0.05)


def coverage(interval, n: int, experiments: int = 2_000) -> float:
    """Share of experiments whose interval holds the true mean, 1."""
    draws = np.random.default_rng(n).normal(1, 1, (experiments, n))
    ends = [interval(draw) for draw in draws]
    return sum(low <= 1 <= high for low, high in ends) / experiments


def test_with_three_seeds_only_the_t_interval_keeps_its_promise():
    """Why the bootstrap does not decide: its 95 % are 75 % (1 - 2 / 2^3)."""
    assert coverage(lambda values: paired_difference(values).t_interval, 3) > 0.935
    assert coverage(bootstrap_interval, 3) == pytest.approx(0.75, abs=0.03)


def test_sign_is_taken_only_where_the_interval_is_clear_of_zero():
    assert paired_difference([1.0, 1.1, 0.9]).sign == 1
    assert paired_difference([-1.0, -1.1, -0.9]).sign == -1
    spanning = paired_difference([1.0, 0.1, 2.5])
    assert spanning.sign == 0
    assert spanning.bootstrap_interval is not None
    assert spanning.bootstrap_interval[0] > 0  # all of one sign: the bootstrap would have claimed


@pytest.mark.parametrize("values", [[], [0.4], [0.2, 0.2, 0.2], [0.0, 0.0], [0.1 + 0.2, 0.3]])
def test_without_spread_nothing_is_claimed(values):
    shown = paired_difference(values)
    assert shown.n == len(values)
    assert (shown.t_interval, shown.bootstrap_interval, shown.p_value) == (None, None, None)
    assert shown.detectable is None
    assert shown.sign == 0
    assert shown.mean == (pytest.approx(values[0]) if values else None)


def test_a_difference_that_is_not_a_number_is_refused():
    with pytest.raises(ValueError, match=r"differences must be finite, got \[.*nan"):
        paired_difference([0.1, float("nan")])


def test_plain_values_are_json():
    plain = paired_difference([1.0, 2.0, 4.0]).as_dict()
    assert isinstance(plain["t_interval"], list)
    assert set(plain) == set(PairedDifference.__dataclass_fields__)


def test_holm_equals_the_step_down_rule_and_keeps_the_family_error():
    adjusted = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert adjusted == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02})
    assert list(adjusted) == ["a", "b", "c", "d"]
    assert holm({"x": 0.7, "y": 0.9}) == {"x": 1.0, "y": 1.0}
    rng = np.random.default_rng(0)
    draws = rng.uniform(size=(2_000, 5))
    plain = (draws.min(1) < 0.05).mean()
    kept = np.mean([min(holm(dict(enumerate(p))).values()) < 0.05 for p in draws])  # type: ignore
    assert plain > 0.2
    assert kept < 0.065


@pytest.mark.parametrize("n", [5, 7, 19, 101])
@pytest.mark.parametrize("noncentrality", [0.0, 0.7, 2.9])
def test_power_is_that_of_scipys_noncentral_t(n, noncentrality):
    critical = stats.t.ppf(0.975, n - 1)
    # P(T < -t) of one sign is P(T > t) of the other; scipy's cdf is NaN far in that tail.
    expected = sum(stats.nct.sf(critical, n - 1, nc) for nc in (noncentrality, -noncentrality))
    assert paired_power(noncentrality, n) == pytest.approx(expected, abs=1e-7)
    assert paired_power(0.0, n, confidence=0.9) == pytest.approx(0.1, abs=1e-7)


@pytest.mark.parametrize("n", [2, 3, 5, 11])
def test_the_smallest_detectable_difference_shows_in_four_of_five_experiments(n):
    """Simulated: n pairs of standard deviation 2 around exactly that difference."""
    delta = detectable_in_errors(n) * 2 / n**0.5
    draws = np.random.default_rng(n).normal(delta, 2, (40_000, n))
    shown = stats.ttest_1samp(draws, 0, axis=1).pvalue < 0.05
    assert shown.mean() == pytest.approx(0.8, abs=4 * (0.16 / 40_000) ** 0.5)
    half = np.random.default_rng(n).normal(delta / 2, 2, (40_000, n))
    assert (stats.ttest_1samp(half, 0, axis=1).pvalue < 0.05).mean() < 0.5


def test_detectable_is_in_the_metrics_unit_and_larger_than_the_half_width():
    shown = paired_difference([1.0, 0.1, 2.5, -0.4])
    assert shown.detectable is not None
    assert shown.half_width is not None
    error = np.std([1.0, 0.1, 2.5, -0.4], ddof=1) / 2
    assert shown.detectable == pytest.approx(detectable_in_errors(4) * error)
    assert shown.detectable > shown.half_width
    doubled = paired_difference([2.0, 0.2, 5.0, -0.8])
    assert doubled.detectable == pytest.approx(2 * shown.detectable)


def test_more_pairs_detect_less():
    found = [detectable_in_errors(n) / n**0.5 for n in (2, 3, 5, 11, 47)]
    assert found == sorted(found, reverse=True)
    normal = stats.norm.ppf(0.975) + stats.norm.ppf(0.8)  # the limit of many pairs
    assert detectable_in_errors(2_003) == pytest.approx(normal, abs=0.003)


@pytest.mark.slow
@pytest.mark.parametrize("n", [5, 11])
def test_the_t_interval_covers_with_few_pairs_and_the_bootstrap_errs_as_said(n):
    assert coverage(lambda values: paired_difference(values).t_interval, n) > 0.935
    assert coverage(bootstrap_interval, n) < 0.93

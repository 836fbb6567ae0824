"""Intervals hold what they promise, and the one that does not is not the one that decides."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from levelhead.harness.statistics import (
    PairedDifference,
    bootstrap_interval,
    holm,
    paired_difference,
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

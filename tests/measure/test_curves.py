"""Curves against hand-made cases, plain loops and scipy."""

import math

import numpy as np
import pytest
import scipy.stats
import torch

from levelhead.measure.curves import (
    divergence_step,
    epochs_to_target,
    first_nonfinite,
    median_interval,
)
from levelhead.measure.spikes import find_spikes, running_spikes, spike_score


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.mark.parametrize("factor", [6, 9])
def test_spikes_are_the_values_above_median_plus_k_mad(factor, rng):
    values = rng.lognormal(sigma=1.5, size=500)
    limit = np.median(values) + factor * scipy.stats.median_abs_deviation(values)
    expected = [step for step in range(500) if values[step] > limit]
    found = find_spikes(values, factor)
    assert found.threshold == pytest.approx(limit)
    assert list(found.steps) == expected
    assert 0 < found.count == len(expected) < 100


def test_running_spikes_are_a_plain_loop_over_the_window(rng):
    values = rng.standard_t(2, size=400).cumsum() / 10 + rng.standard_t(2, size=400)
    values[[50, 51, 222]] = (math.nan, math.inf, 60.0)
    expected = []
    for t in range(400):
        window = [x for x in values[max(0, t - 32) : t] if math.isfinite(x)]
        if len(window) >= 16 and math.isfinite(values[t]):
            limit = np.median(window) + 9 * scipy.stats.median_abs_deviation(window)
            expected += [t] * bool(values[t] > limit)
    assert list(running_spikes(values)) == expected
    assert 222 in expected
    assert len(expected) < 40
    with pytest.raises(ValueError, match="a curve must have one axis"):
        running_spikes([[1.0]])


def test_more_deviations_find_fewer_spikes_and_a_constant_curve_has_none(rng):
    values = rng.lognormal(sigma=1.5, size=500)
    assert find_spikes(values, 9).count < find_spikes(values, 6).count
    assert find_spikes(np.ones(50)).count == 0
    assert find_spikes(torch.tensor([1.0, 2, 1, 2, 1, 100])).steps == (5,)


def test_broken_values_are_counted_and_do_not_move_the_threshold():
    clean = find_spikes([1, 2, 3, 2, 1, 50])
    found = find_spikes([1, math.nan, 2, 3, math.inf, 2, 1, 50])
    assert found.threshold == clean.threshold
    assert found.steps == (7,)
    assert found.num_nonfinite == 2
    assert find_spikes([math.nan]).count == 0


def test_spike_score_equals_the_loop_of_its_definition(rng):
    values = rng.normal(size=700)
    values[[3, 200, 450, 451]] += 30
    spikes = sum(
        values[t] > values[t - 128 : t].mean() + 6 * values[t - 128 : t].std()
        for t in range(128, 700)
    )
    assert spikes == 3  # step 3 has too few steps before it
    assert spike_score(values) == spikes / 700


def test_spike_score_ignores_broken_values_and_flat_windows(rng):
    values = rng.normal(size=300)
    with_nan = np.insert(values, [10, 250], [math.nan, math.inf])
    assert spike_score(with_nan, 64, 2) == spike_score(values, 64, 2) > 0
    assert spike_score([1.0] * 200 + [2.0]) == 0
    assert spike_score([1.0, 2.0]) == 0


def test_first_nonfinite_value():
    assert first_nonfinite([1, 2, math.inf, math.nan]) == 2
    assert first_nonfinite([1, 2]) is None
    assert first_nonfinite([]) is None


def falling(num_steps, rng, noise=0.05):
    return 1 + 4 * np.exp(-np.arange(num_steps) / 60) + noise * rng.normal(size=num_steps)


def test_a_healthy_curve_and_one_with_spikes_have_not_diverged(rng):
    loss = falling(400, rng)
    assert divergence_step(loss) is None
    loss[[100, 250, 251, 399]] = 50
    assert divergence_step(loss) is None
    loss[300:305] = math.nan
    assert divergence_step(loss) is None
    assert divergence_step(5 + 0.1 * rng.normal(size=300)) is None
    assert divergence_step([]) is None


def test_a_loss_that_is_not_regained_has_diverged_at_that_step(rng):
    loss = falling(400, rng)
    loss[230:] += 6
    assert divergence_step(loss) == pytest.approx(230, abs=9)
    loss[330:] -= 6
    assert divergence_step(loss) is None
    broken = falling(400, rng)
    broken[321:] = math.nan
    assert divergence_step(broken) == 321
    assert divergence_step([math.nan, math.nan]) == 0


@pytest.mark.parametrize("window", [1, 2, 7, 16, 17])
def test_a_clean_jump_is_dated_to_its_step_whatever_the_window(window):
    loss = [3 - step / 100 for step in range(200)] + [50.0] * 100
    assert divergence_step(loss, window) == 200


def test_a_loss_that_only_rises_has_diverged(rng):
    assert divergence_step(np.linspace(1, 9, 200) + 0.01 * rng.normal(size=200)) is not None


def test_epochs_to_target_interpolate_inside_a_certain_interval():
    crossing = epochs_to_target([1, 2, 4], [0.1, 0.3, 0.7], 0.4)
    assert (crossing.lower, crossing.upper) == (2, 4)
    assert crossing.estimate == pytest.approx(2.5)
    falling_loss = epochs_to_target([1, 2, 4], [3, 2, 1], 2, rising=False)
    assert falling_loss.estimate == falling_loss.upper == 2
    assert epochs_to_target([1, 2], [0.5, 0.6], 0.4).lower == 1
    assert epochs_to_target([1, 2], [0.5, 0.6], 0.9).estimate == math.inf
    after_nan = epochs_to_target([1, 2, 3], [0.1, math.nan, 0.9], 0.5)
    assert (after_nan.estimate, after_nan.lower, after_nan.upper) == (3, 2, 3)


@pytest.mark.parametrize("count", [1, 3, 5, 6, 9, 12, 30])
def test_median_interval_is_the_narrowest_with_its_binomial_coverage(count, rng):
    values = rng.normal(size=count)
    found, ordered = median_interval(list(values)), np.sort(values)
    assert found.median == pytest.approx(np.median(values))
    coverages = {
        rank: 1 - 2 * scipy.stats.binom.cdf(rank - 1, count, 0.5)
        for rank in range(1, max(1, count // 2) + 1)
    }
    enough = [rank for rank, coverage in coverages.items() if coverage >= 0.95] or [1]
    assert (found.lower, found.upper) == (ordered[max(enough) - 1], ordered[count - max(enough)])
    assert found.coverage == pytest.approx(max(0, coverages[max(enough)]), abs=1e-12)


def test_median_interval_contains_the_true_median_as_often_as_it_says(rng):
    hits = 0
    for _ in range(2000):
        found = median_interval(list(rng.exponential(size=8)))
        hits += found.lower <= math.log(2) <= found.upper
    assert hits / 2000 == pytest.approx(found.coverage, abs=0.015)


def test_seeds_that_never_arrive_widen_the_interval_instead_of_vanishing():
    found = median_interval([3, 4, 5, 6, 7, math.inf, math.inf])
    assert found.median == 6
    assert found.upper == math.inf
    assert median_interval([3, math.inf]).median == math.inf


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: find_spikes([[1.0]]), r"a curve must have one axis, got shape \[1, 1\]"),
        (lambda: find_spikes([1.0], -1), "factor must be finite and not negative, got factor=-1"),
        (lambda: spike_score([1.0], 1), "window must be at least 2, got window=1"),
        (lambda: divergence_step([1.0], 0), "window must be at least 1, got window=0"),
        (lambda: epochs_to_target([2, 1], [0, 1], 1), "epochs must ascend, one for each value"),
        (lambda: epochs_to_target([1], [0, 1], 1), "got 1 epochs, 2 values"),
        (lambda: median_interval([]), "at least one number and no NaN"),
        (lambda: median_interval([1, math.nan]), "at least one number and no NaN"),
        (lambda: median_interval([1], 1.0), "confidence must lie between 0 and 1"),
    ],
)
def test_bad_requests_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()

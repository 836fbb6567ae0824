"""Theta against brute force over all sign vectors, in exact arithmetic where rounding matters."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from levelhead.measure.sensitivity import sensitivity, sink_sensitivity

TOL = 1e-6


def exact_imbalance(weights):
    """min |sum of signed weights| / sum, over all signs, in exact rational arithmetic."""
    fractions = [Fraction(float(weight)) for weight in weights]
    unit = math.lcm(*(weight.denominator for weight in fractions))
    sums = {0}
    for weight in fractions:
        whole = weight.numerator * (unit // weight.denominator)
        sums = {abs(s + whole) for s in sums} | {abs(s - whole) for s in sums}
    total = sum(fractions)
    return Fraction(min(sums), unit) / total


def exact_theta(weights):
    return 1 - exact_imbalance(weights) ** 2


def integer_theta(counts):
    """Theta of integer weights, by the set of all subset sums held in the bits of one integer."""
    reachable = 1
    for count in counts:
        reachable |= reachable << int(count)
    total = int(sum(counts))
    lower_half = reachable & ((1 << (total // 2 + 1)) - 1)
    return 1 - ((total - 2 * (lower_half.bit_length() - 1)) / total) ** 2


def assert_certified(row, theta, width=TOL, slack=0):
    bounds = sensitivity(row)
    lower, upper = Fraction(bounds.lower.item()), Fraction(bounds.upper.item())
    assert lower - slack <= theta <= upper + slack
    assert upper - lower <= width


@pytest.mark.parametrize("num_keys", [1, 2, 3, 5, 7, 11, 13, 18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_up_to_18_keys_the_bounds_meet_at_the_brute_force_value(num_keys, dtype):
    rng = np.random.default_rng(num_keys)
    for spread in (0, 1e-8, 0.01, 0.5, 1, 3) if num_keys < 18 else (0.01, 1):
        scores = torch.tensor(rng.normal(size=num_keys) * spread, dtype=dtype)
        row = scores.softmax(-1)
        assert_certified(row, exact_theta(row), width=1e-13)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=12).filter(any))
def test_ties_and_masked_keys_agree_with_brute_force(counts):
    row = torch.tensor(counts, dtype=torch.float64)
    row = row / row.sum()
    assert_certified(row, exact_theta(row), width=1e-13)


def test_identity_of_theta_and_the_jacobian_norm_on_a_thousand_rows():
    torch.manual_seed(3)
    p = (2 * torch.randn(1000, 8, dtype=torch.float64)).softmax(-1)
    jacobian = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    signs = torch.cartesian_prod(*[torch.tensor([1.0, -1.0], dtype=torch.float64)] * 8)
    by_signs = (jacobian @ signs.T).abs().sum(1).amax(-1)
    mass = p @ (signs > 0).double().T
    by_subsets = (4 * mass * (1 - mass)).amax(-1)
    torch.testing.assert_close(by_signs, by_subsets, rtol=0, atol=1e-12)
    bounds = sensitivity(p, temperature=0.5)
    torch.testing.assert_close(bounds.lower, 2 * by_signs, rtol=0, atol=1e-12)
    torch.testing.assert_close(bounds.upper, 2 * by_signs, rtol=0, atol=1e-12)


def stress_counts(kind, num_keys, rng):
    if kind == "equal":
        return np.full(num_keys, rng.integers(1, 50))
    if kind == "near ties":
        return 1000 + rng.integers(0, rng.integers(2, 60), num_keys)
    if kind == "two levels":
        first = rng.integers(1, num_keys)
        return np.repeat(rng.integers(1, 5000, 2), [first, num_keys - first])
    if kind == "clusters":
        centres = rng.integers(1, 20000, rng.integers(2, 6))
        return rng.choice(centres, num_keys) + rng.integers(0, rng.integers(2, 20), num_keys)
    if kind == "geometric":
        return 1 + 30000 * rng.uniform(0.3, 0.999) ** np.arange(num_keys) // 1
    if kind == "one large, rest equal":
        return np.append(np.full(num_keys - 1, rng.integers(50, 1000)), rng.integers(1, 20000))
    assert kind == "softmax"
    return 1 + 2000 * np.exp(rng.normal(size=num_keys) * rng.uniform(0.001, 3)) // 1


@pytest.mark.parametrize(
    "kind",
    [
        "equal",
        "near ties",
        "two levels",
        "clusters",
        "geometric",
        "one large, rest equal",
        "softmax",
    ],
)
def test_long_structured_rows_agree_with_the_exact_subset_sums(kind):
    rng = np.random.default_rng(5)
    for num_keys in [19, 20, 23, 37, 61, 101, 401, 999] * 3:
        counts = np.minimum(stress_counts(kind, num_keys, rng), 60000)
        row = torch.tensor(rng.permutation(counts), dtype=torch.float64)
        assert_certified(row / row.sum(), integer_theta(counts), slack=1e-14)


def test_bounds_are_certified_in_exact_arithmetic_for_long_rows():
    rng = np.random.default_rng(11)
    for num_keys in (29, 67, 257):
        counts = rng.multinomial(2**17, rng.dirichlet(np.full(num_keys, 0.7)))
        row = torch.tensor(counts / 2**17, dtype=torch.float32)  # exact: the sum is a power of two
        assert row.double().sum() == 1
        assert_certified(row, Fraction(integer_theta(counts)), slack=Fraction(2, 10**16))


def test_odd_equal_rows_miss_one_half_by_one_key():
    for num_keys in (19, 21, 101, 997, 999):
        row = torch.full((num_keys,), 1 / num_keys)
        assert_certified(row, 1 - Fraction(1, num_keys**2), width=1e-11)


def test_rows_of_4096_and_masked_entries():
    torch.manual_seed(1)
    scores = torch.randn(3, 5, 4096) * torch.tensor([0.0, 0.1, 1, 4, 30])[:, None]
    scores = scores.masked_fill(torch.rand(3, 5, 4096) < 0.3, -torch.inf)
    bounds = sensitivity(scores.softmax(-1))
    assert bounds.lower.shape == (3, 5)
    assert ((bounds.upper - bounds.lower) <= TOL).all()
    dominant = scores.softmax(-1).amax(-1)[:, 4].double()
    sure = dominant >= 0.5
    theta = 4 * dominant * (1 - dominant)
    torch.testing.assert_close(bounds.midpoint[:, 4][sure], theta[sure], rtol=0, atol=1e-6)


def test_every_width_is_within_tol_over_spreads_lengths_and_tolerances():
    torch.manual_seed(2)
    for tol in (1e-8, 1e-6, 1e-2):
        for num_keys in (19, 43, 211, 1009):
            scores = torch.randn(67, num_keys) * torch.logspace(-4, 1, 67)[:, None]
            bounds = sensitivity(scores.softmax(-1), tol=tol)
            assert ((bounds.upper - bounds.lower) <= tol).all()
            assert (bounds.lower <= bounds.upper).all()


def test_smaller_tolerance_stays_inside_the_larger_one():
    torch.manual_seed(4)
    p = torch.randn(211, 83).softmax(-1)
    coarse, fine = sensitivity(p), sensitivity(p, tol=1e-9)
    assert (fine.lower >= coarse.lower - 1e-12).all()
    assert (fine.upper <= coarse.upper + 1e-12).all()


def test_nearly_one_hot_rows_keep_relative_accuracy():
    small = 1e-30
    row = torch.tensor([1.0, small, small, small], dtype=torch.float64)
    torch.testing.assert_close(sensitivity(row).midpoint.item(), 12 * small, rtol=1e-12, atol=0)
    one_hot = sensitivity(torch.tensor([0.0, 1.0, 0.0]))
    assert one_hot.lower == one_hot.upper == 0


def test_case_a01_empty_rows_are_skipped_and_counted():
    scores = torch.randn(2, 2, 6, 6)
    scores[1, :, 3] = -torch.inf
    attn_weights = scores.softmax(-1).nan_to_num(0)
    bounds = sensitivity(attn_weights)
    assert bounds.num_empty == 2
    assert bounds.is_empty.nonzero().tolist() == [[1, 0, 3], [1, 1, 3]]
    filled = ~bounds.is_empty
    assert (bounds.lower[filled] <= bounds.upper[filled]).all()
    assert bounds.lower[~filled].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rows_are_bounded_as_they_came(dtype):
    torch.manual_seed(6)
    for num_keys in (7, 13):
        row = torch.randn(num_keys).softmax(-1).to(dtype)
        assert_certified(row, exact_theta(row), width=1e-13)


def test_sink_rows_against_brute_force_over_signs():
    torch.manual_seed(7)
    scores = torch.randn(301, 9, dtype=torch.float64) * 2
    p = scores.softmax(-1)[:, :8]  # the ninth key is the sink
    jacobian = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    signs = torch.cartesian_prod(*[torch.tensor([1.0, -1.0], dtype=torch.float64)] * 8)
    norm = (jacobian @ signs.T).abs().sum(1).amax(-1)
    bounds = sink_sensitivity(p)
    assert (bounds.lower <= norm + 1e-15).all()
    assert (norm <= bounds.upper + 1e-15).all()
    assert (bounds.upper - bounds.lower <= 1e-12).all()
    assert sink_sensitivity(torch.zeros(2, 5)).upper.tolist() == [0, 0]


def test_gradient_of_the_caller_is_not_touched():
    p = torch.randn(5, 7, requires_grad=True).softmax(-1)
    assert not sensitivity(p).lower.requires_grad


@pytest.mark.parametrize(
    ("attn_weights", "words"),
    [
        (torch.tensor([1, 0]), "attn_weights must be a floating-point tensor"),
        (torch.zeros(3, 0), "at least one key in its last axis, got attn_weights .3, 0."),
        (torch.tensor([0.5, 0.6, -0.1]), "finite and not negative, got a smallest weight of -0.1"),
        (torch.tensor([0.5, torch.nan]), "finite and not negative"),
        (torch.tensor([torch.inf, 0.5]), "finite and not negative"),
        (torch.tensor([[0.5, 0.5], [0.5, 0.4]]), "must sum to one, got a row sum of 0.9"),
    ],
)
def test_what_is_no_probability_is_refused(attn_weights, words):
    with pytest.raises(ValueError, match=words):
        sensitivity(attn_weights)


def test_settings_out_of_range_are_refused():
    row = torch.tensor([0.5, 0.5])
    with pytest.raises(ValueError, match="temperature must be a positive number"):
        sensitivity(row, temperature=0)
    with pytest.raises(ValueError, match="tol must be above the rounding of float64"):
        sensitivity(row, tol=1e-14)
    with pytest.raises(ValueError, match="must sum to at most one, got a row sum of 1.5"):
        sink_sensitivity(torch.tensor([0.75, 0.75]))

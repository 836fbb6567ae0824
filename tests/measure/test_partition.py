"""The following of dense sets by itself: shortcuts switched off, exact subset sums as judge."""

import numpy as np
import pytest
import torch

from levelhead.measure import partition
from levelhead.measure.partition import imbalance, sort_rows


def integer_imbalance(counts):
    """min |signed sum| / sum, by the set of all subset sums held in the bits of one integer."""
    reachable = 1
    for count in counts:
        reachable |= reachable << int(count)
    total = int(sum(counts))
    lower_half = reachable & ((1 << (total // 2 + 1)) - 1)
    return (total - 2 * (lower_half.bit_length() - 1)) / total


def clustered_rows(num_rows, num_keys, rng):
    centres = rng.integers(1, 3000, (num_rows, rng.integers(2, 7)))
    which = rng.integers(0, centres.shape[1], (num_rows, num_keys))
    return np.take_along_axis(centres, which, 1) + rng.integers(0, 30, (num_rows, num_keys))


@pytest.mark.parametrize("num_keys", [5, 7, 9, 11, 26, 41, 97])
@pytest.mark.parametrize("resolution", [1e-3, 1e-2])
def test_followed_dense_sets_give_the_exact_imbalance_or_prove_it_small(num_keys, resolution):
    rng = np.random.default_rng(num_keys)
    counts = clustered_rows(103, num_keys, rng)
    counts[::3, 0] += 4000 * (1 + num_keys // 10)
    counts[::3, 1] += 9000 * (1 + num_keys // 10)
    counts[::5, 2] = 1.1 * counts[::5].sum(-1)  # nothing can balance these
    rows = torch.tensor(counts, dtype=torch.float64)
    layout = partition._Layout.of(sort_rows(rows), rows.sum(-1), resolution)
    order = layout.head_end.argsort()
    order = order[layout.head_end[order] >= 1]
    assert len(order) > 15
    found = partition._follow_head(layout.rows(order), resolution)
    exact = rows.new_tensor([integer_imbalance(counts[row]) for row in order])
    is_small = found <= resolution
    assert (exact[is_small] <= resolution + 1e-13).all()
    torch.testing.assert_close(found[~is_small], exact[~is_small], rtol=0, atol=1e-13)
    assert is_small.any()
    assert (~is_small).any()


def test_rows_whose_only_sums_are_far_from_zero_are_exact():
    """Large equal keys, an odd number of them: no sum is near zero and no hole may be closed."""
    for num_large, num_small in ((3, 20), (5, 30), (7, 40)):
        counts = np.r_[np.full(num_large, 100_000), np.full(num_small, 1_000)]
        rows = torch.tensor(counts, dtype=torch.float64)[None]
        low, high = imbalance(sort_rows(rows), rows.sum(-1), 1e-3)
        assert low.item() == high.item() == pytest.approx(integer_imbalance(counts), abs=1e-14)
        assert low.item() > 0.05


def test_sorting_agrees_with_torch():
    rows = torch.randn(5, 31)
    torch.testing.assert_close(sort_rows(rows), rows.sort(-1).values, rtol=0, atol=0)


@pytest.mark.parametrize("num_keys", [4, 6, 9, 13, 17])
def test_nothing_is_called_small_that_exceeds_the_resolution_by_a_little(num_keys):
    rng = np.random.default_rng(num_keys)
    followed = 0
    for counts in clustered_rows(17, num_keys, rng) * rng.choice([1, 3, 9], (17, num_keys)):
        exact = integer_imbalance(counts)
        for factor in (0.35, 0.6, 0.99) if exact > 0 else ():
            row = torch.tensor(counts, dtype=torch.float64)[None]
            layout = partition._Layout.of(sort_rows(row), row.sum(-1), factor * exact)
            assert not partition._last_signs_reach_zero(layout, factor * exact)
            assert partition._distance_to_zero(layout, factor * exact).item() > factor * exact
            if layout.head_end >= 1:
                found = partition._follow_head(layout, factor * exact).item()
                assert found == pytest.approx(exact, abs=1e-13)
                followed += 1
    assert followed > 5


@pytest.mark.parametrize(
    "counts",
    [
        [221, 198, 174, 146, 105, 102, 95, 74, 28, 23, 1],
        [278, 273, 210, 160, 156, 108, 102, 62, 59, 44, 1],
        [78, 65, 62, 60, 41, 22, 19, 6],
        [121, 116, 95, 73, 23, 6, 2, 1],
        [375, 324, 203, 141, 59],
    ],
)
def test_a_dense_set_is_trusted_only_where_it_covers_the_next_atom(counts):
    """Rows that a condition for the early stop weaker than rule 1 gets wrong."""
    exact = integer_imbalance(counts)
    row = torch.tensor(counts, dtype=torch.float64)[None]
    for factor in (0.7, 0.99):
        layout = partition._Layout.of(sort_rows(row), row.sum(-1), factor * exact)
        found = partition._follow_head(layout, factor * exact).item()
        assert found == pytest.approx(exact, abs=1e-13)

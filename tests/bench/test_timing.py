"""Times alternate, ratios are pairwise, and peaks are true to the byte."""

import pytest
import torch

from levelhead.bench.timing import (
    compare_times,
    peak_extra_bytes,
    peak_extra_rss_bytes,
    ratios,
)


def test_calls_alternate_after_the_warmup():
    order = []
    times = compare_times({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3, 2)
    assert order == ["a", "b"] * 5
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 3, "b": 3}


def test_ratios_are_medians_of_pairs_not_ratios_of_medians():
    times = {"base": [1.0, 2.0, 4.0], "own": [3.0, 2.0, 4.0]}
    assert ratios(times, "base")["own"] == {
        "ratio": 1.0,
        "ratio_min": 1.0,
        "ratio_max": 3.0,
        "median_s": 3.0,
    }


def test_bad_requests_are_refused():
    with pytest.raises(ValueError, match="repeats must be at least 1, got repeats=0"):
        compare_times({"a": int}, repeats=0)
    with pytest.raises(ValueError, match="unknown baseline 'c'; known: a"):
        ratios({"a": [1.0]}, "c")


def test_peak_counts_what_is_alive_together_and_nothing_else():
    outside = torch.ones(1 << 20)

    def call():
        first = torch.ones(3 << 18)
        del first
        second = torch.ones(1 << 20)
        third = torch.ones(1 << 19)
        return (second.sum() + third.sum() + outside[0]).item()

    four_byte_numbers = (1 << 20) + (1 << 19)
    assert 0 <= peak_extra_bytes(call) - 4 * four_byte_numbers < 4096


def test_peak_sees_the_temporary_inside_a_kernel():
    scores = torch.randn(1 << 18)
    indices_and_values = (8 + 4) << 18
    assert peak_extra_bytes(lambda: scores.sort().values.sum()) >= indices_and_values


def test_resident_peak_sees_memory_that_is_not_torchs():
    numpy = pytest.importorskip("numpy")
    size = 96 << 20
    grown = peak_extra_rss_bytes(lambda: numpy.ones(size, dtype=numpy.uint8).sum())
    assert 0.9 * size < grown < 1.5 * size

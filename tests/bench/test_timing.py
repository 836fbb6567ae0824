"""Times alternate, ratios are pairwise, and peaks are true to the byte."""

import pytest
import torch

from levelhead.bench import timing
from levelhead.bench.timing import (
    adjacent_times,
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


def test_every_call_runs_right_beside_the_baseline_and_rounds_turn_back():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    pairs = adjacent_times(lambda: order.append("-"), calls, 2)
    assert "".join(order) == "-ab-c-cb-a-"
    assert {name: len(found) for name, found in pairs.items()} == {"a": 2, "b": 2, "c": 2}


def test_a_call_is_compared_with_the_nearest_baseline(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(timing, "_seconds", lambda call: call(next(clock)))
    pairs = adjacent_times(lambda now: now, {n: lambda now: now for n in "abc"}, 1)
    assert pairs == {"a": [(0, 1)], "b": [(3, 2)], "c": [(3, 4)]}


def test_rounds_go_on_until_the_time_is_spent(monkeypatch):
    monkeypatch.setattr(timing.time, "perf_counter", iter(range(100)).__next__)
    pairs = adjacent_times(int, {"a": int}, 1, min_seconds=20)
    assert len(pairs["a"]) == 4  # five readings of the clock a round, and three before
    with pytest.raises(ValueError, match="repeats must be at least 1, got repeats=0"):
        adjacent_times(int, {"a": int}, 0)
    with pytest.raises(ValueError, match="calls must name at least one callable"):
        adjacent_times(int, {}, 1)


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
    call = lambda: numpy.ones(size, dtype=numpy.uint8).sum()  # noqa: E731
    # The system may take back pages of files at any time, which hides as many that were touched.
    grown = max(peak_extra_rss_bytes(call) for _ in range(3))
    assert 0.9 * size < grown < 1.5 * size

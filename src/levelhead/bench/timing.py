"""Time and memory of calls, comparable: alternating runs, ratios, peaks.

A time by itself says as much about the machine as about the code. So the calls to compare run in
turn in one process, each round gives one ratio, and the ratio's median and range are what counts.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from levelhead.measure.curves import median_interval
from levelhead.shapes import require, require_known

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_RESET_HIGH_WATER = "5"  # proc(5): writing 5 resets the peak resident set size


def compare_times(
    calls: Mapping[str, Callable[[], object]], repeats: int = 7, warmup: int = 1
) -> dict[str, list[float]]:
    """Time several calls in turn: round after round, each call once a round.

    A slow phase of the machine then hits every call alike and cancels in ``ratios``. CUDA work
    is waited for before and after each call.

    Args:
        calls: Name to callable without arguments.
        repeats: Timed rounds, at least 1.
        warmup: Rounds before, not timed.

    Returns:
        For each name its ``repeats`` times in seconds, in the order of the rounds.

    Raises:
        ValueError: No call, ``repeats`` below 1 or ``warmup`` below 0.
    """
    require(len(calls) > 0, "calls must name at least one callable", "an empty mapping")
    require(repeats >= 1, "repeats must be at least 1", f"repeats={repeats}")
    require(warmup >= 0, "warmup must be at least 0", f"warmup={warmup}")
    for _ in range(warmup):
        for call in calls.values():
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(_seconds(call))
    return times


def adjacent_times(
    baseline: Callable[[], object],
    calls: Mapping[str, Callable[[], object]],
    repeats: int,
    min_seconds: float = 0.0,
) -> dict[str, list[tuple[float, float]]]:
    """Time calls so long that the machine changes meanwhile: each right beside the baseline.

        baseline a b baseline c d baseline d c baseline b a baseline ...

    Two calls run between two runs of the baseline, one compared with that before it, one with
    that after it, and the next round goes backwards. Nothing is warmed up.

    Args:
        baseline: What all are compared with.
        calls: Name to callable without arguments.
        repeats: Rounds, at least 1.
        min_seconds: Rounds go on for at least so long.

    Returns:
        For each name, in the order of the rounds, seconds of the baseline and of the call.

    Raises:
        ValueError: No call, or ``repeats`` below 1.
    """
    require(len(calls) > 0, "calls must name at least one callable", "an empty mapping")
    require(repeats >= 1, "repeats must be at least 1", f"repeats={repeats}")
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    names, rounds, begun = list(calls), 0, time.perf_counter()
    before = _seconds(baseline)
    while rounds < repeats or time.perf_counter() - begun < min_seconds:
        for start in range(0, len(names), 2):
            own = {name: _seconds(calls[name]) for name in names[start : start + 2]}
            after = _seconds(baseline)
            for name, beside in zip(own, (before, after), strict=False):
                pairs[name].append((beside, own[name]))
            before = after
        names, rounds = names[::-1], rounds + 1
    return pairs


def ratios(times: Mapping[str, list[float]], baseline: str) -> dict[str, dict[str, float]]:
    """Compare every call with one of them, round by round.

        ratio[name] = median over rounds of times[name] / times[baseline]

    Args:
        times: What ``compare_times`` returned.
        baseline: The name all others are divided by.

    Returns:
        For each name ``ratio`` (the median), ``ratio_min``, ``ratio_max`` over the rounds, and
        ``median_s``, its median time in seconds.

    Raises:
        ValueError: ``baseline`` is not among the names.
    """
    require_known("baseline", baseline, times)
    compared = {}
    for name, seconds in times.items():
        pairs = [own / base for own, base in zip(seconds, times[baseline], strict=True)]
        compared[name] = {
            "ratio": statistics.median(pairs),
            "ratio_min": min(pairs),
            "ratio_max": max(pairs),
            "median_s": statistics.median(seconds),
        }
    return compared


def spread(values: Sequence[float], name: str) -> dict[str, Any]:
    """Summarise what the rounds of a comparison came to.

    Args:
        values: One number a round.
        name: What to call the number.

    Returns:
        Under ``name`` the median, with ``_min`` and ``_max`` the range; ``interval``, the 95 %
        order-statistics interval of the median, its ``coverage``, and the number of ``rounds``.

    Raises:
        ValueError: No value, or a NaN.
    """
    interval = median_interval(values)
    return {
        name: statistics.median(values),
        f"{name}_min": min(values),
        f"{name}_max": max(values),
        "interval": [interval.lower, interval.upper],
        "coverage": interval.coverage,
        "rounds": len(values),
    }


def peak_extra_bytes(call: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """Peak of the bytes torch's allocator has handed out during ``call``, above those before it.

    On the CPU the profiler's allocation events are added up; on CUDA the allocator's own counter
    is read. Both count every torch tensor, those inside kernels too, exactly and without noise.
    Neither counts memory that does not come from torch's allocator (numpy, scratch of LAPACK): for
    that see ``peak_extra_rss_bytes``. What ``call`` returns is alive until the count ends.

    Args:
        call: A callable without arguments; it runs once.
        device: Whose memory to count.

    Returns:
        Bytes, 0 or more.
    """
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept_alive = call()
    del kept_alive
    return _highest_sum(_cpu_allocations(profiler))


def peak_extra_rss_bytes(call: Callable[[], object]) -> int:
    """Peak resident memory of this process during ``call``, above that before it (Linux, CPU).

    Counts all memory whoever asked for it, but only pages that were touched, and none that the C
    library had kept from an earlier, freed use: start from a fresh process for exact figures.

    Args:
        call: A callable without arguments; it runs once.

    Returns:
        Bytes, 0 or more.

    Raises:
        ValueError: The system offers no resettable high-water mark.
    """
    require(
        _CLEAR_REFS.exists() and _STATUS.exists(),
        "peak_extra_rss_bytes needs Linux's /proc/self/clear_refs",
        "a system without it",
        "peak_extra_bytes",
    )
    gc.collect()
    _CLEAR_REFS.write_text(_RESET_HIGH_WATER)
    before = _high_water_bytes()
    kept_alive = call()
    peak = _high_water_bytes()
    del kept_alive
    return peak - before


def _seconds(call: Callable[[], object]) -> float:
    _wait_for_cuda()
    start = time.perf_counter()
    call()
    _wait_for_cuda()
    return time.perf_counter() - start


def _wait_for_cuda() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _cpu_allocations(profiler: profile) -> list[int]:
    """Signed bytes of every allocation and release, in time order."""
    inner = profiler.profiler
    assert inner is not None
    assert inner.kineto_results is not None
    cpu = torch.profiler.DeviceType.CPU  # pyright: ignore[reportAttributeAccessIssue]
    events = [
        event
        for event in inner.kineto_results.events()
        if event.name() == "[memory]" and event.device_type() == cpu
    ]
    events.sort(key=lambda event: event.start_ns())
    return [event.nbytes() for event in events]  # pyright: ignore[reportAttributeAccessIssue]


def _highest_sum(changes: list[int]) -> int:
    live = peak = 0
    for change in changes:
        live += change
        peak = max(peak, live)
    return peak


def _high_water_bytes() -> int:
    line = next(row for row in _STATUS.read_text().splitlines() if row.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

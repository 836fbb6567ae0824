"""Curves of a training as figures: lines or bands over seeds; spikes and broken values marked."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from levelhead.measure.spikes import SPIKE_FACTORS, SPIKE_WINDOW, running_spikes

SPIKE_EQUATION = (
    f"x_t > m + {SPIKE_FACTORS[1]:g} median|x_s - m|,  m = median_s x_s,  "
    f"s = t - {SPIKE_WINDOW}, .., t - 1"
)
SPIKE_WORDS = (
    "A triangle marks a spike: a value far above the ones before it. The rule is that of Bae et "
    "al. 2026 (Table 5), in a window that moves along, so that a falling loss does not make its "
    "own start a spike; the live monitor has the same. A cross marks a value that is NaN or "
    "infinite."
)


def curve_figure(
    name: str, title: str, curves: Mapping[str, Sequence[tuple[int, float]]]
) -> dict[str, Any]:
    """Draw one curve or several of the same quantity, each as it was logged.

    Args:
        name: Of the figure in the page.
        title: The quantity.
        curves: Label to (step, value) pairs.

    Returns:
        A figure of kind "lines".
    """
    series = []
    for label, curve in curves.items():
        spikes = running_spikes([value for _, value in curve])
        series.append(
            {
                "label": label or title,
                "steps": [step for step, _ in curve],
                "middle": [value for _, value in curve],
                "spikes": list(spikes),
            }
        )
    return lines_figure(name, title, series, [SPIKE_WORDS], [("a spike", SPIKE_EQUATION)])


def banded(label: str, curves: Sequence[Sequence[tuple[int, float]]]) -> dict[str, Any]:
    """Sum the same curve of several seeds up.

    Args:
        label: Of the series.
        curves: One a seed, as (step, value) pairs; a seed that broke is shorter.

    Returns:
        A series: at each step the mean over the seeds, their range and how many there are.
    """
    at: dict[int, list[float]] = {}
    for curve in curves:
        for step, value in curve:
            at.setdefault(step, []).append(value)
    steps = sorted(at)
    return {
        "label": label,
        "steps": steps,
        "middle": [fmean(at[step]) for step in steps],
        "low": [min(at[step]) for step in steps],
        "high": [max(at[step]) for step in steps],
        "count": [len(at[step]) for step in steps],
        "spikes": [],
    }


def lines_figure(
    name: str,
    title: str,
    series: list[dict[str, Any]],
    conventions: list[str],
    equations: Sequence[tuple[str, str]] = (),
) -> dict[str, Any]:
    """Lay out a chart over steps.

    Args:
        name: Of the figure in the page.
        title: The quantity, unit included.
        series: With label, steps, middle, and low and high where there is a band.
        conventions: How the numbers were taken, in words.
        equations: (label, equation) pairs.

    Returns:
        A figure of kind "lines".
    """
    return {
        "id": name,
        "kind": "lines",
        "title": title,
        "words": [],
        "conventions": conventions,
        "equations": list(equations),
        "details": [],
        "x_label": "step",
        "series": series,
    }

"""Metrics over depth: which belong in one figure, what its line, band and dots are, in words."""

import re
from collections.abc import Mapping
from typing import Any

from levelhead.report_metrics import FAMILIES, Quantity, quantity_of
from levelhead.report_render import short_number

_MIDDLES = ("q50", "median", "mean", "", "max", "min")  # what a line shows, the best first
_OPPOSITE = {"lower": "upper", "low": "high", "lo": "hi"}
MOST_DOTTED = 2  # series beyond which the dots of single heads hide each other
_MATRICES = {
    "q": "W_Q", "k": "W_K", "v": "W_V", "o": "W_O", "qk": "W_Q W_K^T", "vo": "W_V W_O",
}  # fmt: skip
_TAKEN = {
    "": "median", "q50": "median over rows, then", "mean": "mean over rows, then median",
}  # fmt: skip


def depth_sections(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lay out every metric over depth, a section for each family.

    Args:
        metrics: As ``report_diagnosis`` lays them out: name, base, statistic, family, quantity,
            values by layer and head, numbers of whole layers.

    Returns:
        Sections; figures of kind "depth", and what is the same everywhere as text.
    """
    sections = []
    for family, heading in FAMILIES.items():
        groups: dict[str, list[dict[str, Any]]] = {}
        for metric in metrics:
            if metric["family"] == family:
                groups.setdefault(_group(metric), []).append(metric)
        figures = [_figure(family, name, own) for name, own in groups.items()]
        laid_out = section(f"depth-{family}", f"{heading} over depth", "", [])
        twins = _twins(figures, {metric["name"]: metric for metric in metrics})
        laid_out["figures"] = [
            figure
            for figure in figures
            if figure["constant"] is None and figure["title"] not in twins
        ]
        laid_out["constants"] = [
            (figure["title"], f"{short_number(figure['constant'])} everywhere", figure["details"])
            for figure in figures
            if figure["constant"] is not None
        ] + [(title, f"the same numbers as {first}", []) for title, first in twins.items()]
        laid_out["nav"] = heading
        sections.append(laid_out)
    return sections


def _group(metric: Mapping[str, Any]) -> str:
    """Which figure over depth a metric belongs to: kappa(J) stands beside what is said of it."""
    if metric["family"] == "jacobian":
        return "jacobian"
    return metric["quantity"] + (" fused" if metric["base"].endswith("_fused") else "")


def _figure(family: str, name: str, metrics: list[dict[str, Any]]) -> dict[str, Any]:
    quantities = {metric["quantity"]: metric for metric in metrics}
    described = [quantity_of(metric["name"]) for metric in quantities.values()]
    series = _series(metrics)
    title = "Conditioning of the Jacobian" if family == "jacobian" else _heading(described[0])
    return {
        "id": f"depth-{family}-{re.sub('[^a-z0-9]+', '-', name.lower())}",
        "kind": "depth",
        "title": f"{title}, whole matrices" if name.endswith(" fused") else title,
        "words": [
            entry.words if len(described) == 1 else f"{entry.label}: {entry.words}"
            for entry in described
            if entry.words
        ],
        "equations": [
            ("" if len(described) == 1 else entry.label, entry.equation)
            for entry in described
            if entry.equation
        ],
        "conventions": [_convention(series)],
        "details": [(m["name"], "; ".join(m["conventions"])) for m in metrics if m["conventions"]],
        "log": any(metric["log"] for metric in metrics),
        "series": series,
        "constant": _constant(metrics),
    }


def _twins(figures: list[dict[str, Any]], metrics: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """Titles of figures that would show an earlier figure's numbers again, with its title."""
    first: dict[str, str] = {}
    twins = {}
    for figure in figures:
        shown = [metrics[s[part]] for s in figure["series"] for part in ("middle", "low", "high")
                 if s[part]]  # fmt: skip
        numbers = repr([(metric["values"], metric["whole"]) for metric in shown])
        if (
            figure["constant"] is None
            and first.setdefault(numbers, figure["title"]) != (figure["title"])
        ):
            twins[figure["title"]] = first[numbers]
    return twins


def _heading(quantity: Quantity) -> str:
    return quantity.label[0].upper() + quantity.label[1:] if quantity.words else quantity.label


def _constant(metrics: list[dict[str, Any]]) -> float | None:
    """The one value of all metrics, layers and heads; None where they differ."""
    rows = [row for metric in metrics for row in [*metric["values"], metric["whole"] or []]]
    values = {value for row in rows for value in row if value is not None}
    return values.pop() if len(values) == 1 else None


def _convention(series: list[dict[str, Any]]) -> str:
    """Say what line, band and dots of a figure are."""
    taken = {tuple(s["taken"].values()) for s in series}
    middle, low, high = next(iter(taken))
    if all(s["is_whole"] for s in series):
        return "One number a layer."
    line = _TAKEN.get(middle, f"{_statistic_words(middle)} over rows, then median")
    band = "smallest to largest head"
    if low and high and len(taken) == 1:
        band = (
            f"{_statistic_words(low)} to {_statistic_words(high)} over rows, each as the median "
            "over heads"
        )
    elif len(taken) > 1:
        return "Line: median over the heads of a layer. Band: smallest to largest. Dots: heads."
    dots = " Dots: single heads." if len(series) <= MOST_DOTTED else ""
    return f"Line: {line} over the heads of a layer. Band: {band}.{dots}"


def _statistic_words(statistic: str) -> str:
    return re.sub(r"^q(\d+)$", r"\1 % quantile", statistic)


def _series(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by_base: dict[str, dict[str, str]] = {}
    for metric in metrics:
        by_base.setdefault(metric["base"], {})[metric["statistic"]] = metric["name"]
    whole = {metric["name"] for metric in metrics if not metric["values"]}
    series = []
    for base, own in by_base.items():
        partner = _partner(base, by_base)
        if partner == base:
            continue
        other = by_base.get(partner, own)
        middle = next((s for s in _MIDDLES if s in own), next(iter(own)))
        low, high = _ends(own)
        series.append(
            {
                "label": _series_label(base, own[middle]),
                "is_whole": own[middle] in whole,
                "style": _style(base),
                "middle": own[middle],
                "middle_upper": other.get(middle) if other is not own else None,
                "low": own.get(low) if low else None,
                "high": other.get(high) if high else None,
                "taken": {"middle": middle, "low": low, "high": high},
            }
        )
    return series


def _series_label(base: str, metric: str) -> str:
    """What sets a series apart in its figure: the matrix, or the quantity itself."""
    quantity = quantity_of(metric)
    known = {*quantity.key.split(), *_OPPOSITE, *_OPPOSITE.values(), "fused", "jacobian"}
    rest = [word for word in base.split("_") if word not in known]
    if quantity.family == "jacobian" or not rest:
        return quantity.label
    return _MATRICES.get(rest[0], " ".join(rest)) if len(rest) == 1 else " ".join(rest)


def _partner(base: str, bases: Mapping[str, Any]) -> str:
    """The upper end that belongs to a lower one; the base itself where it is an upper end."""
    words = base.split("_")
    for lower, upper in _OPPOSITE.items():
        up = "_".join(upper if word == lower else word for word in words)
        down = "_".join(lower if word == upper else word for word in words)
        if up != base and up in bases:
            return up
        if down != base and down in bases:
            return base
    return ""


def _ends(statistics: Mapping[str, str]) -> tuple[str, str]:
    quantiles = sorted((int(s[1:]), s) for s in statistics if re.fullmatch(r"q\d+", s))
    if len(quantiles) > 1:
        return quantiles[0][1], quantiles[-1][1]
    return ("min" if "min" in statistics else ""), ("max" if "max" in statistics else "")


def _style(base: str) -> str:
    """Solid is measured; a bound is dashed and the surrogate dotted, and both are named."""
    words = base.split("_")
    if "surrogate" in words:
        return "surrogate"
    return "bound" if "bound" in words else "measured"


def section(name: str, title: str, intro: str, figures: list[Any]) -> dict[str, Any]:
    """Put figures under a heading.

    Args:
        name: Of the section in the page.
        title: Its heading.
        intro: A sentence under it, or "".
        figures: What it shows.

    Returns:
        The section.
    """
    return {"id": name, "title": title, "nav": title, "intro": intro, "figures": figures,
            "constants": [], "judged": [], "reading": []}  # fmt: skip

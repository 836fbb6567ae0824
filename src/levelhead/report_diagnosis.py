"""A diagnosis laid out as a page: verdict and findings first, then heads, depth, curves, tables."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from levelhead.report_curves import curve_figure
from levelhead.report_metrics import FAMILIES, Quantity, quantity_of, split_statistic

WHOLE_LAYER = -1  # the head of a number that belongs to a whole layer
_SEVERITIES = ("severe", "warning", "note")
_MIDDLES = ("q50", "median", "mean", "", "max", "min")  # what a line shows, the best first
_OPPOSITE = {"lower": "upper", "low": "high", "lo": "hi"}
_FIRST_LOOK = ("entropy_nats_q50", "entropy_nats_mean", "p_max_q50", "p_max_mean")

OVER_DEPTH = (
    "Line: median over the heads of each layer (or the layer's own number). Band: from the lowest "
    "to the highest quantile over the rows where there are some, each as the median over heads; "
    "otherwise from the smallest to the largest head. Dots: single heads."
)


class Diagnosed(Protocol):
    """What the page needs of a ``Diagnosis``."""

    records: Sequence[Any]
    findings: Sequence[Any]
    verdict: str
    meta: Mapping[str, Any]
    curves: Mapping[str, Sequence[tuple[int, float]]]


def diagnosis_page(diagnosis: Diagnosed) -> dict[str, Any]:
    """Lay a diagnosis out.

    Args:
        diagnosis: Numbers, findings, verdict; any part may be empty.

    Returns:
        What ``report_render.render_page`` draws.
    """
    layers = _layers(diagnosis)
    metrics = _metrics(diagnosis.records, layers)
    heads = {
        "layers": layers,
        "num_heads": max((len(m["values"][0]) for m in metrics if m["values"]), default=0),
        "metrics": metrics,
        "findings": _marks(diagnosis.findings, layers),
        "families": FAMILIES,
    }
    sections = [
        _heads_section(heads, diagnosis.findings),
        *_depth_sections(metrics),
        _curves_section(diagnosis.curves),
        _table_section(heads),
    ]
    sections = [section for section in sections if section["figures"]]
    model = str(diagnosis.meta.get("model", "") or "model")
    return {
        "kind": "diagnosis",
        "title": model,
        "subtitle": "Attention diagnosis",
        "verdict": diagnosis.verdict,
        "severity": _worst(diagnosis.findings),
        "tiles": _tiles(diagnosis, heads),
        "findings": [_finding(finding, layers) for finding in diagnosis.findings],
        "not_measured": [str(reason) for reason in diagnosis.meta.get("not_measured") or []],
        "readings": [],
        "sections": sections,
        "meta": flat_meta(diagnosis.meta, without=("not_measured",)),
        "figures": {
            "heads": heads,
            "figures": [figure for section in sections for figure in section["figures"]],
        },
    }


def flat_meta(
    meta: Mapping[str, Any], prefix: str = "", without: Sequence[str] = ()
) -> list[tuple[str, str]]:
    """Write nested values as lines.

    Args:
        meta: Names to values, mappings among them.
        prefix: Put before each name.
        without: Names at this level to leave out.

    Returns:
        (name, text) pairs; a nested name carries its parents'.
    """
    lines: list[tuple[str, str]] = []
    for key, value in meta.items():
        name = f"{prefix}{key}".replace("_", " ")
        if key in without or value in (None, "", [], {}):
            continue
        if isinstance(value, Mapping):
            lines += flat_meta(value, prefix=f"{name} / ")
        elif isinstance(value, (list, tuple)):
            lines.append((name, ", ".join(map(str, value))))
        else:
            lines.append((name, str(value)))
    return lines


def short_names(names: Sequence[str]) -> list[str]:
    """Leave out what all names share, so that an axis has room for the rest.

    Args:
        names: Dotted module names, all different.

    Returns:
        For example ``["0", "1"]`` for ``["blocks.0.attn", "blocks.1.attn"]``.
    """
    parts = [name.split(".") for name in names]
    if len(names) < 2 or len({len(part) for part in parts}) > 1:
        return list(names)
    differing = [place for place in range(len(parts[0])) if len({p[place] for p in parts}) > 1]
    return [".".join(part[place] for place in differing) for part in parts]


def _layers(diagnosis: Diagnosed) -> list[dict[str, Any]]:
    positions = {record.layer: record.layer_idx for record in diagnosis.records}
    names = sorted(positions, key=lambda name: positions[name])
    found = [finding.layer for finding in diagnosis.findings if finding.layer]
    names = list(dict.fromkeys([*names, *found]))
    return [
        {"name": name, "short": short, "idx": positions.get(name, place)}
        for place, (name, short) in enumerate(zip(names, short_names(names), strict=True))
    ]


def _metrics(records: Sequence[Any], layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    place = {layer["name"]: number for number, layer in enumerate(layers)}
    by_name: dict[str, list[Any]] = {}
    for record in records:
        by_name.setdefault(record.metric, []).append(record)
    laid_out = [_metric(name, own, place) for name, own in by_name.items()]
    order = list(FAMILIES)
    return sorted(laid_out, key=lambda metric: order.index(metric["family"]))


def _metric(name: str, records: list[Any], place: Mapping[str, int]) -> dict[str, Any]:
    num_heads = 1 + max(record.head for record in records)
    values: list[list[float | None]] = [[None] * num_heads for _ in place]
    whole: list[float | None] = [None] * len(place)
    for record in records:
        if record.head == WHOLE_LAYER:
            whole[place[record.layer]] = float(record.value)
        else:
            values[place[record.layer]][record.head] = float(record.value)
    quantity, (base, statistic) = quantity_of(name), split_statistic(name)
    return {
        "name": name,
        "base": base,
        "statistic": statistic,
        "label": _label(name, statistic, quantity),
        "family": quantity.family,
        "quantity": quantity.key,
        "equation": quantity.equation,
        "words": quantity.words,
        "log": quantity.is_log,
        "conventions": list(dict.fromkeys(r.convention for r in records if r.convention)),
        "values": values if num_heads else [],
        "whole": whole if any(value is not None for value in whole) else None,
    }


def _label(name: str, statistic: str, quantity: Quantity) -> str:
    if not quantity.words:
        return name
    base = split_statistic(name)[0]
    rest = [word for word in base.split("_") if word not in quantity.key.split()]
    taken = {"": "", "q50": "median"}.get(statistic, statistic)
    taken = re.sub(r"^q(\d+)$", r"\1 % quantile", taken)
    extra = ", ".join(text for text in (" ".join(rest), taken) if text)
    return f"{quantity.label}: {extra}" if extra else quantity.label


def _marks(findings: Sequence[Any], layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    place = {layer["name"]: number for number, layer in enumerate(layers)}
    return [
        {
            "layer": place[finding.layer],
            "head": finding.head,
            "severity": finding.severity,
            "metric": finding.metric,
            "text": finding.meaning,
        }
        for finding in findings
        if finding.layer in place
    ]


def _finding(finding: Any, layers: list[dict[str, Any]]) -> dict[str, Any]:
    place = {layer["name"]: number for number, layer in enumerate(layers)}
    where = finding.layer or "the whole model"
    return {
        "severity": finding.severity,
        "kind": str(getattr(finding, "kind", "")).replace("_", " "),
        "where": where if finding.head == WHOLE_LAYER else f"{where}, head {finding.head}",
        "layer": place.get(finding.layer, -1),
        "head": finding.head,
        "num_heads": getattr(finding, "num_heads", 1),
        "metric": finding.metric,
        "value": float(finding.value),
        "threshold": float(finding.threshold),
        "source": finding.source,
        "meaning": finding.meaning,
        "advice": finding.advice,
    }


def _worst(findings: Sequence[Any]) -> str:
    found = {finding.severity for finding in findings}
    return next((severity for severity in _SEVERITIES if severity in found), "healthy")


def _tiles(diagnosis: Diagnosed, heads: Mapping[str, Any]) -> list[tuple[str, str]]:
    counts = [
        (severity if severity == "severe" else f"{severity}s", severity)
        for severity in _SEVERITIES
    ]
    tiles = [
        (label, str(sum(f.severity == severity for f in diagnosis.findings)))
        for label, severity in counts
    ]
    tiles += [("layers", str(len(heads["layers"]))), ("heads a layer", str(heads["num_heads"]))]
    tokens = diagnosis.meta.get("num_tokens", diagnosis.meta.get("tokens"))
    return [*tiles, ("tokens", f"{tokens:,}")] if isinstance(tokens, int) else tiles


def _heads_section(heads: dict[str, Any], findings: Sequence[Any]) -> dict[str, Any]:
    by_head = [m["name"] for m in heads["metrics"] if m["values"]]
    wanted = [f.metric for f in findings if f.severity == "severe" and f.head != WHOLE_LAYER]
    first = next((name for name in [*wanted, *_FIRST_LOOK, *by_head] if name in by_head), None)
    figure = {"id": "heads", "kind": "heads", "title": "Every head at a glance",
              "words": [], "first": first}  # fmt: skip
    intro = (
        "A row is a layer, a column is a head. Hover or move with the arrow keys for the number; "
        "click, tap or press Enter to see everything about a head."
    )
    return _section("heads-map", "Layers and heads", intro, [figure] if first else [])


def _depth_sections(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    sections = []
    for family, heading in FAMILIES.items():
        groups: dict[str, list[dict[str, Any]]] = {}
        for metric in metrics:
            if metric["family"] == family:
                groups.setdefault(_group(metric), []).append(metric)
        figures = [_depth_figure(family, name, own) for name, own in groups.items()]
        sections.append(_section(f"depth-{family}", f"{heading} over depth", "", figures))
    return sections


def _group(metric: Mapping[str, Any]) -> str:
    """Which figure over depth a metric belongs to: kappa(J) stands beside what is said of it."""
    if metric["family"] == "jacobian":
        return "jacobian"
    return metric["quantity"] + (" fused" if metric["base"].endswith("_fused") else "")


def _depth_figure(family: str, name: str, metrics: list[dict[str, Any]]) -> dict[str, Any]:
    quantities = {metric["quantity"]: metric for metric in metrics}
    title = "kappa(J)" if family == "jacobian" else quantity_of(metrics[0]["name"]).label
    return {
        "id": f"depth-{family}-{re.sub('[^a-z0-9]+', '-', name.lower())}",
        "kind": "depth",
        "title": f"{title}, whole matrices" if name.endswith(" fused") else title,
        "words": [m["words"] for m in quantities.values() if m["words"]],
        "equations": [
            (quantity_of(m["name"]).label, m["equation"])
            for m in quantities.values()
            if m["equation"]
        ],
        "conventions": [OVER_DEPTH],
        "details": [(m["name"], "; ".join(m["conventions"])) for m in metrics if m["conventions"]],
        "log": any(metric["log"] for metric in metrics),
        "series": _series(metrics),
    }


def _series(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by_base: dict[str, dict[str, str]] = {}
    for metric in metrics:
        by_base.setdefault(metric["base"], {})[metric["statistic"]] = metric["name"]
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
                "label": base.replace("_", " "),
                "style": _style(base),
                "middle": own[middle],
                "middle_upper": other.get(middle) if other is not own else None,
                "low": own.get(low) if low else None,
                "high": other.get(high) if high else None,
                "taken": {"middle": middle, "low": low, "high": high},
            }
        )
    return series


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


def _curves_section(curves: Mapping[str, Sequence[tuple[int, float]]]) -> dict[str, Any]:
    figures = [
        curve_figure(f"curve-{number}", name, {"": list(curve)})
        for number, (name, curve) in enumerate(curves.items())
    ]
    return _section("curves", "Over training", "", figures)


def _table_section(heads: Mapping[str, Any]) -> dict[str, Any]:
    figure = {"id": "numbers", "kind": "numbers", "title": "Every number", "words": []}
    intro = "Sort by a heading; the CSV holds all columns, unrounded conventions included."
    return _section("tables", "Tables", intro, [figure] if heads["metrics"] else [])


def _section(name: str, title: str, intro: str, figures: list[Any]) -> dict[str, Any]:
    return {"id": name, "title": title, "intro": intro, "figures": figures}

"""A diagnosis laid out as a page: verdict, findings, heads, depth, curves, tables."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from levelhead.report_curves import curve_figure
from levelhead.report_depth import depth_sections, section
from levelhead.report_layers import lay_out_layers
from levelhead.report_metrics import FAMILIES, Quantity, quantity_of, split_statistic

WHOLE_LAYER = -1  # the head of a number that belongs to a whole layer
_SEVERITIES = ("severe", "warning", "note")
_URGENT = ("severe", "warning")
_FIRST_LOOK = ("entropy_nats_q50", "entropy_nats_mean", "p_max_q50", "p_max_mean")


class Diagnosed(Protocol):
    """What the page needs of a ``Diagnosis``."""

    verdict: str

    @property
    def records(self) -> Sequence[Any]: ...
    @property
    def findings(self) -> Sequence[Any]: ...
    @property
    def meta(self) -> Mapping[str, Any]: ...
    @property
    def curves(self) -> Mapping[str, Sequence[tuple[int, float]]]: ...


def diagnosis_page(diagnosis: Diagnosed) -> dict[str, Any]:
    """Lay a diagnosis out.

    Args:
        diagnosis: Numbers, findings, verdict; any part may be empty.

    Returns:
        What ``report_render.render_page`` draws.
    """
    laid_out = _layers(diagnosis)
    layers = laid_out["layers"]
    metrics = _metrics([record for record in diagnosis.records if record.layer], layers)
    of_model = [
        (record.metric, float(record.value), record.convention)
        for record in diagnosis.records
        if not record.layer
    ]
    heads = {
        **laid_out,
        "num_heads": max((len(m["values"][0]) for m in metrics if m["values"]), default=0),
        "metrics": metrics,
        "findings": _marks(diagnosis.findings, layers),
        "families": FAMILIES,
        "of_model": of_model,
    }
    sections = [
        _heads_section(heads, diagnosis.findings),
        *depth_sections(metrics),
        _curves_section(diagnosis.curves),
        _table_section(heads),
    ]
    sections = [part for part in sections if part["figures"] or part["constants"]]
    model = str(diagnosis.meta.get("model", "") or "model")
    return {
        "kind": "diagnosis",
        "title": model,
        "subtitle": "Attention diagnosis",
        "verdict": diagnosis.verdict,
        "severity": _worst(diagnosis.findings),
        "tiles": _tiles(diagnosis, heads),
        "findings": _cards(diagnosis.findings, layers),
        "not_measured": [str(reason) for reason in diagnosis.meta.get("not_measured") or []],
        "sections": sections,
        "meta": flat_meta(diagnosis.meta, without=("not_measured",))
        + [
            (f"{name.replace('_', ' ')} (whole model)", f"{value:.6g}")
            for name, value, _ in of_model
        ],
        "figures": {
            "heads": heads,
            "figures": [figure for part in sections for figure in part["figures"]],
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
        if (
            isinstance(value, Mapping)
            and len(value) > 1
            and len(set(map(str, value.values()))) == 1
        ):
            lines.append((name, f"{next(iter(value.values()))} (all {len(value)})"))
        elif isinstance(value, Mapping) and prefix and not any(map(_is_nested, value.values())):
            text = ", ".join(f"{str(k).replace('_', ' ')} {v}" for k, v in value.items())
            lines.append((name, text))
        elif isinstance(value, Mapping):
            lines += flat_meta(value, prefix=f"{name} / ")
        elif isinstance(value, (list, tuple)) and all(isinstance(v, Mapping) for v in value):
            for number, item in enumerate(value, 1):
                which = f"{name} {number}" if len(value) > 1 else name
                lines += flat_meta(item, prefix=f"{which} / ")
        elif isinstance(value, (list, tuple)):
            lines.append((name, ", ".join(map(str, value))))
        else:
            lines.append((name, str(value)))
    return lines


def _is_nested(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple)


def _layers(diagnosis: Diagnosed) -> dict[str, Any]:
    positions = {r.layer: r.layer_idx for r in diagnosis.records if r.layer}
    names = sorted(positions, key=lambda name: positions[name])
    found = [finding.layer for finding in diagnosis.findings if finding.layer]
    names = list(dict.fromkeys([*names, *found]))
    return lay_out_layers(names, [positions.get(name, n) for n, name in enumerate(names)])


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
            "value": float(finding.value),
            "threshold": float(finding.threshold),
            "text": finding.meaning,
        }
        for finding in findings
        if finding.layer in place
    ]


def _cards(findings: Sequence[Any], layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One card for all places at which the same is wrong: the first in full, then the others."""
    cards: dict[tuple[str, ...], dict[str, Any]] = {}
    for finding in findings:
        kind = str(getattr(finding, "kind", "")).replace("_", " ")
        key = (finding.severity, kind, finding.metric, finding.meaning)
        if key in cards:
            cards[key]["others"].append(_place(finding, layers))
            continue
        cards[key] = _place(finding, layers) | {
            "severity": finding.severity,
            "kind": kind,
            "threshold": float(finding.threshold),
            "source": finding.source,
            "meaning": finding.meaning,
            "advice": finding.advice,
            "others": [],
        }
    return list(cards.values())


def _place(finding: Any, layers: list[dict[str, Any]]) -> dict[str, Any]:
    place = {layer["name"]: number for number, layer in enumerate(layers)}
    where = finding.layer or "the whole model"
    return {
        "where": where if finding.head == WHOLE_LAYER else f"{where}, head {finding.head}",
        "layer": place.get(finding.layer, -1),
        "head": finding.head,
        "num_heads": getattr(finding, "num_heads", 1),
        "metric": finding.metric,
        "value": float(finding.value),
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
    told = [f for f in findings if f.severity in _URGENT and f.metric in by_head]
    wanted = [f.metric for f in told]
    first = next((name for name in [*wanted, *_FIRST_LOOK, *by_head] if name in by_head), None)
    places = {layer["name"]: number for number, layer in enumerate(heads["layers"])}
    figure = {"id": "heads", "kind": "heads", "title": "Every head at a glance", "words": [],
              "first": first, "start": _start(told[:1], places)}  # fmt: skip
    intro = (
        "A row is a layer, a column is a head. Hover or move with the arrow keys for the number; "
        "click, tap or press Enter to see everything about a head."
    )
    return section("heads-map", "Layers and heads", intro, [figure] if first else [])


def _start(told: Sequence[Any], places: Mapping[str, int]) -> list[int] | None:
    """The head that the page opens with: that of the first finding, the first of a layer's."""
    return next(([places[f.layer], max(f.head, 0)] for f in told if f.layer in places), None)


def _curves_section(curves: Mapping[str, Sequence[tuple[int, float]]]) -> dict[str, Any]:
    figures = [
        curve_figure(f"curve-{number}", name, {"": list(curve)})
        for number, (name, curve) in enumerate(curves.items())
    ]
    return section("curves", "Over training", "", figures)


def _table_section(heads: Mapping[str, Any]) -> dict[str, Any]:
    figure = {"id": "numbers", "kind": "numbers", "title": "Every number", "words": []}
    intro = "Sort by a heading, filter by a word, take what you see as CSV."
    return section("tables", "Tables", intro, [figure] if heads["metrics"] else [])

"""What a monitor wrote beside a training, as figures over its steps."""

import json
from pathlib import Path
from typing import Any

from levelhead.report_curves import curve_figure
from levelhead.report_depth import section

MONITOR = "monitor.jsonl"
MAX = "max"

Curves = dict[str, dict[str, list[tuple[int, float]]]]


def read_monitor(folder: Path) -> Curves:
    """Read the largest head of every layer from a monitor's file; a torn last line is left out.

    Args:
        folder: That may hold ``monitor.jsonl``.

    Returns:
        Metric to layer to (step, value) pairs; empty where nothing was watched.
    """
    path = folder / MONITOR
    curves: Curves = {}
    lines = path.read_bytes().rpartition(b"\n")[0].splitlines() if path.exists() else []
    for line in lines:
        event = json.loads(line)
        for name, value in (event.get("values") or {}).items():
            kind, _, rest = name.partition("/")
            layer, _, end = rest.partition("/")
            which, _, metric = end.partition("/")
            if kind == "attn" and which == MAX and isinstance(value, int | float):
                of_layer = curves.setdefault(metric, {}).setdefault(layer, [])
                of_layer.append((event["step"] + 1, value))
    return curves


def monitor_section(curves: Curves) -> dict[str, Any]:
    """Lay the curves out, a figure for each metric.

    Args:
        curves: As ``read_monitor`` returned them, not empty.

    Returns:
        A section of the page.
    """
    figures = [
        curve_figure(f"monitor-{number}", f"{metric}, largest head", layers)
        for number, (metric, layers) in enumerate(curves.items())
    ]
    intro = "Measured while it trained; one line for each layer, its largest head."
    return section("monitor", "Attention while training", intro, figures)

"""From plain data to one HTML file: the template, the escaping, nothing from the network.

Charts are inline SVG that a page's own script draws. A plotting library would be more than the
whole page allows a phone to load (plotly.min.js: about 4.5 MB) and brings its own ideas of colour,
keyboard and dark mode; the charts of a report are five kinds. So the page stays near 100 kB plus
its numbers.
"""

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

_SCRIPTS = (
    "dom.js", "colour.js", "axes.js", "chart.js", "heads.js", "depth.js", "lines.js",
    "intervals.js", "table.js", "main.js",
)  # fmt: skip
_DIGITS = 9  # significant, in the page's numbers: tables and CSV show them all

# Inside <script>, "</script>" and "<!--" end or change the element wherever they stand.
_UNSAFE = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&"}


def render_page(page: Mapping[str, Any]) -> str:
    """Fill the template.

    Args:
        page: What ``report_diagnosis`` or ``report_runs`` lays out: title, verdict, findings,
            sections of figures, notes.

    Returns:
        A whole HTML document; every name in it is escaped.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(_asset("page.html.jinja"))
    script = "".join(_asset(name) for name in _SCRIPTS)
    style = _asset("page.css")
    html = template.render(
        page=page,
        data=script_json(page["figures"]),
        script=script,
        style=style,
        script_hash=_hash(script),
        style_hash=_hash(style),
        number=short_number,
    )
    return html.encode("utf-8", "replace").decode()  # half a surrogate pair has no bytes


def script_json(value: Any) -> str:
    """Write JSON that may stand inside ``<script type="application/json">``.

    Args:
        value: Mappings, sequences, numbers, texts, None; inf and NaN become text.

    Returns:
        ASCII without ``<``, ``>`` and ``&``: no name can end the element.
    """
    text = json.dumps(_plain(value), allow_nan=False, separators=(",", ":"))
    return text.translate(_UNSAFE)


def short_number(value: float) -> str:
    """Write a number for a sentence.

    Args:
        value: Any float.

    Returns:
        Four significant digits, whole thousands in full; ``inf`` and ``NaN`` in words.
    """
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "infinite" if value > 0 else "minus infinite"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e6 else f"{value:.4g}"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return _rounded(value)
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def _rounded(value: float) -> float | int | str:
    if not math.isfinite(value):
        return str(float(value))  # "inf", "-inf", "nan"
    short = float(f"{value:.{_DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 1e9 else short


@cache
def _asset(name: str) -> str:
    return (files("levelhead") / "report_page" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

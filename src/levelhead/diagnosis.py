"""What a diagnosis holds: numbers by layer and head, findings, a verdict. Plain data."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from levelhead.shapes import require

if TYPE_CHECKING:
    import pandas

WHOLE_LAYER = -1
"""The head of a number that belongs to a whole layer."""

FORMAT = "levelhead diagnosis 1"

Severity = Literal["severe", "warning", "note"]


@dataclass(frozen=True)
class Record:
    """One number.

    Attributes:
        layer: The site's name.
        layer_idx: Its position in the model, from 0.
        head: Which head; ``WHOLE_LAYER`` for a number of the whole layer.
        metric: Quantity with its unit, then what was taken over the rows: "entropy_nats_q50".
        value: May be inf or NaN; NaN means that it was tried and has no value.
        convention: How it was taken, in words.
    """

    layer: str
    layer_idx: int
    head: int
    metric: str
    value: float
    convention: str


@dataclass(frozen=True)
class Finding:
    """One thing that is unhealthy, or that a reader should know.

    Attributes:
        kind: Name in the table of thresholds ("saturated_softmax").
        severity: "severe" (training or inference is at risk), "warning", or "note".
        layer: The site's name, or "" for the whole model.
        head: Which head, ``WHOLE_LAYER`` for the layer.
        metric: The number's name.
        value: The number.
        threshold: What it was compared with.
        source: Where the threshold comes from.
        meaning: What it means.
        advice: What to try.
        num_heads: How many heads of this layer have it; this is the worst of them.
    """

    kind: str
    severity: Severity
    layer: str
    head: int
    metric: str
    value: float
    threshold: float
    source: str
    meaning: str
    advice: str
    num_heads: int = 1

    @property
    def where(self) -> str:
        """Layer and head in words."""
        if not self.layer:
            return "the model"
        return self.layer if self.head == WHOLE_LAYER else f"{self.layer}, head {self.head}"


@dataclass
class Diagnosis:
    """How healthy the attention of a model is, on the batch it was shown.

    Attributes:
        records: Every number.
        findings: The most severe first.
        verdict: One sentence.
        meta: Model, versions, tokens, sampled queries, back ends, scale of each layer, what could
            not be measured and why.
        curves: Name to (step, value), where the model comes from a run that has some.
    """

    records: list[Record]
    findings: list[Finding]
    verdict: str
    meta: dict[str, Any]
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)

    @property
    def is_severe(self) -> bool:
        """Whether any finding is severe."""
        return any(finding.severity == "severe" for finding in self.findings)

    def frame(self) -> "pandas.DataFrame":
        """Return the numbers in long form.

        Returns:
            Columns layer, layer_idx, head (-1 for a whole layer), metric, value, convention.

        Raises:
            ImportError: pandas is missing.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError("a frame needs pandas: pip install 'levelhead[report]'") from error

        names = [column.name for column in fields(Record)]
        return pandas.DataFrame([asdict(record) for record in self.records], columns=names)

    def value(self, metric: str, layer: str | int, head: int = WHOLE_LAYER) -> float:
        """Return one number.

        Args:
            metric: Its name.
            layer: The site's name or its position.
            head: Which head; the whole layer by default.

        Returns:
            The number.

        Raises:
            ValueError: There is no such number.
        """
        for record in self.records:
            at_layer = layer in (record.layer, record.layer_idx)
            if at_layer and record.head == head and record.metric == metric:
                return record.value
        known = sorted({record.metric for record in self.records})
        raise ValueError(
            f"no {metric!r} of layer {layer!r}, head {head}; metrics: {', '.join(known)}"
        )

    def summary(self) -> dict[str, Any]:
        """Return what a script wants to know.

        Returns:
            JSON values: verdict, findings, meta, and for each layer and metric the smallest,
            middle and largest number over its heads; "inf", "-inf" and "nan" stand as text.
        """
        layers: dict[str, dict[str, list[float]]] = {}
        for record in self.records:
            layers.setdefault(record.layer, {}).setdefault(record.metric, []).append(record.value)
        ranges = {
            layer: {metric: _range(values) for metric, values in metrics.items()}
            for layer, metrics in layers.items()
        }
        found = [asdict(finding) for finding in self.findings]
        return as_json(
            {"verdict": self.verdict, "findings": found, "layers": ranges, "meta": self.meta}
        )

    def to_json(self, path: str | Path) -> None:
        """Write everything into one JSON file.

        Args:
            path: The file.
        """
        content = {"format": FORMAT, **asdict(self)}
        Path(path).write_text(json.dumps(as_json(content), allow_nan=False) + "\n")

    @classmethod
    def from_json(cls, path: str | Path) -> "Diagnosis":
        """Read what ``to_json`` wrote.

        Args:
            path: The file.

        Returns:
            The same diagnosis.
        """
        try:
            content = json.loads(Path(path).read_text())
        except ValueError:
            content = None
        is_ours = isinstance(content, dict) and content.get("format") == FORMAT
        require(is_ours, f"{path} must be a diagnosis", "something else", "Diagnosis.to_json")
        assert isinstance(content, dict)
        return cls(
            records=[Record(**_with_floats(record, "value")) for record in content["records"]],
            findings=[
                Finding(**_with_floats(finding, "value", "threshold"))
                for finding in content["findings"]
            ],
            verdict=content["verdict"],
            meta=content["meta"],
            curves={
                name: [(int(step), float(value)) for step, value in curve]
                for name, curve in content["curves"].items()
            },
        )

    def to_html(self, path: str | Path) -> None:
        """Write the report: one HTML file that needs nothing else.

        Args:
            path: The file.
        """
        from levelhead.report import write_html

        write_html(self, path)

    def __str__(self) -> str:
        lines = [self.verdict]
        for finding in self.findings:
            number = f"{finding.metric} = {finding.value:.4g} (threshold {finding.threshold:.4g})"
            lines.append(f"  {finding.severity}: {finding.where}: {number}: {finding.meaning}")
            lines.append(f"    try: {finding.advice}")
        for reason in self.meta.get("not_measured", []):
            lines.append(f"  not measured: {reason}")
        return "\n".join(lines)


def as_json(value: Any) -> Any:
    """Turn a value into strict JSON values.

    Args:
        value: Mappings, sequences, numbers, texts, None.

    Returns:
        The same; "inf", "-inf" and "nan" for those numbers.
    """
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _with_floats(content: dict[str, Any], *names: str) -> dict[str, Any]:
    return content | {name: float(content[name]) for name in names}


def _range(values: list[float]) -> dict[str, float]:
    known = sorted(value for value in values if not math.isnan(value))
    if not known:
        return dict.fromkeys(("min", "median", "max"), math.nan)
    middle = len(known) // 2
    median = known[middle] if len(known) % 2 else (known[middle - 1] + known[middle]) / 2
    return {"min": known[0], "median": median, "max": known[-1]}

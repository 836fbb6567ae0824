"""When a monitor speaks up: spikes, values that are not finite, divergence, unhealthy layers."""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from levelhead.diagnosis import WHOLE_LAYER, Finding, Record
from levelhead.findings import judge
from levelhead.measure.curves import divergence_step, find_spikes
from levelhead.monitor_sites import Broken, Statistics

HISTORY = 500
"""Steps that set the threshold of a spike: the stretch of Bae et al. 2026, Table 5."""
ENOUGH = 32
"""Fewer values say too little about what is usual."""
JUDGED = {"score_max": "score_max_max", "normalized_entropy": "normalized_entropy_mean"}
"""Metrics of a step that the table of findings knows."""


@dataclass(frozen=True)
class Alert:
    """One thing that happened.

    Attributes:
        step: When.
        kind: "nonfinite_loss", "nonfinite_attention", "spike", "divergence", or a finding's kind.
        text: One sentence.
        layer: The site's name, or "".
        head: Which head; -1 for none.
        value: The number.
        healthy_step: The last measured step whose statistics were all finite, or None.
    """

    step: int
    kind: str
    text: str
    layer: str = ""
    head: int = WHOLE_LAYER
    value: float = math.nan
    healthy_step: int | None = None


@dataclass
class Watch:
    """Keeps the history of a run and judges each step.

    Attributes:
        curves: "loss" and "grad_norm" of the last steps.
        healthy: Step and statistics of the last measured step that was finite.
        told: What was said already of a state that lasts.
    """

    curves: dict[str, deque[float]] = field(
        default_factory=lambda: {name: deque(maxlen=HISTORY) for name in ("loss", "grad_norm")}
    )
    healthy: tuple[int, Statistics] | None = None
    told: set[str] = field(default_factory=set)

    def of_curves(self, step: int, values: Mapping[str, float]) -> Iterator[Alert]:
        """Judge the raw loss and gradient norm of a step, and remember them.

        Args:
            step: Which.
            values: "loss" and "grad_norm", those that are known.

        Yields:
            Alerts.
        """
        for name, value in values.items():
            before = self.curves[name]
            since = None if self.healthy is None else self.healthy[0]
            if not math.isfinite(value):
                if self._is_new(f"nonfinite {name}"):
                    text = f"{name} is {value} at step {step}; the next forward is measured"
                    yield Alert(step, f"nonfinite_{name}", text, value=value, healthy_step=since)
            elif len(before) >= ENOUGH and is_spike(value, before):
                text = f"{name} spikes to {value:.4g} at step {step}"
                yield Alert(step, "spike", text, value=value, healthy_step=since)
            before.append(value)

    def of_divergence(self, step: int) -> Iterator[Alert]:
        """Say once that the loss is lost for good.

        Args:
            step: The last step.

        Yields:
            An alert, or nothing.
        """
        losses = list(self.curves["loss"])
        if len(losses) < ENOUGH:
            return
        lost = divergence_step(losses)
        if lost is not None and self._is_new("divergence"):
            first = step - len(losses) + 1 + lost
            since = None if self.healthy is None else self.healthy[0]
            text = f"the loss is lost since step {first}"
            yield Alert(step, "divergence", text, value=losses[-1], healthy_step=since)

    def of_attention(
        self,
        step: int,
        statistics: Statistics,
        raw_share: Mapping[str, Sequence[float]],
        broken: Broken | None,
    ) -> Iterator[Alert]:
        """Judge a measured step.

        Args:
            step: Which.
            statistics: One number a head.
            raw_share: Largest dot product over the largest number of its dtype.
            broken: The first place where numbers stopped being finite, or None.

        Yields:
            Alerts: the first place that broke, then findings that are new.
        """
        since = None if self.healthy is None else self.healthy[0]
        if broken is not None:
            first = broken
            head = f", head {first.head}" if first.head != WHOLE_LAYER else ""
            last = "none" if since is None else f"step {since}: {self._last_words(first)}"
            text = f"not finite first in {first.layer}{head} at step {step}; last healthy {last}"
            if self._is_new("nonfinite attention"):
                yield Alert(step, "nonfinite_attention", text, first.layer, first.head,
                            healthy_step=since)  # fmt: skip
            return
        self.healthy = (step, statistics)
        self.told.discard("nonfinite attention")
        findings = judge(_records(statistics, raw_share))
        for finding in findings:
            if finding.severity != "note" and self._is_new(_lasting(finding)):
                number = f"{finding.metric} = {finding.value:.4g}"
                text = f"{finding.where}: {number}: {finding.meaning}"
                yield Alert(
                    step, finding.kind, text, finding.layer, finding.head, finding.value, step
                )
        now = {_lasting(finding) for finding in findings}
        self.told = {key for key in self.told if not key.startswith("finding") or key in now}

    def _last_words(self, broken: Broken) -> str:
        """The last healthy numbers of a head."""
        assert self.healthy is not None
        metrics = self.healthy[1].get(broken.layer, {})
        head = max(broken.head, 0)
        return ", ".join(f"{metric} {values[head]:.4g}" for metric, values in metrics.items())

    def _is_new(self, key: str) -> bool:
        is_new = key not in self.told
        self.told.add(key)
        return is_new

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {
            "curves": {name: list(values) for name, values in self.curves.items()},
            "healthy": self.healthy,
            "told": sorted(self.told),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint.

        Args:
            state: As ``state_dict`` returned it.
        """
        self.curves = {n: deque(v, maxlen=HISTORY) for n, v in state["curves"].items()}
        self.healthy = None if state["healthy"] is None else tuple(state["healthy"])
        self.told = set(state["told"])


def is_spike(value: float, before: Iterable[float]) -> bool:
    """Whether a value is a spike of the curve before it.

    Args:
        value: Finite.
        before: Earlier values.

    Returns:
        True above median + 6 MAD; False after a flat stretch.
    """
    spikes = find_spikes(list(before))
    values = [other for other in before if math.isfinite(other)]
    return bool(values) and max(values) > min(values) and value > spikes.threshold


def as_event(alert: Alert) -> dict[str, Any]:
    """Return an alert as a line of a log.

    Args:
        alert: The alert.

    Returns:
        Plain values.
    """
    return {"event": "alert", **asdict(alert)}


def _lasting(finding: Finding) -> str:
    return f"finding {finding.kind} {finding.severity} {finding.layer}"


def _records(statistics: Statistics, raw_share: Mapping[str, Sequence[float]]) -> Iterator[Record]:
    for idx, (layer, metrics) in enumerate(statistics.items()):
        known = {name: metrics[metric] for metric, name in JUDGED.items() if metric in metrics}
        for name, values in {**known, "overflow_frac": raw_share[layer]}.items():
            for head, value in enumerate(values):
                yield Record(layer, idx, head, name, float(value), "")

"""When a monitor speaks up: spikes, values that are not finite, divergence, unhealthy layers."""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from levelhead.diagnosis import WHOLE_LAYER, Finding, Record
from levelhead.findings import judge
from levelhead.measure.curves import divergence_step
from levelhead.measure.spikes import is_spike
from levelhead.monitor_sites import Broken, Statistics

HISTORY = 500
"""Steps that are looked at for divergence: the stretch of Bae et al. 2026, Table 5."""
ENOUGH = 32
"""Fewer say too little about it."""
FAR_ABOVE_START = 10.0
"""A loss ten times its first value has lost more than it had learned; the number is this
library's. It speaks where a spike cannot yet: sixteen steps say what is usual."""
JUDGED = {
    "score_max": "score_max_max",
    "normalized_entropy": "normalized_entropy_mean",
    "p_max": "p_max_mean",
}
"""Metrics of a step that the table of findings knows."""


@dataclass(frozen=True)
class Alert:
    """One thing that happened.

    Attributes:
        step: When.
        kind: "nonfinite_loss", "nonfinite_attention", "spike", "above_start", "divergence", or a
            finding's kind.
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
        first_loss: The loss of the first step, if it was finite.
        is_alarmed: Whether the last step's loss or gradient norm was a reason to look closer.
    """

    curves: dict[str, deque[float]] = field(
        default_factory=lambda: {name: deque(maxlen=HISTORY) for name in ("loss", "grad_norm")}
    )
    healthy: tuple[int, Statistics] | None = None
    told: set[str] = field(default_factory=set)
    first_loss: float | None = None
    is_alarmed: bool = False

    def of_curves(self, step: int, values: Mapping[str, float]) -> Iterator[Alert]:
        """Judge the raw loss and gradient norm of a step, and remember them.

        Args:
            step: Which.
            values: "loss" and "grad_norm", those that are known.

        Yields:
            Alerts.
        """
        self.is_alarmed = False
        for name, value in values.items():
            kind, words = self._kind_of(name, value)
            self.curves[name].append(value)
            if kind and (kind == "spike" or self._is_new(kind)):
                self.is_alarmed = True
                text = f"{name} {words} at step {step}"
                since = None if self.healthy is None else self.healthy[0]
                yield Alert(step, kind, text, value=value, healthy_step=since)
        loss = values.get("loss", math.nan)
        if self.first_loss is None and math.isfinite(loss):
            self.first_loss = loss
        is_far_above = self._is_far_above_start("loss", loss)
        self.is_alarmed |= is_far_above
        if not is_far_above and math.isfinite(loss):
            self.told.discard("above_start")

    def _kind_of(self, name: str, value: float) -> tuple[str, str]:
        """What a value is a reason to say, if anything."""
        if not math.isfinite(value):
            return f"nonfinite_{name}", f"is {value}"
        if self._is_far_above_start(name, value):
            return "above_start", f"is {value:.4g}, more than ten times what it started with"
        if is_spike(value, self.curves[name]):
            return "spike", f"spikes to {value:.4g}"
        return "", ""

    def _is_far_above_start(self, name: str, value: float) -> bool:
        if name != "loss" or self.first_loss is None or self.first_loss <= 0:
            return False
        return FAR_ABOVE_START * self.first_loss < value < math.inf

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
            "first_loss": self.first_loss,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint.

        Args:
            state: As ``state_dict`` returned it.
        """
        self.curves = {n: deque(v, maxlen=HISTORY) for n, v in state["curves"].items()}
        self.healthy = None if state["healthy"] is None else tuple(state["healthy"])
        self.told = set(state["told"])
        self.first_loss = state["first_loss"]


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

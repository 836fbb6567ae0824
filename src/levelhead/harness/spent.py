"""Where the time of a comparison went: worker-seconds, training and all else apart.

    budget = wall seconds x processes;  outside = 1 - training / budget

While processes train, each of them has the wall's seconds to spend; while the parent checks the
grid or times steps, the idle processes' seconds count as lost as well.
"""

import time
from collections.abc import Mapping
from typing import Any

WORKER_PARTS = ("training", "evaluation", "building", "data", "start", "step_timing")


class Spent:
    """A running account of one call."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.workers = 1
        self.num_trained = 0
        self.phases: dict[str, float] = {}
        self.parts: dict[str, float] = dict.fromkeys(WORKER_PARTS, 0.0)

    def mark(self, phase: str) -> None:
        """End a phase of the parent's.

        Args:
            phase: What the time since the last mark was for.
        """
        now = time.perf_counter()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self._last
        self._last = now

    def add(self, clock_s: Mapping[str, float], start_s: float) -> None:
        """Count one training, or one timing of steps.

        Args:
            clock_s: Its seconds of data, building, training and evaluation, or of step timing.
            start_s: Those of starting its process.
        """
        self.num_trained += "training" in clock_s
        for name, seconds in {**clock_s, "start": start_s}.items():
            self.parts[name] += seconds

    def summed_up(self) -> dict[str, Any]:
        """Return the account as plain values.

        Returns:
            ``wall_s``, ``workers``, ``num_trained``, the seconds of all processes by what they
            were for in ``worker_s`` (``waiting``: for another's last training, and lost to
            attempts that died), and ``outside_frac`` (None where nothing was trained), the share
            of the budget that was not training.
        """
        wall = sum(self.phases.values())
        budget = wall * self.workers
        in_parent = {
            "checking": self.workers * self.phases.get("checking", 0.0),
            "step_timing": self.workers * self.phases.get("timing", 0.0),
        }
        seconds = {n: self.parts.get(n, 0.0) + in_parent.get(n, 0.0)
                   for n in dict.fromkeys((*self.parts, *in_parent))}  # fmt: skip
        outside = 1 - self.parts["training"] / budget if self.num_trained else None
        return {
            "wall_s": round(wall, 3),
            "workers": self.workers,
            "num_trained": self.num_trained,
            "worker_s": {name: round(value, 3) for name, value in seconds.items()}
            | {"waiting": round(max(0.0, budget - sum(seconds.values())), 3)},
            "outside_frac": None if outside is None else round(outside, 4),
        }

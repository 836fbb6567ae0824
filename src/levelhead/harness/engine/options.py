"""How a training is run, as against what is trained: nothing here may change its numbers' law."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from levelhead.shapes import require

OnEvent = Callable[[str, Mapping[str, Any]], object]
"""Takes ``"note"``, ``"step"``, ``"evaluation"`` or ``"checkpoint"``, and what it says."""

NUM_CHECKPOINTS = 10
NUM_LOGGED = 1000
NUM_EVALUATIONS = 3


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Where to save, log and watch, and how to use the devices."""

    resume: bool = False
    """Go on with the training in the folder."""
    save_every: int | None = None
    """Steps between checkpoints; None: a tenth of the training."""
    log_every: int | None = None
    """Steps between logged steps; None: 1,000 of them at most."""
    micro_batch_size: int | None = None
    """Most samples a device takes at a time; None: as the recipe says."""
    shard: bool = False
    """FSDP2: each device holds a part of weights, gradients and optimiser state."""
    monitor_every: int | None = None
    """Watch the attention every so many steps; None: never."""
    trackers: tuple[str, ...] = ()
    """Of ``trackers.TRACKERS``, beside the JSON lines."""

    def __post_init__(self):
        for name in ("save_every", "log_every", "micro_batch_size", "monitor_every"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} must be at least 1", f"{value}")

    def every(self, name: str, num_steps: int, times: int) -> int:
        """Resolve a cadence.

        Args:
            name: Of the field.
            num_steps: Of the training.
            times: How often in it, where the field is None.

        Returns:
            Steps, at least 1.
        """
        return getattr(self, name) or max(1, num_steps // times)

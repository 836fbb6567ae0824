"""The learning rate over the steps, through torch's ``LambdaLR``: a function of the step alone.

Every schedule rises in a line over ``warmup_steps``; then a factor falls from 1 to
``min_learning_rate / learning_rate``. Groups keep their own multiple (``lr_scale``).
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from levelhead.harness.config import Training
from levelhead.harness.train import warmup_cosine
from levelhead.shapes import require, require_known


def make_schedule(optimizer: Optimizer, settings: Training) -> LambdaLR:
    """Set an optimiser's learning rates for each step.

    Args:
        optimizer: Its learning rates are the peaks.
        settings: Name and shape of the schedule.

    Returns:
        To be stepped once after each optimiser step.

    Raises:
        ValueError: An unknown schedule, or more warm-up and decay than steps.
    """
    require_known("schedule", settings.schedule, SCHEDULES)
    spent = settings.warmup_steps + settings.decay_steps
    require(
        spent <= settings.steps,
        "warmup_steps and decay_steps must fit into steps",
        f"{settings.warmup_steps} and {settings.decay_steps} of {settings.steps}",
    )
    factor = SCHEDULES[settings.schedule]
    return LambdaLR(optimizer, lambda step: factor(step, settings))


def cosine(step: int, settings: Training) -> float:
    """Factor that falls along half a cosine, from the end of the warm-up to the last step.

    Args:
        step: From 0.
        settings: Of the training.

    Returns:
        A factor in (0, 1].
    """
    factor = warmup_cosine(step, settings.steps, settings.warmup_steps / settings.steps)
    return factor if step < settings.warmup_steps else _to_floor(factor, settings)


def warmup_stable_decay(step: int, settings: Training) -> float:
    """Factor that stays 1 and falls in a line over the last ``decay_steps``.

    Args:
        step: From 0.
        settings: Of the training.

    Returns:
        A factor in (0, 1].
    """
    left = settings.steps - step
    if step < settings.warmup_steps or left > settings.decay_steps:
        return constant(step, settings)
    return _to_floor(left / max(1, settings.decay_steps), settings)


def constant(step: int, settings: Training) -> float:
    """Factor that stays 1 after the warm-up.

    Args:
        step: From 0.
        settings: Of the training.

    Returns:
        A factor in (0, 1].
    """
    return min(1.0, (step + 1) / (settings.warmup_steps + 1))


SCHEDULES: Mapping[str, Callable[[int, Any], float]] = {
    "cosine": cosine,
    "warmup_stable_decay": warmup_stable_decay,
    "constant": constant,
}


def _to_floor(factor: float, settings: Training) -> float:
    floor = settings.min_learning_rate / settings.learning_rate
    return floor + (1 - floor) * factor

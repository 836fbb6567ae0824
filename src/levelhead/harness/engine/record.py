"""What is left of a training in its record."""

from pathlib import Path
from typing import Any

from torch import nn

from levelhead.harness.engine.log import read_events
from levelhead.harness.train import NUM_CURVE_POINTS


def curves(path: Path, num_steps: int) -> dict[str, Any]:
    """Thin a log to as many points as a comparison keeps.

    Args:
        path: The log.
        num_steps: Of the training.

    Returns:
        ``curve`` and ``evaluations``, as in a comparison's record.
    """
    events = list(read_events(path))
    every = max(1, num_steps // NUM_CURVE_POINTS)
    points = [
        event
        for event in events
        if event["event"] == "step"
        and isinstance(event["train_loss_nats"], float)  # NaN is written as text
        and (event["step"] % every == 0 or event["step"] in (1, num_steps))
    ]
    evaluations = [
        {name: value for name, value in event.items() if name != "event"}
        for event in events
        if event["event"] == "evaluation"
        and event["step"] < num_steps
        and not any(isinstance(value, str) for name, value in event.items() if name != "event")
    ]
    curve = {
        "step": [point["step"] for point in points],
        "train_loss_nats": [round(point["train_loss_nats"], 6) for point in points],
    }
    return {"curve": curve, "evaluations": evaluations}


def num_parameters(model: nn.Module) -> int:
    """Count a model's parameters, sharded or not.

    Args:
        model: Any.

    Returns:
        Tied ones once.
    """
    return sum(parameter.numel() for parameter in model.parameters())

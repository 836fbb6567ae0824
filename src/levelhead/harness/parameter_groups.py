"""Which parameters an optimiser decays, and how fast each of them learns."""

from typing import Any

from torch import nn


def decayed_apart(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Decay matrices and leave vectors (biases, gains, sinks) alone.

    Args:
        model: To be trained.
        weight_decay: Of the matrices.

    Returns:
        Groups as torch's optimisers take them; empty ones are left out.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]

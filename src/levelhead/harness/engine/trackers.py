"""TensorBoard, W&B and Trackio through Accelerate; the JSON lines are written in any case."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from accelerate import Accelerator

from levelhead.shapes import require_known

TRACKERS = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}
"""Accelerate's name of a tracker, and what is imported and installed for it."""


def check_trackers(names: Sequence[str]) -> None:
    """Refuse a tracker that does not exist or is not installed, before anything is trained.

    Args:
        names: As Accelerate calls them.

    Raises:
        ValueError: An unknown one.
        ImportError: One that is not installed; the message holds the command.
    """
    for name in names:
        require_known("tracker", name, TRACKERS)
        spec = find_spec(TRACKERS[name])
        if spec is None or spec.origin is None:  # a mere folder of that name, as W&B leaves one
            raise ImportError(f"{name} is not installed: pip install {TRACKERS[name]}")


def start_trackers(accelerator: Accelerator, project: str, config: Mapping[str, Any]) -> None:
    """Open the accelerator's trackers and hand them the settings.

    Args:
        accelerator: Made with the trackers' names.
        project: How they file the run.
        config: Plain values; those inside others go by dotted names.

    Raises:
        ValueError: W&B has nobody to log in as.
        Exception: What else a tracker raises.
    """
    if not accelerator.log_with:
        return
    try:
        accelerator.init_trackers(project, config=_simple("", config))
    except Exception as error:
        if type(error).__module__.split(".")[0] != "wandb":
            raise
        raise ValueError(
            f"W&B cannot start: {error} Valid: `wandb login` before, WANDB_API_KEY=KEY, "
            "WANDB_MODE=offline, or no --tracker wandb"
        ) from error


def _simple(path: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        parts = [_simple(f"{path}.{key}".lstrip("."), inner) for key, inner in value.items()]
        return {name: inner for part in parts for name, inner in part.items()}
    return {path: value if isinstance(value, bool | int | float | str) else str(value)}

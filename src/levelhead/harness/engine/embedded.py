"""The default that needs no recipe: a small model on data that are always there."""

from collections.abc import Iterable
from typing import Any

from levelhead.harness.config import TaskSettings
from levelhead.harness.recipe_files import parse_override
from levelhead.harness.tasks import DEFAULT_DATA, resolve_task
from levelhead.shapes import require_known

MODEL = "model."
DATA = "data"


def embedded_settings(overrides: Iterable[str] = ()) -> TaskSettings:
    """Resolve the embedded default, a ViT on digits, with changes.

    Args:
        overrides: ``key=value``: ``data`` as ``levelhead compare --data`` takes it,
            ``model.<option>`` of its model, or another field of ``TaskSettings``.

    Returns:
        Settings in which nothing is left to a default.

    Raises:
        ValueError: An unknown key, or a value of the wrong kind.
    """
    given: dict[str, Any] = {}
    for text in overrides:
        path, value, raw = parse_override(text)
        key = ".".join(path)
        given[key] = raw if key == DATA and not isinstance(value, str) else value
    data = given.pop(DATA, DEFAULT_DATA["vit"])
    options = {k.removeprefix(MODEL): given.pop(k) for k in list(given) if k.startswith(MODEL)}
    for key in given:
        require_known("override", key, [DATA, f"{MODEL}<option>", *_FREE])
    return resolve_task(data, {"vit": options, "gpt": options}, **given)


_FREE = tuple(
    name for name in TaskSettings.model_fields
    if name not in ("data", "fingerprint", "model", "model_options")
)  # fmt: skip

"""What ``levelhead verify`` does: build or load a model, make a batch, check it."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.convert import convert
from levelhead.shapes import require
from levelhead.store import from_pretrained
from levelhead.verify import verify
from levelhead.verify_report import Verification

BATCH, TOKENS = 2, 16


def verify_named(name: str, variant: str | None) -> Verification:
    """Check a model by its name.

    Args:
        name: A folder with a converted model of transformers (``levelhead.save``), or the name of
            a timm model, which gets random weights.
        variant: What to convert a timm model to; None for a folder, which is converted already.

    Returns:
        The table.

    Raises:
        ValueError: No such folder or model, or a variant where none belongs.
    """
    torch.manual_seed(0)
    if Path(name).is_dir():
        require(
            not variant,
            "a saved model is converted already, so --variant must be left out",
            f"--variant {variant}",
        )
        model = from_pretrained(name)
    else:
        model = _timm_model(name)
        convert(model, variant or "quest")
    return verify(model, example_batch(model))


def _timm_model(name: str) -> nn.Module:
    import timm

    known = timm.is_model(name)
    close = ", ".join(timm.list_models(f"*{name}*")[:5]) or "timm.list_models() shows them all"
    require(known, "MODEL must be a folder or the name of a timm model", name, close)
    return timm.create_model(name)


def example_batch(model: Any) -> dict[str, Tensor] | Tensor:
    """Make a small random batch that a model of timm or transformers takes.

    Args:
        model: The model.

    Returns:
        Images, token ids, or both ids of an encoder and a decoder.

    Raises:
        ValueError: The model takes something else.
    """
    if hasattr(model, "default_cfg"):
        return torch.randn(BATCH, *model.default_cfg["input_size"])
    inputs: str = getattr(model, "main_input_name", "")
    config: Any = getattr(model, "config", None)
    if inputs == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        channels = getattr(config, "num_channels", 3)
        return {inputs: torch.randn(BATCH, channels, config.image_size, config.image_size)}
    require(
        inputs == "input_ids" and hasattr(config, "vocab_size"),
        "the command line makes batches of images and token ids",
        f"a model that takes {inputs or 'something unknown'}",
        "levelhead.verify(model, batch) in Python",
    )
    names = ["input_ids"]
    if getattr(config, "is_encoder_decoder", False):
        names.append("decoder_input_ids")
    return {name: torch.randint(config.vocab_size, (BATCH, TOKENS)) for name in names}

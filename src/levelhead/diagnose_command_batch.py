"""The batch that ``levelhead diagnose`` calls a model with: read from a file, or made."""

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.shapes import require

DEFAULT_TOKENS, DEFAULT_BATCH = 64, 4
DATA_FORMS = "a .safetensors file of named arguments, a .npy array, or a .txt file"


def read_batch(path: Path, name: str) -> Any:
    """Read a batch from a file.

    Args:
        path: See ``DATA_FORMS``; text goes through the tokenizer that lies beside the model.
        name: The model's folder or name.

    Returns:
        What to call the model with.

    Raises:
        ValueError: No such file, or another kind of file.
    """
    require(path.exists(), "--data must be a file that exists", str(path), DATA_FORMS)
    if path.suffix in (".safetensors", ".npy"):
        try:
            return _read_tensors(path)
        except Exception as error:
            said = " ".join(str(error).split())[:200]
            raise ValueError(
                f"--data {path} could not be read ({said}); give {DATA_FORMS}"
            ) from error
    require(path.suffix == ".txt", "--data must be of a known kind", path.name, DATA_FORMS)
    tokenizer = importlib.import_module("transformers").AutoTokenizer.from_pretrained(name)
    lines = [line for line in path.read_text().splitlines() if line.strip()][:DEFAULT_BATCH]
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return dict(tokenizer(lines, return_tensors="pt", padding=True, truncation=True))


def _read_tensors(path: Path) -> Any:
    if path.suffix == ".safetensors":
        return importlib.import_module("safetensors.torch").load_file(path)
    import numpy as np

    return torch.from_numpy(np.load(path, allow_pickle=False))


def made_batch(model: nn.Module) -> tuple[Any, str]:
    """Make a batch from what a model says about its input.

    Args:
        model: Of timm or transformers.

    Returns:
        The batch and words about it; None where the model says nothing.
    """
    generator = torch.Generator().manual_seed(0)
    size: Any = getattr(model, "pretrained_cfg", None)
    if size and "input_size" in size:
        images = torch.randn(DEFAULT_BATCH, *_image_size(model, size), generator=generator)
        return images, "made: random images (seed 0); give --data for real ones"
    config: Any = getattr(model, "config", None)
    if config is None:
        return None, "none: the model does not say what it takes; give --data"
    batch = _from_config(model, config, generator)
    if not batch:
        return None, "none: the model's config does not say what it takes; give --data"
    return batch, f"made: random {', '.join(batch)} (seed 0); give --data for real ones"


def _image_size(model: nn.Module, config: Any) -> tuple[int, int, int]:
    """As the model was built, which may differ from its pretrained config."""
    channels, height, width = config["input_size"]
    built: Any = getattr(getattr(model, "patch_embed", None), "img_size", None)
    return (channels, *built) if built is not None else (channels, height, width)


def _from_config(model: nn.Module, config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    batch: dict[str, Tensor] = {}
    main = getattr(model, "main_input_name", "input_ids")
    vision = getattr(config, "vision_config", config)
    text = getattr(config, "text_config", config)
    if main == "pixel_values" or hasattr(config, "vision_config"):
        side = vision.image_size
        side = side if isinstance(side, int) else side[0]
        shape = (DEFAULT_BATCH, getattr(vision, "num_channels", 3), side, side)
        batch["pixel_values"] = torch.randn(shape, generator=generator)
    if main == "input_features":
        shape = (1, config.num_mel_bins, 2 * config.max_source_positions)
        batch["input_features"] = torch.randn(shape, generator=generator)
    if main == "input_ids" or hasattr(config, "text_config"):
        batch["input_ids"] = _tokens(text, DEFAULT_BATCH, generator)
    if getattr(config, "is_encoder_decoder", False):
        count = 1 if main == "input_features" else DEFAULT_BATCH
        batch["decoder_input_ids"] = _tokens(config, count, generator)
    return batch


def _tokens(config: Any, count: int, generator: torch.Generator) -> Tensor:
    limits = [
        getattr(config, name, None)
        for name in ("max_position_embeddings", "n_positions", "max_target_positions")
    ]
    length = min([DEFAULT_TOKENS, *(limit - 2 for limit in limits if limit)])
    return torch.randint(3, config.vocab_size, (count, length), generator=generator)

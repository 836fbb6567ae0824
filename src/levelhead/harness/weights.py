"""Start a model from the weights of another training: safetensors only, nothing that runs code."""

from pathlib import Path

import torch
from torch import nn

from levelhead.shapes import require


@torch.no_grad()
def load_weights_(model: nn.Module, path: str) -> list[str]:
    """Take over weights in place; only a head of another size stays new.

    Args:
        model: A timm model.
        path: A .safetensors file with the names of the model's state dict.

    Returns:
        Names that stayed new.

    Raises:
        FileNotFoundError: No such file.
        ValueError: Another format, or names or shapes that differ outside the head.
    """
    from safetensors.torch import load_file

    require(path.endswith(".safetensors"), "model.weights must be a .safetensors file", path)
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"no {path}: model.weights must name a .safetensors file with the model's state dict"
        )
    given, own = load_file(path), model.state_dict()
    head = getattr(model, "default_cfg", {}).get("classifier", "head")
    kept = {name: value for name, value in given.items() if _fits(own, name, value)}
    wrong = [name for name in {*own, *given} - set(kept) if not name.startswith(f"{head}.")]
    require(
        not wrong,
        f"{path} must hold the weights of this model but for its head {head!r}",
        f"{len(wrong)} names that are missing, unknown or of another shape: "
        f"{', '.join(sorted(wrong)[:5])}",
    )
    model.load_state_dict(kept, strict=False)
    return sorted(set(own) - set(kept))


def _fits(own: dict[str, torch.Tensor], name: str, value: torch.Tensor) -> bool:
    return name in own and own[name].shape == value.shape

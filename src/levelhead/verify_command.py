"""What ``levelhead verify`` does: load a model by name, convert it where it is not, check it."""

from pathlib import Path

import torch

from levelhead.convert import convert
from levelhead.diagnose_command_models import load_named
from levelhead.shapes import require
from levelhead.sites.host import installed_in
from levelhead.verify import verify
from levelhead.verify_report import Verification


def verify_named(name: str, variant: str | None, data: Path | None = None) -> Verification:
    """Check a model by its name.

    Args:
        name: As for ``levelhead diagnose``: a folder of levelhead, of transformers or of a run,
            ``module:function``, or a name of timm (random weights) or transformers.
        variant: What to convert a stock model to, "quest" by default; None for one that is
            converted already.
        data: The batch; made when missing.

    Returns:
        The table.

    Raises:
        ValueError: No such model or batch, or a variant where none belongs.
    """
    torch.manual_seed(0)
    loaded = load_named(name, data, random_weights=True)
    is_converted = any(installed_in(module) for module in loaded.model.modules())
    require(
        not (is_converted and variant),
        "a converted model is checked as it is, so --variant must be left out",
        f"--variant {variant}",
    )
    require(loaded.batch is not None, "verify needs a batch", loaded.origin)
    if not is_converted:
        convert(loaded.model, variant or "quest")
    return verify(loaded.model, loaded.batch)

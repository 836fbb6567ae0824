"""What transformers' own machinery must know of a converted model.

``save_pretrained`` writes the configuration, whoever calls it (a ``Trainer`` too). The key
``attn_implementation`` makes a plain ``from_pretrained`` fail in a process that does not know
the name, and ``levelhead`` tells ``levelhead.from_pretrained`` what to build. ``init_weights``
draws every layer anew that is not marked.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from levelhead.sites.host import SAVED, Installed, installed_in
from levelhead.sites.sites import AttentionSite
from levelhead.variants import Variant


def mark_initialized(installed: Installed) -> None:
    """Keep ``post_init`` and ``init_weights`` away from the parameters of a variant.

    Args:
        installed: What was put into an attention module.
    """
    for part in (*installed.modules(), *installed.parameters()):
        vars(part)["_is_hf_initialized"] = True


def write_saved(
    model: nn.Module, name: str, variant: Variant, converted: Sequence[AttentionSite], before: Any
) -> None:
    """Write it into the model's own configuration, where it has one.

    Args:
        model: The outermost module.
        name: The implementation it runs.
        variant: What was asked for.
        converted: Sites that were converted.
        before: The implementation of the host.
    """
    config: Any = getattr(model, "config", None)
    if config is None:
        return
    found = {site.layer_idx: installed_in(site.module) for site in converted}
    installed = {idx: one for idx, one in found.items() if one is not None}
    config.attn_implementation = name
    config.levelhead = {
        "variant": str(variant),
        "start": next(iter(installed.values())).start,
        "host_implementation": before,
        "layers": {str(idx): [one.factor, one.factor_on] for idx, one in installed.items()},
    }


def remove_saved(model: nn.Module) -> None:
    """Take it out again.

    Args:
        model: The outermost module.
    """
    config = getattr(model, "config", None)
    if config is not None:
        for key in SAVED:
            vars(config).pop(key, None)

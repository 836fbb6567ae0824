"""What transformers' own machinery must know of a converted model.

``save_pretrained`` writes the configuration, whoever calls it (a ``Trainer`` too). The key
``attn_implementation`` makes a plain ``from_pretrained`` fail in a process that does not know
the name, and ``levelhead`` tells ``levelhead.from_pretrained`` what to build. ``init_weights``
draws every layer anew that is not marked.
"""

import copy
import gc
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


def own_configurations(model: nn.Module) -> None:
    """Replace every configuration by a copy, in a model and in the one it is a part of.

    Models built from one configuration hold the same object: what is written into it for one of
    them would turn the others as well.

    Args:
        model: The model that is converted. What was one object is one copy.
    """
    from transformers import PretrainedConfig

    copies: dict[int, Any] = {}
    for module in _outermost(model).modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PretrainedConfig):
                setattr(module, name, copy.deepcopy(value, copies))


def _outermost(model: nn.Module) -> nn.Module:
    """Return the largest model of transformers that holds a model, or the model itself.

    A module does not know what holds it; the live ones are looked through, if any may.
    """
    from transformers import PreTrainedModel

    if not any(_may_hold(each) for each in gc.get_referrers(model)):
        return model
    holders: dict[int, list[nn.Module]] = {}
    for each in gc.get_objects():
        if issubclass(type(each), nn.Module):
            for child in vars(each).get("_modules", {}).values():
                holders.setdefault(id(child), []).append(each)
    found, new = [model], [model]
    while new:
        known = {id(module) for module in found}
        above = {id(h): h for module in new for h in holders.get(id(module), ())}
        new = [holder for key, holder in above.items() if key not in known]
        found += new
    models = [model, *(each for each in found if isinstance(each, PreTrainedModel))]
    return max(models, key=lambda each: sum(1 for _ in each.modules()))


def _may_hold(referrer: object) -> bool:
    """Whether an object may be the children of a module; names of a program are none."""
    return type(referrer) is dict and "__name__" not in referrer

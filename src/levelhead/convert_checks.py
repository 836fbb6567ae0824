"""What must hold before a model is converted; nothing is changed here."""

import gc
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from levelhead.shapes import require
from levelhead.sharding import is_sharded
from levelhead.sites.host import installed_in
from levelhead.sites.sites import AttentionSite

WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "OptimizedModule")
"""Classes that keep a list or a trace of the parameters they wrapped."""


def check_model(model: nn.Module) -> None:
    """Refuse a model in which new modules would go unnoticed.

    Args:
        model: The outermost module.

    Raises:
        ValueError: No module, or one that is compiled or wrapped for several ranks.
    """
    is_module = isinstance(model, nn.Module)
    require(is_module, "model must be a torch.nn.Module", f"a {type(model).__name__}")
    wrapped = [type(m).__name__ for m in model.modules() if type(m).__name__ in WRAPPERS]
    require(
        not wrapped,
        "a model must be converted before it is compiled or wrapped for several ranks",
        ", ".join(sorted(set(wrapped))),
        "the model inside, before wrapping",
    )


def check_unconverted(sites: Iterable[AttentionSite]) -> None:
    """Refuse to convert twice.

    Args:
        sites: All sites of the model.

    Raises:
        ValueError: A site is converted already.
    """
    done = [site.name for site in sites if installed_in(site.module) is not None]
    require(
        not done,
        "a model may be converted once",
        f"{', '.join(done)}, converted already",
        "levelhead.restore(model) first",
    )


def check_weights(site: AttentionSite) -> None:
    """Refuse weights that have no values here, or only some of them.

    Args:
        site: Where.

    Raises:
        ValueError: A weight is on the meta device, sharded or quantised.
    """
    for stored in site.layout.stored().values():
        if stored is None:
            continue
        parameter, name = stored.parameter, f"{site.name}.{stored.name}"
        require(
            not parameter.is_meta,
            "a model must have values to be converted",
            f"{name} on the meta device",
            "materialise the model first (to_empty and load, or from_pretrained)",
        )
        require(
            not is_sharded(parameter),
            "a model must be converted before it is sharded",
            f"{name}, which is spread over ranks",
            "levelhead.convert, then fully_shard",
        )


def check_tied(chosen: Sequence[AttentionSite]) -> None:
    """Refuse to convert some of the attentions that share weights.

    Args:
        chosen: The sites to convert.

    Raises:
        ValueError: Weights of a chosen site are also those of a site that is not chosen, or of
            a second one.
    """
    for site in chosen:
        require(
            not site.tied_with,
            "an attention that shares projections with another cannot be converted",
            f"{site.name}, which shares some with {', '.join(site.tied_with)}",
            "untie them, or choose other layers",
        )


def check_no_optimizer(model: nn.Module) -> None:
    """Refuse to add parameters that an optimiser of the model would never see.

    Found by looking through the objects Python's garbage collector tracks, so an optimiser in
    another process, or one that holds copies, is not seen.

    Args:
        model: The outermost module.

    Raises:
        ValueError: An optimiser holds parameters of the model.
    """
    mine = set(map(id, model.parameters()))
    for optimiser in _optimisers():
        groups = getattr(optimiser, "param_groups", [])
        held = (id(parameter) for group in groups for parameter in group["params"])
        require(
            mine.isdisjoint(held),
            "a model must be converted before its optimiser is built, which would not train the "
            "new parameters",
            f"a {type(optimiser).__name__} that holds parameters of the model",
            "convert first; levelhead.parameter_groups(model, ...) puts them into groups",
        )


def _optimisers() -> list[object]:
    tracked = gc.get_objects()
    alive = _subclasses(torch.optim.Optimizer) & set(map(type, tracked))
    return [each for each in tracked if type(each) in alive] if alive else []


def _subclasses(cls: type) -> set[type]:
    return {cls}.union(*(_subclasses(child) for child in cls.__subclasses__()))

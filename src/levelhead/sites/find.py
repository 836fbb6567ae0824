"""Find every attention of a model, or say what was seen instead."""

import importlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from torch import nn

from levelhead.shapes import require
from levelhead.sites.own_sites import read_own
from levelhead.sites.reading import HOW_TO_READ, Reader, has_tensors, made_by
from levelhead.sites.sites import AttentionSite
from levelhead.sites.torch_sites import read_torch

LIBRARIES = {
    "timm": ("levelhead.sites.timm_sites", "read_timm"),
    "transformers": ("levelhead.sites.transformers_sites", "read_transformers"),
}
"""Readers loaded when a module of a model comes from the library, never before."""


def find_attention(
    model: nn.Module,
    *,
    readers: Sequence[Reader] = (),
    ignore: Collection[type[nn.Module]] = (),
) -> list[AttentionSite]:
    """Describe every attention of a model, whatever library wrote it.

    Knows torch's ``nn.MultiheadAttention``, timm's and transformers' attentions and
    ``levelhead.Attention``. An attention that cannot be described is an error, so that "all
    layers" is never "the layers that were understood".

    Args:
        model: Any module.
        readers: Readers of your own modules, asked first: ``(name, module, model) -> site`` or
            None; see docs/own_module.md.
        ignore: Classes to leave out, in spite of what they look like.

    Returns:
        One site for each attention module, in the order of ``model.named_modules()``. A module
        used several times is one site.

    Raises:
        ValueError: Not a module, no attention was found, or one looks like an attention but
            cannot be read.

    Example:
        >>> import torch, levelhead as lh
        >>> layer = torch.nn.TransformerEncoderLayer(48, 3)
        >>> [(site.name, site.num_heads, site.head_dim) for site in lh.find_attention(layer)]
        [('self_attn', 3, 16)]
    """
    ignore = tuple(ignore)
    is_module = isinstance(model, nn.Module)
    require(is_module, "model must be a torch.nn.Module", f"a {type(model).__name__}")
    sites = list(_read_all(model, readers, ignore))
    strangers = _unread(model, sites, ignore)
    if strangers:
        listed = "; ".join(f"{name!r} ({_kind(module)})" for name, module in strangers)
        raise ValueError(
            f"these look like attention but cannot be read: {listed}; {HOW_TO_READ}, "
            "or leave them out with find_attention(ignore=[TheirClass])"
        )
    if not sites:
        seen = Counter(_kind(module) for module in model.modules())
        listed = ", ".join(f"{kind} x {count}" for kind, count in seen.items())
        raise ValueError(f"no attention found in {_kind(model)}; seen: {listed}; {HOW_TO_READ}")
    for layer_idx, site in enumerate(sites):
        site.layer_idx = layer_idx
    _note_ties(sites)
    return sites


def _read_all(
    model: nn.Module, readers: Sequence[Reader], ignore: tuple[type[nn.Module], ...]
) -> Iterator[AttentionSite]:
    for name, module in model.named_modules():
        if isinstance(module, ignore):
            continue
        for reader in (*readers, *_readers_for(module)):
            site = reader(name, module, model)
            if site is not None:
                yield site
                break


def _readers_for(module: nn.Module) -> Iterator[Reader]:
    yield read_own
    yield read_torch
    for package, (home, reader) in LIBRARIES.items():
        if made_by(module, package):
            yield getattr(importlib.import_module(home), reader)


def _unread(
    model: nn.Module, sites: list[AttentionSite], ignore: tuple[type[nn.Module], ...]
) -> list[tuple[str, nn.Module]]:
    """Modules that are called attention, hold weights, and neither hold a site nor lie in one."""
    known = {id(part) for site in sites for part in site.module.modules()}
    for site in sites:
        parts = site.name.split(".") if site.name else []
        known.update(id(model.get_submodule(".".join(parts[:i]))) for i in range(len(parts)))
    unread: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if id(module) in known or isinstance(module, ignore) or not has_tensors(module):
            continue
        if "atten" in type(module).__name__.lower() or "attn" in type(module).__name__.lower():
            unread.append((name, module))
            known.update(id(part) for part in module.modules())
    return unread


def _kind(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _note_ties(sites: list[AttentionSite]) -> None:
    owners: dict[int, set[str]] = {}
    for site in sites:
        for parameter in site.parameters():
            owners.setdefault(id(parameter), set()).add(site.name)
    for site in sites:
        shared = set().union(*(owners[id(parameter)] for parameter in site.parameters()))
        site.tied_with = tuple(sorted(shared - {site.name}))

"""Build what a site gets, from the variant and from the terms the host has of its own."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.parts.base import AttentionShape
from levelhead.parts.normalisers import OffByOne
from levelhead.parts.projections import DerivedProjections, Projections
from levelhead.parts.scores import QueryKeyNormDimensionScale, SoftCap, UnscaledNorm
from levelhead.sharding import whole_parameters
from levelhead.sites.host import Host, Installed
from levelhead.sites.projection_hooks import logical_weight
from levelhead.sites.sites import AttentionSite
from levelhead.variants import Variant, make_parts


class HostSink(OffByOne):
    """The sink a host has learned, read from the host at every use.

    The module is held in a tuple, so that its parameters do not appear under a second name.
    """

    def __init__(self, module: nn.Module, name: str):
        super().__init__()
        self.owner, self.name = (module,), name

    def sink_score(self, like: Tensor) -> Tensor:
        return getattr(self.owner[0], self.name)


class DoneNorm(UnscaledNorm):
    """A norm that queries and keys have gone through already."""


def build_installed(site: AttentionSite, host: Host, variant: Variant) -> Installed:
    """Build the attention of one site; nothing of the model is changed.

    Args:
        site: Where.
        host: The host of the site.
        variant: What.

    Returns:
        A new module, with parameters in the dtype and on the device of the host's weights, in
        the host's mode (training or evaluation), its projections part derived.
    """
    shape = shape_of(site)
    parts: dict[str, Any] = make_parts(variant, shape)
    projections: Projections = parts.pop("projections")
    early_norm = None
    if _norm_is_early(site, host, parts["norm"]):
        early_norm, parts["norm"] = parts["norm"], DoneNorm()
    if site.soft_cap is not None:
        parts["cap"] = SoftCap(site.soft_cap)
    if site.sink_score is not None:
        parts["normaliser"] = HostSink(site.module, _name_of(site.module, site.sink_score))
    inner = host.build(site, variant, shape, parts)
    installed = Installed(inner, projections, variant, site.scale, early_norm)
    return installed.train(site.module.training)


def shape_of(site: AttentionSite) -> AttentionShape:
    """Return what parts must know of a site.

    Args:
        site: Where.

    Returns:
        Sizes, whether q has a bias, and dtype and device of the host's weights.
    """
    weight = site.layout.q.weight.parameter
    return AttentionShape(
        site.embed_dim,
        site.num_heads,
        site.num_kv_heads,
        site.head_dim,
        site.layout.q.bias is not None,
        site.kv_embed_dim,
        {"device": weight.device, "dtype": weight.dtype},
    )


@torch.no_grad()
def derive(site: AttentionSite, installed: Installed) -> None:
    """Let the projections part start from the host's weights as they are now.

    Args:
        site: Where.
        installed: What was built for it.
    """
    installed.projections.ensure_derived(
        {which: logical_weight(getattr(site.layout, which)) for which in "qkv"}
    )


@torch.no_grad()
def derive_again(site: AttentionSite, filled: Collection[int] = ()) -> None:
    """Let the projections part of a variant start from new weights, if it kept something of old.

    Args:
        site: Where; built as the variant or converted.
        filled: Ids of tensors that have their new values already: their parts stay.
    """
    owners = [getattr(site.layout, which).weight.owner for which in "qkv"]
    for part in site.module.modules():
        if not isinstance(part, DerivedProjections) or not part.derived:
            continue  # or the first forward derives
        if any(id(tensor) in filled for tensor in part.state_dict(keep_vars=True).values()):
            continue
        with whole_parameters([*owners, *part.modules()]):
            part.derive({which: logical_weight(getattr(site.layout, which)) for which in "qkv"})


def _norm_is_early(site: AttentionSite, host: Host, norm: nn.Module) -> bool:
    """Whether the norm must act on the outputs of the projections.

    Gains per coordinate do not commute with a rotation that the host does by itself, and behind
    landmarks there are no queries and keys left.
    """
    if host.runs_projections:
        return False
    has_gains = isinstance(norm, QueryKeyNormDimensionScale)
    return (has_gains and site.has_rope) or (
        site.kind == "landmark" and isinstance(norm, UnscaledNorm)
    )


def _name_of(module: nn.Module, parameter: nn.Parameter) -> str:
    names = (n for n, p in module.named_parameters(recurse=False) if p is parameter)
    return next(names)

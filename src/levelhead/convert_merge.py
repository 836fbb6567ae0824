"""Fold what a variant holds back into the host's own weights, where the maths allows it."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from levelhead.convert import by_host, install, restore, uninstall
from levelhead.convert_start import NEUTRAL_ALPHA, NEUTRAL_GATE
from levelhead.parts.projections import WHICH, Projections, SigmaReparam
from levelhead.shapes import at_least_float32, require
from levelhead.sites.find import find_attention
from levelhead.sites.host import Installed, host_of, installed_in
from levelhead.sites.reading import Reader
from levelhead.sites.sites import AttentionSite
from levelhead.steps import stop_tracking
from levelhead.terms import Term
from levelhead.variants import Variant

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Merge:
    """What ``merge_`` did.

    Attributes:
        merged: Term to the names of the attentions whose weights took it in.
        kept: Term to the reason why it stays a part of its attentions.
    """

    merged: dict[str, tuple[str, ...]]
    kept: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{term}: folded into {len(names)} attentions"
                 for term, names in self.merged.items()]  # fmt: skip
        return "\n".join(lines + [f"{term}: kept, {why}" for term, why in self.kept.items()])


@torch.no_grad()
def merge_(
    model: nn.Module,
    *,
    readers: Sequence[Reader] = (),
    ignore: Collection[type[nn.Module]] = (),
) -> Merge:
    """Fold terms of a converted model into its own weights, in place, where that is exact.

    spectral adds its correction to the stored weights (in float32 or wider only: at strength 10 a
    bfloat16 weight would lose 5 %), sigma_reparam scales them. affine and gate fold into the
    output projection while they are constant (``W_a = 0`` with a running mean equal to alpha,
    ``W_g = 0``). Where nothing is left, the attention is the host's own again. Any other term
    stays as it is. Outputs in evaluation mode stay, up to rounding of the stored weights.

    Args:
        model: A converted model.
        readers: As for ``convert``.
        ignore: As for ``convert``.

    Returns:
        What was folded, and what was kept and why.

    Raises:
        ValueError: Nothing is converted, nothing can be folded, or a weight is in half precision
            where that would lose the correction; the model is left as it was.
    """
    sites = find_attention(model, readers=readers, ignore=ignore)
    converted = [site for site in sites if _variant(site).terms]
    require(bool(converted), "merge_ needs a converted model", f"a {type(model).__name__}")
    variant = _variant(converted[0])
    kept = {str(term): _why_not(converted, term) for term in variant.terms}
    kept = {term: why for term, why in kept.items() if why is not None}
    folded = [term for term in variant.terms if str(term) not in kept]
    require(
        bool(folded),
        "merge_ needs a term that the host's weights can take in",
        "; ".join(f"{term}: {why}" for term, why in kept.items()),
    )
    for site in converted:
        for term in folded:
            FOLDS[term.name].fold(site, _installed(site))
    rest = Variant(tuple(term for term in variant.terms if term not in folded))
    if rest.terms:
        _reinstall(model, sites, converted, rest)
    else:
        restore(model, readers=readers, ignore=ignore)
    names = tuple(site.name for site in converted)
    return Merge({str(term): names for term in folded}, kept)


def _why_not(sites: Sequence[AttentionSite], term: Term) -> str | None:
    """Say why a term cannot be folded: it must fold in every attention, or in none."""
    fold = FOLDS.get(term.name)
    if fold is None:
        return "it is no linear change of a weight"
    reasons = ((site.name, fold.refuses(site, _installed(site))) for site in sites)
    return next((f"{why} ({name})" for name, why in reasons if why is not None), None)


def _installed(site: AttentionSite) -> Installed:
    installed = installed_in(site.module)
    assert installed is not None
    return installed


def _variant(site: AttentionSite) -> Variant:
    installed = installed_in(site.module)
    return Variant() if installed is None else installed.variant


def _reinstall(
    model: nn.Module, sites: list[AttentionSite], converted: list[AttentionSite], rest: Variant
) -> None:
    """Let the hosts run what is left of the variant."""
    groups = by_host(sites)
    for host, own in groups:
        host.leave(model, own)
    for site in converted:
        host, installed = host_of(site), _installed(site)
        assert host is not None
        uninstall(site, host)
        installed.variant = installed.inner.variant = rest
        install(site, host, installed)
    for host, own in groups:
        host.enter(model, own, rest)
    stop_tracking(model)


class Fold(ABC):
    """How one term goes into the host's weights."""

    @abstractmethod
    def refuses(self, site: AttentionSite, installed: Installed) -> str | None:
        """Say why it cannot, or None."""

    @abstractmethod
    def fold(self, site: AttentionSite, installed: Installed) -> None:
        """Change the host's weights and drop the part."""


class FoldProjections(Fold):
    """A projection term is linear: what it makes of the identity is the weight to store."""

    def refuses(self, site: AttentionSite, installed: Installed) -> str | None:
        dtype = site.layout.q.weight.parameter.dtype
        if dtype in HALF and not isinstance(installed.projections, SigmaReparam):
            return f"a correction of this size would be lost in {dtype}; merge in float32"
        return None

    def fold(self, site: AttentionSite, installed: Installed) -> None:
        weights, part = site.read(), installed.projections
        part.eval()
        for which in WHICH:
            weight = getattr(weights, f"{which}_weight")
            wide = weight.to(at_least_float32(weight.dtype))
            identity = torch.eye(len(wide), dtype=wide.dtype, device=wide.device)
            effective = part.project(which, identity, wide.mT, None)
            setattr(weights, f"{which}_weight", effective.to(weight.dtype))
        site.write(weights)
        installed.projections = Projections()


class FoldFactor(Fold):
    """A constant factor on the heads' outputs goes into the rows of the output projection."""

    def refuses(self, site: AttentionSite, installed: Installed) -> str | None:
        if self.factor(installed) is None:
            return "it depends on the input, as it was trained"
        if site.layout.o is None or site.output_norm is not None:
            return "the host has no output projection right behind its heads"
        return None

    def fold(self, site: AttentionSite, installed: Installed) -> None:
        weights, factor = site.read(), self.factor(installed)
        assert weights.o_weight is not None
        assert factor is not None
        heads = weights.o_weight.unflatten(0, (site.num_heads, -1))
        weights.o_weight = (heads.to(factor.dtype) * factor).to(heads.dtype).flatten(0, 1)
        site.write(weights)
        if installed.factor_on:
            installed.factor *= self.neutral
        self.drop(installed)

    neutral = 1.0

    @abstractmethod
    def factor(self, installed: Installed) -> Tensor | None:
        """Return the factor ``[H, 1 or D, 1]``, or None where it is not constant."""

    @abstractmethod
    def drop(self, installed: Installed) -> None:
        """Remove the part."""


class FoldAffine(FoldFactor):
    """``W_a = 0`` and a running mean equal to alpha: weights times alpha."""

    neutral = NEUTRAL_ALPHA

    def factor(self, installed: Installed) -> Tensor | None:
        part = installed.inner.weights
        assert part is not None
        if part.alpha_proj.weight.any():
            return None
        alpha = part.phi(torch.zeros_like(part.alpha_mean))
        if not torch.equal(alpha, part.alpha_mean):
            return None
        if installed.inner.precondition is not None:
            alpha = torch.ones_like(alpha)
        return alpha.view(-1, 1, 1)

    def drop(self, installed: Installed) -> None:
        installed.inner.weights = None


class FoldGate(FoldFactor):
    """``W_g = 0``: the gate is the sigmoid of its bias."""

    neutral = NEUTRAL_GATE

    def factor(self, installed: Installed) -> Tensor | None:
        part = installed.inner.gate
        assert part is not None
        layer, heads = part.gate_proj, installed.inner.shape.num_heads
        if layer.weight.any():
            return None
        width = layer.weight.shape[0]
        logits = layer.weight.new_zeros(width) if layer.bias is None else layer.bias
        return logits.to(at_least_float32(logits.dtype)).sigmoid().view(heads, -1, 1)

    def drop(self, installed: Installed) -> None:
        installed.inner.gate = None


FOLDS: dict[str, Fold] = {
    "spectral": FoldProjections(),
    "sigma_reparam": FoldProjections(),
    "affine": FoldAffine(),
    "gate": FoldGate(),
}
"""Terms that can become part of the host's weights."""

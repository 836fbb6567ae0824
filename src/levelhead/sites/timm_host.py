"""How timm's attentions are made to run other attention: by a change of class."""

from levelhead.sites.class_swap import swap_back, swap_class
from levelhead.sites.host import Host, Installed
from levelhead.sites.sites import AttentionSite
from levelhead.sites.timm_host_forward import FORWARDS
from levelhead.variants import Variant

OVER_CHANNELS = {
    "affine": "alpha and beta belong to a query token, and here the queries are channels",
    "qknorm_ds": "it learns one gain per coordinate of the dot product, and here these are the "
    "tokens of an image, whose number varies",
}
"""Terms that make no sense where the softmax runs over the channels of a head, and why."""


class TimmHost(Host):
    """timm: the module keeps its parameters and gets the forward of ``timm_host_forward``."""

    runs_projections = True

    def refuses(self, site: AttentionSite, variant: Variant) -> str | None:
        """Refuse a subclass with a forward of its own, and what needs tokens as queries."""
        known = _known_class(site)
        if type(site.module).forward is not known.forward:
            return (
                f"{type(site.module).__qualname__} has a forward of its own, which is not that of "
                f"timm's {known.__qualname__}, so nothing is known of what it computes"
            )
        norm = variant.slot("norm")
        if norm is not None and site.is_cosine:
            return (
                f"{norm.name}: {known.__qualname__} compares queries and keys of unit length "
                "already, under a learned factor per head"
            )
        if site.kind not in ("cross_covariance", "channel"):
            return None
        refused = [term.name for term in variant.terms if term.name in OVER_CHANNELS]
        return None if not refused else f"{refused[0]}: {OVER_CHANNELS[refused[0]]}"

    def install(self, site: AttentionSite, installed: Installed) -> None:
        """Add the child and change the class."""
        super().install(site, installed)
        swap_class(site.module, FORWARDS[_home(_known_class(site))])

    def uninstall(self, site: AttentionSite) -> None:
        """Take back the class and the child."""
        swap_back(site.module)
        super().uninstall(site)


def _home(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _known_class(site: AttentionSite) -> type:
    return next(cls for cls in type(site.module).__mro__ if _home(cls) in FORWARDS)

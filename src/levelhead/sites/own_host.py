"""How ``levelhead.Attention`` itself is converted: other parts answer to the same names."""

from typing import Any

from torch import nn

from levelhead.inner import InnerAttention
from levelhead.parts.projections import Projections
from levelhead.sites.class_swap import swap_back, swap_class
from levelhead.sites.host import Host, Installed
from levelhead.sites.sites import AttentionSite
from levelhead.variants import Variant


class OwnForward(nn.Module):
    """``levelhead.Attention`` with the parts that were installed in place of its own."""

    levelhead: Installed

    @property
    def inner(self) -> InnerAttention:
        """Queries, keys and values to one output per head."""
        return self.levelhead.inner

    @property
    def projections(self) -> Projections:
        """The part of the projections stage."""
        return self.levelhead.projections


class OwnHost(Host):
    """``levelhead.Attention`` built as plain softmax."""

    runs_projections = True

    def refuses(self, site: AttentionSite, variant: Variant) -> str | None:
        """Refuse an attention that was built as a variant."""
        host: Any = site.module
        if not host.variant.terms:
            return None
        return f"it was built as {host.variant}; build it with variant={str(variant)!r} instead"

    def install(self, site: AttentionSite, installed: Installed) -> None:
        """Add the child and change the class."""
        super().install(site, installed)
        swap_class(site.module, OwnForward)

    def uninstall(self, site: AttentionSite) -> None:
        """Take back the class and the child."""
        swap_back(site.module)
        super().uninstall(site)

"""How timm's attentions are made to run other attention: by a change of class."""

from levelhead.sites.class_swap import swap_back, swap_class
from levelhead.sites.host import Host, Installed
from levelhead.sites.sites import AttentionSite
from levelhead.sites.timm_host_forward import FORWARDS
from levelhead.variants import Variant


class TimmHost(Host):
    """timm: the module keeps its parameters and gets the forward of ``timm_host_forward``."""

    runs_projections = True

    def refuses(self, site: AttentionSite, variant: Variant) -> str | None:
        """Refuse a subclass with a forward of its own."""
        known = _known_class(site)
        if type(site.module).forward is known.forward:
            return None
        return (
            f"{type(site.module).__qualname__} has a forward of its own, which is not that of "
            f"timm's {known.__qualname__}, so nothing is known of what it computes"
        )

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

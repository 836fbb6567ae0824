"""A host that is one forward: for modules of your own (docs/own_module.md)."""

from torch import nn

from levelhead.sites.class_swap import swap_back, swap_class
from levelhead.sites.host import Host, Installed
from levelhead.sites.sites import AttentionSite


class SwapHost(Host):
    """Runs another forward in the module while it is converted.

    Args:
        forward_class: An ``nn.Module`` whose ``forward`` takes what the host's takes, and attends
            by ``self.levelhead(query, key, value, hidden_states, ...)`` (``Installed.forward``).
            It is mixed in front of the host's class, so everything of the host is on ``self``.
    """

    def __init__(self, forward_class: type[nn.Module]):
        self.forward_class = forward_class

    def install(self, site: AttentionSite, installed: Installed) -> None:
        """Add the child and change the class."""
        super().install(site, installed)
        swap_class(site.module, self.forward_class)

    def uninstall(self, site: AttentionSite) -> None:
        """Take back the class and the child."""
        swap_back(site.module)
        super().uninstall(site)

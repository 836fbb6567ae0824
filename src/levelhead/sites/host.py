"""The seam between conversion and the libraries: how a host is made to run other attention.

``levelhead.convert`` plans everything, then puts one ``Installed`` into every attention module,
under the name ``levelhead``: its parameters and buffers are the only new keys of the state dict.
A ``Host`` (one per library, looked up when a site of the library is met) routes the module's
forward through it and back. What a host does not say, ``convert`` does for all alike: checks,
the table of what combines, projection terms as forward hooks, function-preserving starts, undo.
"""

import importlib
from collections.abc import Sequence

from torch import Tensor, nn

from levelhead.inner import InnerAttention
from levelhead.parts.base import AttentionShape, Part
from levelhead.parts.projections import Projections
from levelhead.parts.scores import DotProduct
from levelhead.sites.reading import CONVERTED, made_by
from levelhead.sites.sites import AttentionSite
from levelhead.variants import Variant

CHILD = CONVERTED
"""Name of the ``Installed`` in a host's attention module."""


LEFT_ALONE = "left_alone"
"""In ``Installed.undo``: a neighbour of converted attentions that keeps its own maths."""
SAVED = ("attn_implementation", "levelhead")
"""Keys of a saved config.json, so that a plain ``from_pretrained`` of it fails where the name is
not known, and ``levelhead.from_pretrained`` knows what to build."""


class Installed(nn.Module):
    """The attention a host runs after conversion, and all that is needed to undo it.

    Attributes:
        inner: Queries, keys and values to one output per head.
        projections: The part of the projections stage; acts on the host's own layers.
        early_norm: A norm that must act before the host rotates queries and keys, so that it acts
            on the outputs of the projections; None where ``inner`` norms by itself.
        early_scale: What queries are multiplied by after ``early_norm``.
        scale: The factor on the dot product of the host, wherever in its code it applies it.
        variant: What the user asked for.
        start: "preserve" or "paper".
        factor: What the output (``factor_on == "o"``) or value projection was multiplied by.
        factor_on: "o", "v" or "".
        undo: What the host must remember to undo itself; plain data.
    """

    def __init__(
        self,
        inner: InnerAttention,
        projections: Projections,
        variant: Variant,
        scale: float,
        early_norm: DotProduct | None = None,
    ):
        super().__init__()
        self.inner, self.projections, self.early_norm = inner, projections, early_norm
        self.variant, self.scale, self.early_scale = variant, scale, 1.0
        self.start, self.factor, self.factor_on = "paper", 1.0, ""
        self.undo: dict[str, object] = {}

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, hidden_states: Tensor | None, **call
    ) -> Tensor:
        """Attend; see ``InnerAttention.forward``.

        Args:
            query: ``[B, H, T, D]``, rotated where the host rotates, without the host's scale.
            key: ``[B, Hkv, S, D]``.
            value: ``[B, Hkv, S, Dv]``.
            hidden_states: What the queries were projected from; None where no part reads it.
            call: ``attn_mask``, ``attn_bias``, ``is_causal``, ``token_mask``, ``scale``,
                ``dropout_p``.

        Returns:
            ``[B, H, T, Dv]``.
        """
        return self.inner(query, key, value, hidden_states, **call)

    def extra_repr(self) -> str:
        return f"variant={str(self.variant)!r}, start={self.start!r}, factor={self.factor}"


class Host:
    """How the attention of one library is made to run an ``Installed``; override what differs.

    Hosts keep no state of their own: what they must remember lies in ``Installed.undo``, so that
    a deep copy of a converted model can be restored too.
    """

    runs_projections = False
    """True: the host's forward calls ``installed.projections.project`` itself (torch keeps bare
    weights). False: ``convert`` hooks the layers that own q, k and v, whatever their layout."""

    def refuses(self, site: AttentionSite, variant: Variant) -> str | None:
        """Say why this host cannot run a variant at a site, beyond ``levelhead.combinations()``.

        Args:
            site: Where.
            variant: What.

        Returns:
            A sentence without a full stop, or None.
        """
        return None

    def build(
        self,
        site: AttentionSite,
        variant: Variant,
        shape: AttentionShape,
        parts: dict[str, Part],
    ) -> InnerAttention:
        """Build the inner attention; ``parts`` already hold the host's own cap and sink.

        Args:
            site: Where.
            variant: What.
            shape: Sizes, dtype and device of new parameters.
            parts: Slot to part, without the projections.

        Returns:
            The inner attention.
        """
        return InnerAttention.from_parts(variant, shape, parts, site.scale, site.dropout_p)

    def probe_tokens(self, site: AttentionSite) -> int | None:
        """Return how many tokens the module must be given, where it takes no other number.

        Args:
            site: Where.

        Returns:
            The number, or None for any.
        """
        return None

    def install(self, site: AttentionSite, installed: Installed) -> None:
        """Put ``installed`` into the module and run it from now on.

        Args:
            site: Where.
            installed: What.
        """
        site.module.add_module(CHILD, installed)

    def uninstall(self, site: AttentionSite) -> None:
        """Undo ``install`` exactly; must also work when it stopped halfway.

        Args:
            site: Where.
        """
        site.module._modules.pop(CHILD, None)

    def enter(self, model: nn.Module, sites: Sequence[AttentionSite], variant: Variant) -> None:
        """Do what concerns the model as a whole, after every ``install`` of this host.

        Args:
            model: The outermost module.
            sites: All sites of this host in the model; those to convert hold an ``Installed``.
            variant: What was installed.
        """

    def leave(self, model: nn.Module, sites: Sequence[AttentionSite]) -> None:
        """Undo ``enter``, before any ``uninstall``; must also work when it stopped halfway.

        Args:
            model: The outermost module.
            sites: As for ``enter``.
        """


HOSTS = {
    "timm": ("levelhead.sites.timm_host", "TimmHost"),
    "transformers.models.nystromformer": ("levelhead.sites.landmark_host", "LandmarkHost"),
    "transformers": ("levelhead.sites.transformers_host", "TransformersHost"),
    "torch.nn": ("levelhead.sites.torch_host", "TorchHost"),
    "levelhead.attention": ("levelhead.sites.own_host", "OwnHost"),
}
"""Hosts loaded when a site of the library is converted, never before. First match wins."""


def installed_in(module: nn.Module) -> Installed | None:
    """Return what conversion put into an attention module.

    Args:
        module: The host's attention module.

    Returns:
        It, or None where the module is as its library made it.
    """
    child = module._modules.get(CHILD)
    return child if isinstance(child, Installed) else None


def host_of(site: AttentionSite) -> Host | None:
    """Return the host of a site: its own (``site.host``), else its library's.

    Args:
        site: Where.

    Returns:
        The host, or None for a module that can be described but not converted.
    """
    if site.host is not None:
        return site.host
    for package, (home, name) in HOSTS.items():
        if made_by(site.module, package):
            return getattr(importlib.import_module(home), name)()
    return None

"""Projection terms on a host's own layers: forward hooks that adjust their outputs.

Stored weights stay untouched. A layer may hold q, k and v in any layout; the view that finds a
logical matrix in the stored weight also finds its columns in the layer's output.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from levelhead.parts.projections import WHICH
from levelhead.sites.host import Installed
from levelhead.sites.layout import Projection
from levelhead.sites.sites import AttentionSite


@dataclass
class ProjectionHook:
    """The hook of one layer.

    Attributes:
        installed: What was put into the attention module.
        projections: "q", "k" or "v" to where it lies, for those that this layer holds.
    """

    installed: Installed
    projections: dict[str, Projection]

    def __call__(self, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Return the layer's output with every projection adjusted."""
        adjusted = {
            which: self._adjust(which, args[0], output, projection)
            for which, projection in self.projections.items()
        }
        (first, *others) = adjusted.values()
        if not others and first.shape == output.shape:
            return first
        output = output.clone()
        for which, projection in self.projections.items():
            place = _columns(output, projection)
            place.copy_(adjusted[which].movedim(-1, 0).reshape(place.shape))
        return output

    def _adjust(
        self, which: str, hidden_states: Tensor, output: Tensor, projection: Projection
    ) -> Tensor:
        columns = _columns(output, projection)
        projected = columns.flatten(0, columns.ndim - output.ndim).movedim(0, -1)
        installed = self.installed
        projected = installed.projections.adjust(
            which, projected, hidden_states, logical_weight(projection), logical_bias(projection)
        )
        norm = installed.early_norm
        if norm is None or which == "v":
            return projected
        heads = projected.unflatten(-1, (-1, installed.inner.shape.head_dim)).transpose(-2, -3)
        if which == "k":
            prepared = norm.prepare_key(heads)
        else:
            prepared = norm.prepare_query(heads) * installed.early_scale
        return prepared.transpose(-2, -3).flatten(-2)


def _columns(output: Tensor, projection: Projection) -> Tensor:
    """Return the view of a layer's output that holds one projection: ``[rows..., batch...]``.

    A bias is laid out as the outputs are; a weight may be stored transposed.
    """
    rows = (projection.bias or projection.weight).rows
    return rows(output.movedim(-1, 0))


def logical_weight(projection: Projection) -> Tensor:
    """Return a weight as torch stores a layer of its own, with its gradient.

    Args:
        projection: Where it lies.

    Returns:
        ``[out, in]``.
    """
    return projection.weight.rows(projection.weight.parameter).flatten(0, -2)


def logical_bias(projection: Projection) -> Tensor | None:
    """Return a bias as torch stores a layer of its own, with its gradient.

    Args:
        projection: Where it lies.

    Returns:
        ``[out]``, or None.
    """
    bias = projection.bias
    return None if bias is None else bias.rows(bias.parameter).flatten()


def needs_hooks(installed: Installed) -> bool:
    """Whether something acts on the outputs of the host's projections.

    Args:
        installed: What was built for the site.
    """
    acts = bool(installed.variant.has_projections)
    return acts or installed.early_norm is not None


def add_hooks(site: AttentionSite, installed: Installed) -> None:
    """Hook the layers that own q, k and v.

    Args:
        site: Where.
        installed: What was put into its module.
    """
    owners: dict[int, ProjectionHook] = {}
    for which in WHICH:
        projection: Projection = getattr(site.layout, which)
        layer = projection.weight.owner
        if id(layer) not in owners:
            owners[id(layer)] = ProjectionHook(installed, {})
            layer.register_forward_hook(owners[id(layer)])
        owners[id(layer)].projections[which] = projection


def remove_hooks(site: AttentionSite) -> None:
    """Remove what ``add_hooks`` added.

    Args:
        site: Where.
    """
    for which in WHICH:
        hooks = getattr(site.layout, which).weight.owner._forward_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, ProjectionHook)]:
            del hooks[key]

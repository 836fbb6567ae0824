"""Nystromformer: attention through landmarks, changed at its two open ends.

Its weights are never one matrix, so only what acts before (projections, norms) and after
(precondition, gate) has a place: on the outputs of its projections and on its own output.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from levelhead.parts.scores import UnscaledNorm
from levelhead.sites.host import Host, Installed, installed_in
from levelhead.sites.saved_config import (
    mark_initialized,
    own_configurations,
    remove_saved,
    write_saved,
)
from levelhead.sites.sites import AttentionSite
from levelhead.variants import Variant


class LandmarkHost(Host):
    """``NystromformerSelfAttention``; the host's own scale, which a norm replaces by one, is made
    up for in the queries."""

    def probe_tokens(self, site: AttentionSite) -> int | None:
        """Landmarks are means of segments of a fixed number of tokens."""
        return site.module.seq_len  # pyright: ignore[reportReturnType]

    def install(self, site: AttentionSite, installed: Installed) -> None:
        """Add the child, and a hook for the output terms."""
        super().install(site, installed)
        mark_initialized(installed)
        if isinstance(installed.early_norm, UnscaledNorm):
            installed.early_scale = 1.0 / site.scale
        if any(True for _ in installed.inner.outputs()):
            site.module.register_forward_hook(change_output, with_kwargs=True)

    def uninstall(self, site: AttentionSite) -> None:
        """Remove both."""
        hooks = site.module._forward_hooks
        for key in [key for key, hook in hooks.items() if hook is change_output]:
            del hooks[key]
            site.module._forward_hooks_with_kwargs.pop(key, None)
        super().uninstall(site)

    def enter(self, model: nn.Module, sites: Sequence[AttentionSite], variant: Variant) -> None:
        """Leave a name in the configuration that no registry knows."""
        own_configurations(model)
        converted = [site for site in sites if installed_in(site.module) is not None]
        before = getattr(getattr(model, "config", None), "_attn_implementation", None)
        write_saved(model, f"levelhead:{variant} by landmarks", variant, converted, before)

    def leave(self, model: nn.Module, sites: Sequence[AttentionSite]) -> None:
        """Take it out again."""
        remove_saved(model)


def change_output(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Forward hook: apply precondition and gate to each head's output.

    Args:
        module: The host's attention.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        output: What it returned; the first is ``[B, T, H D]``.

    Returns:
        The same with the first changed.
    """
    installed = installed_in(module)
    assert installed is not None
    hidden_states = args[0] if args else kwargs["hidden_states"]
    heads = output[0].unflatten(-1, (installed.inner.shape.num_heads, -1)).transpose(1, 2)
    for part in installed.inner.outputs():
        heads = part(heads, hidden_states)
    return (heads.transpose(1, 2).flatten(2), *output[1:])

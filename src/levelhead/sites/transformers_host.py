"""How transformers' attentions are made to run other attention: through its own registry."""

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from levelhead.shapes import require
from levelhead.sites.build import build_installed
from levelhead.sites.host import CHILD, LEFT_ALONE, Host, Installed, installed_in
from levelhead.sites.packing import keep_documents_apart
from levelhead.sites.saved_config import (
    mark_initialized,
    own_configurations,
    remove_saved,
    write_saved,
)
from levelhead.sites.sites import AttentionSite
from levelhead.sites.transformers_call import HIDDEN_STATES
from levelhead.sites.transformers_names import register_converted
from levelhead.sites.transformers_sites import INTERFACE
from levelhead.variants import Variant, parse_variant

BEFORE = "attn_implementation"
"""In ``Installed.undo``: the host's implementation before."""
ROOT = "root_implementation"
"""In ``Installed.undo``: the same of the model's own configuration, which may be another one."""


class TransformersHost(Host):
    """transformers: the attention interface finds the child of the module it is called for."""

    def refuses(self, site: AttentionSite, variant: Variant) -> str | None:
        """Refuse an attention off the interface, or one that keeps its keywords to itself."""
        forward = inspect.unwrap(type(site.module).forward)
        if INTERFACE not in forward.__code__.co_names:
            return f"{type(site.module).__name__} does not go through the attention interface"
        takes = inspect.signature(forward).parameters.values()
        if variant.needs_hidden_states and all(p.kind != p.VAR_KEYWORD for p in takes):
            return (
                f"{type(site.module).__name__}.forward takes no further keywords, so hidden "
                f"states cannot reach {variant}"
            )
        return None

    def install(self, site: AttentionSite, installed: Installed) -> None:
        """Add the child, and the hook that hands hidden states on."""
        super().install(site, installed)
        mark_initialized(installed)
        if installed.variant.needs_hidden_states:
            site.module.register_forward_pre_hook(hand_on_hidden_states, with_kwargs=True)

    def uninstall(self, site: AttentionSite) -> None:
        """Remove both."""
        _remove_hook(site.module, hand_on_hidden_states)
        super().uninstall(site)

    def enter(self, model: nn.Module, sites: Sequence[AttentionSite], variant: Variant) -> None:
        """Name the implementation in the model's own configurations, and read it back."""
        own_configurations(model)
        converted = [site for site in sites if installed_in(site.module) is not None]
        is_whole = len(converted) == len(sites)
        layers = None if is_whole else tuple(site.layer_idx for site in converted)
        name = register_converted(variant, layers)
        touched = {id(_config(site)) for site in converted}
        for site in sites:
            if id(_config(site)) in touched:
                self._remember(site)
        for site in converted if hasattr(model, "config") else ():
            root: Any = model.config
            _installed(site).undo[ROOT] = root._attn_implementation
        for config in _configs(model, converted):
            config._attn_implementation_internal = name
        for site in converted:
            require(
                _config(site)._attn_implementation == name,
                "transformers must take the name of an attention",
                f"{site.name}, whose configuration says {_config(site)._attn_implementation}",
            )
        write_saved(model, name, variant, converted, _installed(converted[0]).undo[BEFORE])
        if any(site.is_causal and site.kind == "self" for site in sites):
            model.register_forward_pre_hook(keep_documents_apart, with_kwargs=True)

    def _remember(self, site: AttentionSite) -> None:
        """Keep the host's own name; give a neighbour softmax with the host's own terms."""
        installed = installed_in(site.module)
        if installed is None:
            installed = build_installed(site, self, parse_variant("softmax"))
            installed.undo[LEFT_ALONE] = True
            site.module.add_module(CHILD, installed)
        installed.undo[BEFORE] = _config(site)._attn_implementation

    def leave(self, model: nn.Module, sites: Sequence[AttentionSite]) -> None:
        """Give the configurations their own names back and let the neighbours go."""
        for site in sites:
            installed = installed_in(site.module)
            if installed is None or BEFORE not in installed.undo:
                continue
            _config(site)._attn_implementation_internal = installed.undo[BEFORE]
            if LEFT_ALONE in installed.undo:
                site.module._modules.pop(CHILD)
            if ROOT in installed.undo:
                root: Any = model.config
                root._attn_implementation_internal = installed.undo[ROOT]
        remove_saved(model)
        for module in model.modules():  # conversion may have begun at one further in
            _remove_hook(module, keep_documents_apart)


def hand_on_hidden_states(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook: let the attention function see the input of the attention.

    Args:
        module: The host's attention.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Returns:
        The same arguments and one keyword more; nothing is kept on the module.
    """
    hidden_states = args[0] if args else kwargs["hidden_states"]
    return args, {**kwargs, HIDDEN_STATES: hidden_states}


def _config(site: AttentionSite) -> Any:
    return site.module.config


def _installed(site: AttentionSite) -> Installed:
    installed = installed_in(site.module)
    assert installed is not None
    return installed


def _configs(model: nn.Module, sites: Iterable[AttentionSite]) -> list[Any]:
    """The configurations the attentions read, each once, and the model's own for saving."""
    configs = [_config(site) for site in sites]
    if hasattr(model, "config"):
        configs.append(model.config)
    return list({id(config): config for config in configs}.values())


def _remove_hook(module: nn.Module, hook: Any) -> None:
    hooks = module._forward_pre_hooks
    for key in [key for key, value in hooks.items() if value is hook]:
        del hooks[key]
        module._forward_pre_hooks_with_kwargs.pop(key, None)

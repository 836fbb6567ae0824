"""How ``nn.MultiheadAttention`` is made to run other attention: by a change of class.

torch's encoder layer runs past its own modules when it can ("fast path"); a converted attention
tells it that it cannot, so hooks are called and the attention that was installed is the one that
runs, in training and evaluation alike.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from levelhead.inner import to_autocast_dtype
from levelhead.parts.projections import WHICH, Projections
from levelhead.reference import reference_attention
from levelhead.shapes import require
from levelhead.sites.class_swap import swap_back, swap_class
from levelhead.sites.host import Host, Installed
from levelhead.sites.sites import AttentionSite
from levelhead.sites.torch_host_masks import multihead_masks, nest, unnest
from levelhead.variants import Variant


class TorchHost(Host):
    """torch.nn: the module keeps its parameters and gets the forward of ``MultiheadForward``."""

    runs_projections = True

    def refuses(self, site: AttentionSite, variant: Variant) -> str | None:
        """Refuse a subclass with a forward of its own, and unequal widths under a projection."""
        module: Any = site.module
        if type(module).forward is not nn.MultiheadAttention.forward:
            return (
                f"{type(module).__qualname__} has a forward of its own, which is not that of "
                "nn.MultiheadAttention, so nothing is known of what it computes"
            )
        if variant.has_projections and module.kdim != module.vdim:
            widths = f"kdim={module.kdim}, vdim={module.vdim}"
            return (
                f"terms of the projections stage need keys and values of one width, not {widths}"
            )
        return None

    def install(self, site: AttentionSite, installed: Installed) -> None:
        """Add the child and change the class."""
        super().install(site, installed)
        swap_class(site.module, MultiheadForward)

    def uninstall(self, site: AttentionSite) -> None:
        """Take back the class and the child."""
        swap_back(site.module)
        super().uninstall(site)


class MultiheadForward(nn.Module):
    """The forward of a converted ``nn.MultiheadAttention``: same arguments, same results."""

    levelhead: Installed

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """Keeps torch's encoder layer from running past this module."""
        return False

    def _reset_parameters(self) -> None:
        swapped = type(self)
        swap_back(self)
        try:
            self._reset_parameters()
        finally:
            object.__setattr__(self, "__class__", swapped)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; see ``nn.MultiheadAttention.forward``.

        Args:
            query: ``[B, T, E]`` or ``[T, B, E]`` by ``batch_first``, or ``[T, E]``.
            key: Likewise, with S tokens.
            value: Likewise.
            key_padding_mask: ``[B, S]``, True = may **not** attend, or float, added.
            need_weights: Return the attention weights, through the plain T x S form.
            attn_mask: ``[T, S]`` or ``[B H, T, S]``, True = may **not** attend, or float, added.
            average_attn_weights: Average the weights over heads.
            is_causal: A promise that ``attn_mask`` is the causal mask.

        Returns:
            The output in the layout of the query, and the weights ``[B, T, S]``,
            ``[B, H, T, S]`` or None.

        Raises:
            ValueError: A mask that does not fit, or ``is_causal`` without one.
        """
        is_self = query is key
        if query.is_nested:
            return self._forward_nested(query, key, value, need_weights, average_attn_weights)
        states = self._batch_first(query, key, value)
        heads = project_heads(self, *states)
        masks = multihead_masks(
            attn_mask,
            key_padding_mask,
            is_causal and not need_weights,
            is_causal,
            heads[0],
            heads[1],
        )
        if not is_self:
            masks["token_mask"] = torch.ones(
                1, states[0].shape[1], dtype=torch.bool, device=query.device
            )
        attn_output, attn_weights = self._attend(heads, states[0], masks, need_weights)
        output = self._host_layout(attn_output, query.ndim)
        if attn_weights is not None:
            attn_weights = attn_weights.mean(dim=1) if average_attn_weights else attn_weights
            attn_weights = attn_weights if query.ndim == 3 else attn_weights[0]
        return output, attn_weights

    def _attend(
        self,
        heads: tuple[Tensor, Tensor, Tensor],
        hidden_states: Tensor,
        masks: dict[str, Any],
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        if not need_weights:
            return self.levelhead(*heads, hidden_states, **masks), None
        query, key, value = to_autocast_dtype(*heads)
        return reference_attention(self.levelhead.inner, query, key, value, hidden_states, **masks)

    def _forward_nested(
        self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool, average: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Attend to sequences of different lengths, as torch's encoder packs them."""
        require(
            query is key and key is value,
            "nested tensors must come as query, key and value alike",
            "different ones",
        )
        padded, is_padding = unnest(query)
        output, weights = self.forward(
            padded, padded, padded, is_padding, need_weights, None, average
        )
        return nest(output, is_padding), weights

    def _batch_first(self, *states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Bring query, key and value to ``[B, T, E]``; what was one tensor stays one."""
        seen: dict[int, Tensor] = {}
        for state in states:
            if id(state) not in seen:
                batched = state if state.ndim == 3 else state[None]
                swap = state.ndim == 3 and not self.batch_first
                seen[id(state)] = batched.transpose(0, 1) if swap else batched
        query, key, value = (seen[id(state)] for state in states)
        return query, key, value

    def _host_layout(self, attn_output: Tensor, ndim: int) -> Tensor:
        host: Any = self
        output = host.out_proj(attn_output.transpose(1, 2).flatten(2))
        if ndim == 2:
            return output[0]
        return output if host.batch_first else output.transpose(0, 1)


def project_heads(
    host: Any, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Project and split into heads, in as few products as the inputs allow.

    Args:
        host: The attention, with a ``levelhead`` child.
        query: ``[B, T, E]``.
        key: ``[B, S, Ek]``.
        value: ``[B, S, Ev]``.

    Returns:
        ``[B, H, T, D]``, ``[B, H, S, D]`` twice.
    """
    part = host.levelhead.projections
    sources: dict[str, Tensor] = dict(zip(WHICH, (query, key, value), strict=True))
    if type(part) is Projections:
        projected = _plainly(host, sources)
    else:
        stored = weights_of(host)
        part.ensure_derived({which: weight for which, (weight, _) in stored.items()})
        projected = [part.project(which, sources[which], *stored[which]) for which in WHICH]
    q, k, v = (p.unflatten(-1, (host.num_heads, -1)).transpose(1, 2) for p in projected)
    return q, k, v


def weights_of(host: Any) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Return weight and bias of each projection, as torch stores them.

    Args:
        host: The attention.

    Returns:
        "q", "k", "v" to weight and bias (or None), as views the gradient flows through.
    """
    biases = (None,) * 3 if host.in_proj_bias is None else host.in_proj_bias.chunk(3)
    if host.in_proj_weight is not None:
        weights = host.in_proj_weight.chunk(3)
    else:
        weights = [getattr(host, f"{which}_proj_weight") for which in WHICH]
    return dict(zip(WHICH, zip(weights, biases, strict=True), strict=True))


def _plainly(host: Any, sources: dict[str, Tensor]) -> list[Tensor]:
    weight, bias = host.in_proj_weight, host.in_proj_bias
    query, key, value = sources.values()
    if weight is None or key is not value:
        stored = weights_of(host)
        return [F.linear(sources[which], *stored[which]) for which in WHICH]
    if query is key:
        return list(F.linear(query, weight, bias).chunk(3, dim=-1))
    sizes = [host.embed_dim, 2 * host.embed_dim]
    q_weight, kv_weight = weight.split(sizes)
    q_bias, kv_bias = (None, None) if bias is None else bias.split(sizes)
    return [F.linear(query, q_weight, q_bias), *F.linear(key, kv_weight, kv_bias).chunk(2, -1)]

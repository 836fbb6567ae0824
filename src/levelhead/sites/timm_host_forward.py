"""The forward of every converted timm attention: the host's own steps around other attention.

Each class is mixed in front of the host's class, so that parameters keep their names and what
other code asks of the host (``set_window_size``, ``no_weight_decay``) still works.
"""

from typing import Any

import torch
from torch import Tensor, nn

from levelhead.rows import unit_rows
from levelhead.sites.host import Installed
from levelhead.sites.timm_host_channels import attend_over_channels
from levelhead.sites.timm_host_class import attend_from_class, mixes_tokens_first
from levelhead.sites.timm_host_projections import (
    merge_heads,
    project_dense_heads,
    project_heads,
)
from levelhead.sites.timm_sites import MAX_LOG_SCALE

SWIN_V2_BIAS_RANGE = 16.0
"""Liu et al. 2022, Swin Transformer V2 (arXiv:2111.09883): 16 sigmoid(.) bounds the bias."""

COSINE_EPS = 1e-12
"""Norm below which ``F.normalize``, which timm takes, divides by this instead."""


class TimmForward(nn.Module):
    """What all converted timm attentions share: the steps after the attention."""

    levelhead: Installed
    roles = (0, 1, 2)
    """Which third of the fused projection plays query, key and value."""

    def finish(self, attn_output: Tensor, hidden_states: Tensor) -> Tensor:
        """Merge heads, then the host's own norm, gate, output projection and dropout.

        Args:
            attn_output: ``[B, H, T, D]``.
            hidden_states: Input of the attention, for the host's gate.

        Returns:
            ``[B, T, E]``.
        """
        host: Any = self
        merged = merge_heads(attn_output)
        if getattr(host, "norm", None) is not None:
            merged = host.norm(merged)
        if getattr(host, "gate", None) is not None:
            merged = merged * host.gate(hidden_states).sigmoid()
        output = host.proj(merged)
        return host.proj_drop(output) if hasattr(host, "proj_drop") else output


class PlainForward(TimmForward):
    """``timm.layers.attention.Attention``: ViT, DeiT and most others."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Attend; ``attn_mask`` as in torch's attention, and both masks apply."""
        host: Any = self
        query, key, value = project_heads(host, x)
        query, key = host.q_norm(query), host.k_norm(key)
        attn_output = self.levelhead(
            query, key, value, x, **split_mask(attn_mask), is_causal=is_causal
        )
        return self.finish(attn_output, x)


class RotaryForward(TimmForward):
    """``AttentionRope`` and ``EvaAttention``: the norm part comes before the rotation."""

    def forward(
        self,
        x: Tensor,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Attend; ``rope`` holds sines and cosines of all tokens but the prefix."""
        host: Any = self
        query, key, value = project_heads(host, x)
        query, key = host.q_norm(query), host.k_norm(key)
        attn_output = self.levelhead(
            query, key, value, x, **split_mask(attn_mask), is_causal=is_causal,
            rope=None if rope is None else (lambda q, k: rotate(host, q, k, rope)),
        )  # fmt: skip
        return self.finish(attn_output, x)


class SharedBiasForward(TimmForward):
    """``timm.models.beit.Attention``: a bias of its own, one handed in, or both."""

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        """Attend with the sum of the biases."""
        host: Any = self
        bias = None
        if host.relative_position_bias_table is not None:
            bias = host._get_rel_pos_bias()
        if shared_rel_pos_bias is not None:
            bias = shared_rel_pos_bias if bias is None else bias + shared_rel_pos_bias
        query, key, value = project_heads(host, x)
        return self.finish(self.levelhead(query, key, value, x, **split_mask(bias)), x)


class RelativeBiasForward(TimmForward):
    """``timm.models.vision_transformer_relpos.RelPosAttention``: its own bias goes before one
    handed in."""

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        """Attend with the bias."""
        host: Any = self
        bias = shared_rel_pos if host.rel_pos is None else host.rel_pos.get_bias()
        query, key, value = project_heads(host, x)
        query, key = host.q_norm(query), host.k_norm(key)
        return self.finish(self.levelhead(query, key, value, x, **split_mask(bias)), x)


class WindowForward(TimmForward):
    """``timm.models.swin_transformer.WindowAttention``."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend inside windows; ``mask`` is not zero where windows meet across the border."""
        host: Any = self
        query, key, value = project_dense_heads(host, x)
        attn_output = self.levelhead(
            query, key, value, x,
            attn_mask=window_mask(mask, x.shape[0]), attn_bias=host._get_rel_pos_bias(),
        )  # fmt: skip
        return self.finish(attn_output, x)


class CosineWindowForward(TimmForward):
    """``timm.models.swin_transformer_v2.WindowAttention``: cosines times a learned factor."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend inside windows; ``mask`` is not zero where windows meet across the border."""
        host: Any = self
        query, key, value = project_dense_heads(host, x)
        head_scale = torch.clamp(host.logit_scale, max=MAX_LOG_SCALE).exp()
        query, key = unit_rows(query, COSINE_EPS, head_scale), unit_rows(key, COSINE_EPS)
        attn_output = self.levelhead(
            query, key, value, x,
            attn_mask=window_mask(mask, x.shape[0]), attn_bias=continuous_position_bias(host),
        )  # fmt: skip
        return self.finish(attn_output, x)


class BareWindowForward(TimmForward):
    """``timm.models.davit.WindowAttention``: no bias, no mask."""

    def forward(self, x: Tensor) -> Tensor:
        """Attend inside windows."""
        query, key, value = project_heads(self, x)
        return self.finish(self.levelhead(query, key, value, x), x)


class ClassForward(TimmForward):
    """``timm.models.cait.ClassAttn``: only the class token asks."""

    def forward(self, x: Tensor) -> Tensor:
        """Attend from the first token to all."""
        asks = x[:, :1]
        if mixes_tokens_first(self, self.levelhead):
            return self.finish(attend_from_class(self, x), asks)
        query, key, value = project_heads(self, asks, x)
        return self.finish(self.levelhead(query, key, value, asks), asks)


class CrossCovarianceForward(TimmForward):
    """``timm.models.xcit.XCA``: cosines of channels times a learned temperature."""

    def forward(self, x: Tensor) -> Tensor:
        """Attend over the channels of each head."""
        host: Any = self
        query, key, value = project_dense_heads(host, x)
        query = unit_rows(query.mT, COSINE_EPS, host.temperature).mT
        key = unit_rows(key.mT, COSINE_EPS).mT
        attn_output = attend_over_channels(self.levelhead.inner, query, key, value, x)
        return self.finish(attn_output, x)


class ChannelForward(TimmForward):
    """``timm.models.davit.ChannelAttention``: what it names k, v, q are query, key and value."""

    roles = (1, 2, 0)

    def forward(self, x: Tensor) -> Tensor:
        """Attend over the channels of each head."""
        query, key, value = project_dense_heads(self, x)
        attn_output = attend_over_channels(self.levelhead.inner, query, key, value, x)
        return self.finish(attn_output, x)


FORWARDS: dict[str, type[TimmForward]] = {
    "timm.layers.attention.Attention": PlainForward,
    "timm.layers.attention.AttentionRope": RotaryForward,
    "timm.models.eva.EvaAttention": RotaryForward,
    "timm.models.beit.Attention": SharedBiasForward,
    "timm.models.vision_transformer_relpos.RelPosAttention": RelativeBiasForward,
    "timm.models.cait.ClassAttn": ClassForward,
    "timm.models.swin_transformer.WindowAttention": WindowForward,
    "timm.models.swin_transformer_v2.WindowAttention": CosineWindowForward,
    "timm.models.xcit.XCA": CrossCovarianceForward,
    "timm.models.davit.WindowAttention": BareWindowForward,
    "timm.models.davit.ChannelAttention": ChannelForward,
}
"""timm's classes by name, so that no model of timm is imported for the sake of another."""


def split_mask(mask: Tensor | None) -> dict[str, Tensor]:
    """Tell torch's one mask argument apart: boolean (True = may attend) or added to the scores.

    Args:
        mask: Of two to four axes, the last two being queries and keys, or None.

    Returns:
        ``attn_mask`` or ``attn_bias``, with two or four axes.
    """
    if mask is None:
        return {}
    mask = mask[None] if mask.ndim == 3 else mask
    return {"attn_mask" if mask.dtype == torch.bool else "attn_bias": mask}


def window_mask(mask: Tensor | None, num_rows: int) -> Tensor | None:
    """Say who may attend inside shifted windows.

    timm adds -100 where tokens of a window do not belong together. It means "may not attend", and
    is said so here, so that no variant reaches across.

    Args:
        mask: ``[windows, T, T]``, zero where a query may attend, or None.
        num_rows: Images times windows.

    Returns:
        True = may attend, ``[images * windows, 1, T, T]``, or None.
    """
    if mask is None:
        return None
    return (mask == 0).repeat(num_rows // mask.shape[0], 1, 1).unsqueeze(1)


def continuous_position_bias(host: Any) -> Tensor:
    """Return the bias a Swin V2 window makes of its relative coordinates.

        bias = 16 sigmoid(mlp(coordinates))

    Args:
        host: The attention.

    Returns:
        ``[1, H, T, T]``.
    """
    area = host.window_size[0] * host.window_size[1]
    table = host.cpb_mlp(host.relative_coords_table).view(-1, host.num_heads)
    bias = table[host.relative_position_index.view(-1)].view(area, area, -1)
    return SWIN_V2_BIAS_RANGE * torch.sigmoid(bias.permute(2, 0, 1).contiguous()).unsqueeze(0)


def rotate(host: Any, query: Tensor, key: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys as timm does, all tokens but the prefix.

    Args:
        host: The attention.
        query: ``[B, H, T, D]``.
        key: ``[B, Hkv, T, D]``.
        rope: Sines and cosines.

    Returns:
        The rotated rows in the dtype they came in.
    """
    from timm.layers.pos_embed_sincos import apply_rot_embed_cat

    prefix, half = host.num_prefix_tokens, getattr(host, "rotate_half", False)

    def turn(rows: Tensor) -> Tensor:
        turned = apply_rot_embed_cat(rows[:, :, prefix:], rope, half=half)
        return torch.cat([rows[:, :, :prefix], turned], dim=2).type_as(rows)

    return turn(query), turn(key)

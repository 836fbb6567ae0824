"""The Transformer block, pre-LN or post-LN, and how its weights start."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from levelhead.attention import Attention
from levelhead.harness.models.positions import RotaryPositions, SinusoidalPositions
from levelhead.parts.base import Part
from levelhead.shapes import require_known

INIT_STD = 0.02  # BERT, GPT-2, ViT/DeiT and timm all start their linear layers here

RESET_THEMSELVES = (nn.LayerNorm, nn.Conv2d, Part, SinusoidalPositions, RotaryPositions)
"""Modules whose own ``reset_parameters`` is the start that both models want."""


class MLP(nn.Sequential):
    """Two linear layers with a GELU between them."""

    def __init__(self, embed_dim: int, hidden_dim: int):
        super().__init__(
            nn.Linear(embed_dim, hidden_dim), nn.GELU(), nn.Linear(hidden_dim, embed_dim)
        )


class PreNormBlock(nn.Module):
    """``h + attn(norm(h))``, then ``h + mlp(norm(h))``: the residual path stays an identity."""

    ends_normalised = False

    def __init__(self, attn: Attention, embed_dim: int, mlp_ratio: float, dropout_p: float):
        super().__init__()
        self.attn_norm = nn.LayerNorm(embed_dim)
        self.attn = attn
        self.mlp_norm = nn.LayerNorm(embed_dim)
        self.mlp = MLP(embed_dim, round(mlp_ratio * embed_dim))
        self.dropout = nn.Dropout(dropout_p)

    def forward(
        self, hidden_states: Float[Tensor, "B T E"], **attn_options
    ) -> Float[Tensor, "B T E"]:
        attended = self.attn(self.attn_norm(hidden_states), **attn_options)
        hidden_states = hidden_states + self.dropout(attended)
        return hidden_states + self.dropout(self.mlp(self.mlp_norm(hidden_states)))


class PostNormBlock(PreNormBlock):
    """``norm(h + attn(h))``, then ``norm(h + mlp(h))``: the placement of the first Transformer."""

    ends_normalised = True

    def forward(
        self, hidden_states: Float[Tensor, "B T E"], **attn_options
    ) -> Float[Tensor, "B T E"]:
        attended = self.attn(hidden_states, **attn_options)
        hidden_states = self.attn_norm(hidden_states + self.dropout(attended))
        return self.mlp_norm(hidden_states + self.dropout(self.mlp(hidden_states)))


BLOCKS = {"pre": PreNormBlock, "post": PostNormBlock}


def make_blocks(
    norm: str,
    num_layers: int,
    embed_dim: int,
    num_heads: int,
    *,
    mlp_ratio: float,
    dropout_p: float,
    **attention_options,
) -> nn.ModuleList:
    """Build a stack of equal blocks.

    Args:
        norm: ``"pre"`` or ``"post"``: where the LayerNorms stand.
        num_layers: L.
        embed_dim: E.
        num_heads: H.
        mlp_ratio: Width of the MLP over ``embed_dim``.
        dropout_p: Probability of dropping an entry of each sublayer's output.
        attention_options: Passed on to ``Attention`` (variant, num_kv_heads, qkv_bias, ...).

    Returns:
        The blocks, uninitialised beyond torch's own defaults.

    Raises:
        ValueError: ``norm`` is not known, or ``Attention`` refuses its options.
    """
    require_known("norm placement", norm, BLOCKS)
    return nn.ModuleList(
        BLOCKS[norm](
            Attention(embed_dim, num_heads, **attention_options), embed_dim, mlp_ratio, dropout_p
        )
        for _ in range(num_layers)
    )


def final_norm(norm: str, embed_dim: int) -> nn.Module:
    """Return what stands between the last block and the head.

    Args:
        norm: ``"pre"`` or ``"post"``.
        embed_dim: E.

    Returns:
        A LayerNorm, or nothing where the last block already ends with one.
    """
    return nn.Identity() if BLOCKS[norm].ends_normalised else nn.LayerNorm(embed_dim)


def residual_std(num_layers: int) -> float:
    """Standard deviation at which GPT-2 starts the layers that write into the residual path.

        std = .02 / sqrt(2 L)

    Args:
        num_layers: L; each layer writes twice.

    Returns:
        The standard deviation, positive.

    Source: Radford et al. 2019, section 2.3.
    """
    return INIT_STD / math.sqrt(2 * num_layers)


@torch.no_grad()
def normal_linear_(linear: nn.Linear, std: float, truncated: bool = False) -> None:
    """Draw a linear layer's weight from a normal law and set its bias to zero, in place.

    Args:
        linear: The layer.
        std: Standard deviation of the weight.
        truncated: Cut the law at +-2 (timm's habit: hardly ever reached at ``std = .02``).
    """
    if truncated:
        nn.init.trunc_normal_(linear.weight, std=std)
    else:
        nn.init.normal_(linear.weight, std=std)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)

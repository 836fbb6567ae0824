"""A small Vision Transformer (Dosovitskiy et al. 2021) on ``levelhead.attention.Attention``."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from levelhead.harness.models.blocks import (
    INIT_STD,
    RESET_THEMSELVES,
    final_norm,
    make_blocks,
    normal_linear_,
)
from levelhead.harness.models.positions import LearnedPositions, make_positions
from levelhead.shapes import require, require_divides, require_known
from levelhead.steps import track_steps

CLS_STD = 1e-6  # timm's start of the class token: next to nothing, as its position is learned


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """What a ViT is made of."""

    __pydantic_config__ = {"extra": "forbid"}

    image_size: int = 8
    """Height and width of the square input, in pixels."""
    patch_size: int = 2
    """Height and width of a patch; divides ``image_size``."""
    num_channels: int = 1
    """Channels of the input."""
    num_classes: int = 10
    """Width of the head."""
    embed_dim: int = 48
    """E."""
    num_layers: int = 2
    """L."""
    num_heads: int = 4
    """H; divides ``embed_dim``."""
    mlp_ratio: float = 2.0
    """Width of the MLP over ``embed_dim``."""
    pooling: str = "mean"
    """What the head reads: ``"cls"`` (a class token) or ``"mean"`` (the mean over patches)."""
    positions: str = "learned"
    """``"learned"`` or ``"sinusoidal"``."""
    norm: str = "pre"
    """Where the LayerNorms stand: ``"pre"`` or ``"post"``."""
    qkv_bias: bool = True
    """Whether the query, key and value projections have a bias."""
    dropout_p: float = 0.0
    """Probability of dropping an entry of a sublayer's output."""
    variant: str = "softmax"
    """The attention, as a variant string."""

    def __post_init__(self):
        require_divides("patch_size", self.patch_size, "image_size", self.image_size)
        require_divides("num_heads", self.num_heads, "embed_dim", self.embed_dim)
        require_known("pooling", self.pooling, ("cls", "mean"))
        require_known("positions", self.positions, ("learned", "sinusoidal"))
        require(self.num_layers >= 1, "num_layers must be at least 1", f"{self.num_layers}")

    @property
    def num_tokens(self) -> int:
        """Length of the sequence that the blocks see."""
        return (self.image_size // self.patch_size) ** 2 + (self.pooling == "cls")


class ViT(nn.Module):
    """Images to class logits.

    Args:
        config: What it is made of.
    """

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.config = config
        self.patch_embed = nn.Conv2d(
            config.num_channels, config.embed_dim, config.patch_size, stride=config.patch_size
        )
        if config.pooling == "cls":
            self.cls_token = nn.Parameter(torch.zeros(1, 1, config.embed_dim))
        self.positions = make_positions(
            config.positions, config.num_tokens, config.embed_dim, config.num_heads
        )
        self.blocks = make_blocks(
            config.norm, config.num_layers, config.embed_dim, config.num_heads,
            mlp_ratio=config.mlp_ratio, dropout_p=config.dropout_p,
            variant=config.variant, qkv_bias=config.qkv_bias,
        )  # fmt: skip
        self.norm = final_norm(config.norm, config.embed_dim)
        self.head = nn.Linear(config.embed_dim, config.num_classes)
        track_steps(self)
        for name, module in self.named_modules():
            self.init_module_(name, module)

    def forward(self, images: Float[Tensor, "B C Y X"]) -> Float[Tensor, "B K"]:
        """Classify images.

        Args:
            images: ``[B, num_channels, image_size, image_size]``, normalised by the data's loader.

        Returns:
            Logits ``[B, num_classes]``.

        Raises:
            ValueError: Images of another size.
        """
        expected = (self.config.num_channels, self.config.image_size, self.config.image_size)
        require(
            tuple(images.shape[1:]) == expected,
            f"images must be [B, {', '.join(map(str, expected))}]",
            f"{list(images.shape)}",
        )
        hidden_states = self.patch_embed(images).flatten(2).transpose(1, 2)
        if self.config.pooling == "cls":
            cls_token = self.cls_token.expand(images.shape[0], -1, -1)
            hidden_states = torch.cat([cls_token, hidden_states], dim=1)
        hidden_states = self.positions(hidden_states)
        for block in self.blocks:
            hidden_states = block(hidden_states)
        hidden_states = self.norm(hidden_states)
        pooled = hidden_states[:, 0] if self.config.pooling == "cls" else hidden_states.mean(1)
        return self.head(pooled)

    def init_module_(self, name: str, module: nn.Module) -> None:
        """Start one module's own parameters as timm starts a ViT, in place.

        Args:
            name: Its dotted path in the model; empty for the model itself.
            module: The module; its children are left alone.
        """
        if isinstance(module, nn.Linear):
            normal_linear_(module, INIT_STD, truncated=True)
        elif isinstance(module, RESET_THEMSELVES):
            module.reset_parameters()
        elif isinstance(module, LearnedPositions):
            nn.init.trunc_normal_(module.table, std=INIT_STD)
        elif name == "" and self.config.pooling == "cls":
            nn.init.normal_(self.cls_token, std=CLS_STD)

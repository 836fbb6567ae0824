"""A small decoder-only GPT (Radford et al. 2019) on ``levelhead.attention.Attention``."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from levelhead.harness.models.blocks import (
    INIT_STD,
    RESET_THEMSELVES,
    final_norm,
    make_blocks,
    normal_linear_,
    residual_std,
)
from levelhead.harness.models.cache import GrowingCache
from levelhead.harness.models.positions import POSITIONS, LearnedPositions, make_positions
from levelhead.shapes import require, require_divides, require_known
from levelhead.steps import track_steps


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """What a GPT is made of."""

    __pydantic_config__ = {"extra": "forbid"}

    vocab_size: int = 256
    """Number of tokens; 256 reads bytes."""
    context_length: int = 64
    """Longest sequence."""
    embed_dim: int = 64
    """E."""
    num_layers: int = 2
    """L."""
    num_heads: int = 4
    """H; divides ``embed_dim``."""
    num_kv_heads: int | None = None
    """Hkv; divides ``num_heads``, which it equals when left out."""
    mlp_ratio: float = 4.0
    """Width of the MLP over ``embed_dim``."""
    positions: str = "rope"
    """``"learned"``, ``"sinusoidal"`` or ``"rope"``."""
    norm: str = "pre"
    """Where the LayerNorms stand: ``"pre"`` or ``"post"``."""
    tied_head: bool = True
    """Whether the head shares the token embedding's weight."""
    qkv_bias: bool = True
    """Whether the query, key and value projections have a bias."""
    dropout_p: float = 0.0
    """Probability of dropping an entry of a sublayer's output."""
    variant: str = "softmax"
    """The attention, as a variant string."""

    def __post_init__(self):
        require_divides("num_heads", self.num_heads, "embed_dim", self.embed_dim)
        require_known("positions", self.positions, POSITIONS)
        require(self.num_layers >= 1, "num_layers must be at least 1", f"{self.num_layers}")
        require(self.context_length >= 1, "context_length must be at least 1",
                f"{self.context_length}")  # fmt: skip


class GPT(nn.Module):
    """Tokens to the logits of the next token.

    Args:
        config: What it is made of.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.token_embed = nn.Embedding(config.vocab_size, config.embed_dim)
        self.positions = make_positions(
            config.positions, config.context_length, config.embed_dim, config.num_heads
        )
        self.blocks = make_blocks(
            config.norm, config.num_layers, config.embed_dim, config.num_heads,
            mlp_ratio=config.mlp_ratio, dropout_p=config.dropout_p, variant=config.variant,
            num_kv_heads=config.num_kv_heads, qkv_bias=config.qkv_bias,
        )  # fmt: skip
        self.norm = final_norm(config.norm, config.embed_dim)
        self.head = nn.Linear(config.embed_dim, config.vocab_size, bias=False)
        if config.tied_head:
            self.head.weight = self.token_embed.weight
        track_steps(self)
        for name, module in self.named_modules():
            self.init_module_(name, module)

    def forward(
        self, tokens: Int[Tensor, "B T"], caches: Sequence[GrowingCache] | None = None
    ) -> Float[Tensor, "B T V"]:
        """Predict each next token from those up to it.

        Args:
            tokens: ``[B, T]``; with what the caches hold at most ``context_length`` long.
            caches: One for each block, holding the tokens before these; or None.

        Returns:
            Logits ``[B, T, vocab_size]``.

        Raises:
            ValueError: A sequence longer than the context.
        """
        first = caches[0].length if caches else 0
        length = tokens.shape[1]
        require(
            first + length <= self.config.context_length,
            f"tokens must fit context_length={self.config.context_length}",
            f"{first + length} tokens",
        )
        hidden_states = self.positions(self.token_embed(tokens), first)
        rope = self.positions.rotation(first, length)
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            hidden_states = block(hidden_states, is_causal=True, rope=rope, kv_cache=cache)
        return self.head(self.norm(hidden_states))

    @torch.no_grad()
    def generate(
        self, tokens: Int[Tensor, "B T"], num_new: int, generator: torch.Generator | None = None
    ) -> Int[Tensor, "B N"]:
        """Continue a text; without a generator by the likeliest token, else by a drawn one.

        Args:
            tokens: The text so far, at least one token.
            num_new: How many tokens to add; text and new tokens must fit the context.
            generator: Source of the draws.

        Returns:
            The text with ``num_new`` more tokens.
        """
        caches = [GrowingCache() for _ in self.blocks]
        unread = tokens
        for _ in range(num_new):
            logits = self(unread, caches)[:, -1]
            if generator is None:
                unread = logits.argmax(-1, keepdim=True)
            else:
                unread = logits.softmax(-1).multinomial(1, generator=generator)
            tokens = torch.cat([tokens, unread], dim=1)
        return tokens

    def init_module_(self, name: str, module: nn.Module) -> None:
        """Start one module's own parameters as GPT-2 does, in place.

        Args:
            name: Its dotted path in the model; empty for the model itself.
            module: The module; its children are left alone.
        """
        writes_residual = name.endswith((".attn.o_proj", ".mlp.2"))
        if isinstance(module, nn.Linear) and not (name == "head" and self.config.tied_head):
            std = residual_std(self.config.num_layers) if writes_residual else INIT_STD
            normal_linear_(module, std)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=INIT_STD)
        elif isinstance(module, RESET_THEMSELVES):
            module.reset_parameters()
        elif isinstance(module, LearnedPositions):
            nn.init.normal_(module.table, std=INIT_STD)

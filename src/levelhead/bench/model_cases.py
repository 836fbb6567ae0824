"""The models whose conversion is timed, and a batch for each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 50257


@dataclass(frozen=True)
class Case:
    """A model and one batch.

    Attributes:
        build: Makes the model, random weights.
        batch: Makes keyword arguments, or the one positional argument.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor] | Tensor]


def _timm(name: str, batch: int, **options: Any) -> Case:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name, **options)

    size = options.get("img_size", 224)
    return Case(build, lambda: torch.randn(batch, 3, size, size))


def _gpt2(num_tokens: int, **options: Any) -> Case:
    def build() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **options)
        return GPT2LMHeadModel(config)

    vocab = options.get("vocab_size", VOCAB)
    return Case(build, lambda: {"input_ids": torch.randint(vocab, (1, num_tokens))})


CASES: dict[str, Case] = {
    "vit_b": _timm("vit_base_patch16_224", 8),
    "gpt2": _gpt2(512),
    "swin": _timm("swin_tiny_patch4_window7_224", 8),
    "xcit": _timm("xcit_tiny_12_p16_224", 8),
}
UNFUSED = ("swin", "xcit")
"""Models whose attention timm runs unfused by default."""
TINY: dict[str, Case] = {
    "vit_b": _timm("vit_tiny_patch16_224", 2, img_size=32, depth=2),
    "gpt2": _gpt2(16, n_layer=2, n_embd=48, n_head=3, vocab_size=101),
    "swin": _timm("swin_tiny_patch4_window7_224", 1, img_size=56, depths=(1, 1), embed_dim=24),
    "xcit": _timm("xcit_nano_12_p16_224", 1, img_size=32, depth=2),
}
"""The same architectures, small enough to see whether everything runs."""
LARGE, LARGE_TINY = "vit_large_patch16_224", "vit_tiny_patch16_224"

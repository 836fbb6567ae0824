"""Build the model that a recipe describes: timm's, transformers' or levelhead's own."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from levelhead.convert import convert
from levelhead.harness.models.gpt import GPT, GPTConfig
from levelhead.harness.models.vit import ViT, ViTConfig
from levelhead.harness.recipe_parts import (
    Augmentation,
    GPTModel,
    TimmModel,
    TransformersModel,
    ViTModel,
)
from levelhead.harness.seeding import named_seed, paired_init_
from levelhead.harness.weights import load_weights_
from levelhead.shapes import require
from levelhead.variants import parse_variant

COUNT_TOLERANCE = 0.01

OwnConfig = ViTConfig | GPTConfig


def build_timm(model: TimmModel, num_classes: int, num_channels: int) -> nn.Module:
    """Build a timm model without trained weights.

    Args:
        model: What the recipe says.
        num_classes: Width of the head.
        num_channels: Channels of the images.

    Returns:
        The model, started as timm does.

    Raises:
        ValueError: A name that timm does not know, or options that its model does not take.
    """
    import timm

    require(
        timm.is_model(model.name),
        "model.name must be a model of timm",
        repr(model.name),
        "what timm.list_models() shows",
    )
    options = model.options.model_dump(exclude_none=True)
    options.setdefault("in_chans", num_channels)
    require(
        options["in_chans"] == num_channels,
        "model.options.in_chans must be augmentation.num_channels",
        f"in_chans={options['in_chans']}, num_channels={num_channels}",
    )
    try:
        return timm.create_model(model.name, pretrained=False, num_classes=num_classes, **options)
    except (TypeError, AssertionError, RuntimeError, ZeroDivisionError) as error:
        raise ValueError(
            f"timm cannot build {model.name} with {options}: {' '.join(str(error).split())}"
        ) from error


def vit_config(model: ViTModel, augmentation: Augmentation, num_classes: int) -> ViTConfig:
    """Complete levelhead's own ViT from its images.

    Args:
        model: What the recipe says.
        augmentation: Size and channels of the images.
        num_classes: Width of the head.

    Returns:
        The configuration, with plain softmax attention.
    """
    return ViTConfig(
        **_own(model),
        image_size=augmentation.image_size,
        num_channels=augmentation.num_channels,
        num_classes=num_classes,
    )


def gpt_config(model: GPTModel) -> GPTConfig:
    """Return the configuration of levelhead's own GPT.

    Args:
        model: What the recipe says.

    Returns:
        The configuration, with plain softmax attention.
    """
    return GPTConfig(**_own(model))


def _own(model: ViTModel | GPTModel) -> dict[str, Any]:
    return model.model_dump(exclude={"kind", "num_params"})


def build_own(config: OwnConfig, variant: str) -> nn.Module:
    """Build one of levelhead's own models.

    Args:
        config: What it is made of.
        variant: The attention.

    Returns:
        The model.
    """
    kind = ViT if isinstance(config, ViTConfig) else GPT
    return kind(replace(config, variant=variant))  # pyright: ignore[reportArgumentType]


def build_transformers(model: TransformersModel) -> nn.Module:
    """Build a causal language model of transformers without trained weights.

    Args:
        model: What the recipe says.

    Returns:
        The model in training mode, started as transformers does.

    Raises:
        ValueError: Options that the family does not take.
    """
    from transformers import AutoModelForCausalLM

    if model.family == "gpt2":
        own = {"num_kv_heads": model.num_kv_heads, "head_dim": model.head_dim}
        given = [name for name, value in own.items() if value is not None]
        require(not given, "gpt2 has one key head for each query head", ", ".join(given))
    require(
        model.head_dim is not None or model.embed_dim % model.num_heads == 0,
        "model.num_heads must divide model.embed_dim",
        f"num_heads={model.num_heads}, embed_dim={model.embed_dim}",
    )
    built = AutoModelForCausalLM.from_config(_CONFIGS[model.family](model))
    return built.train()


def _gpt2(model: TransformersModel) -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=model.vocab_size, n_positions=model.context_length, n_embd=model.embed_dim,
        n_layer=model.num_layers, n_head=model.num_heads, n_inner=model.mlp_dim,
        resid_pdrop=model.dropout_p, embd_pdrop=model.dropout_p, attn_pdrop=model.dropout_p,
        use_cache=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


def _llama_like(model: TransformersModel) -> dict[str, Any]:
    return {
        "vocab_size": model.vocab_size, "hidden_size": model.embed_dim,
        "intermediate_size": model.mlp_dim or 4 * model.embed_dim,
        "num_hidden_layers": model.num_layers, "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads or model.num_heads,
        "max_position_embeddings": model.context_length, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "attention_dropout": model.dropout_p, "use_cache": False,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip


def _llama(model: TransformersModel) -> Any:
    from transformers import LlamaConfig

    head_dim = model.head_dim or model.embed_dim // model.num_heads
    return LlamaConfig(**_llama_like(model), head_dim=head_dim)


def _qwen2(model: TransformersModel) -> Any:
    from transformers import Qwen2Config

    require(model.head_dim is None, "qwen2 has no head_dim of its own", f"{model.head_dim}")
    return Qwen2Config(**_llama_like(model))


_CONFIGS = {"gpt2": _gpt2, "llama": _llama, "qwen2": _qwen2}


def put_variant(model: nn.Module, variant: str) -> nn.Module:
    """Put a variant into a model of another library, started as its paper does.

    Args:
        model: As its library built it.
        variant: The attention; plain softmax leaves the model as it is.

    Returns:
        The same model.
    """
    if parse_variant(variant).terms:
        convert(model, variant, start="paper")
    return model


def start_foreign(build: Any, variant: str, seed: int, weights: str | None = None) -> nn.Module:
    """Build a model of another library from a seed: variants share what they have in common.

    Args:
        build: Builds the plain model, drawing from torch's global source.
        variant: The attention.
        seed: Of the run.
        weights: A .safetensors file that replaces the drawn weights, or None.

    Returns:
        The model before its first step.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(named_seed(seed, "model"))
        model = build()
        if weights is not None:
            load_weights_(model, weights)
        torch.manual_seed(named_seed(seed, "variant"))
        return put_variant(model, variant)


def start_own(config: OwnConfig, variant: str, seed: int) -> nn.Module:
    """Build one of levelhead's own models from a seed.

    Args:
        config: What it is made of.
        variant: The attention.
        seed: Of the run.

    Returns:
        The model before its first step.
    """
    return paired_init_(build_own(config, variant), seed)


def check_count(model: nn.Module, stated: float | None) -> None:
    """Refuse a model that is not of the stated size.

    Args:
        model: Plain, without a variant; may be on the meta device.
        stated: Parameters the recipe states, or None.

    Raises:
        ValueError: More than 1 % off.
    """
    count = sum(parameter.numel() for parameter in model.parameters())
    require(
        stated is None or abs(count - stated) <= COUNT_TOLERANCE * stated,
        f"the model must have the model.num_params of its recipe, +-{COUNT_TOLERANCE:.0%}",
        f"{count:,} parameters where {stated or 0:,.0f} are stated",
    )

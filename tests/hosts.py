"""Tiny hosts of every library, random weights, nothing downloaded.

Sizes are chosen so that heads, key heads, head width, model width, layers and tokens are all
different wherever the architecture allows it.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 67


@dataclass(frozen=True)
class Host:
    """One architecture.

    Attributes:
        build: Makes the model, in evaluation mode.
        batch: Makes keyword arguments (or one positional tensor) for its forward.
        num_sites: Attentions it has.
    """

    build: Callable[..., nn.Module]
    batch: Callable[[], dict[str, Tensor] | Tensor]
    num_sites: int
    library: str = field(default="transformers")


def tokens(length: int = 11, batch: int = 2) -> dict[str, Tensor]:
    """Random token ids."""
    ids = torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids}


def images(size: int = 16, batch: int = 2) -> Tensor:
    """Random images."""
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1))


def pixels(size: int = 16) -> dict[str, Tensor]:
    """Random images under the name transformers uses."""
    return {"pixel_values": images(size)}


def run(model: nn.Module, batch: dict[str, Tensor] | Tensor, **more: Any) -> Any:
    """Call a model with its batch."""
    if isinstance(batch, Tensor):
        return model(batch, **more)
    return model(**batch, **more)


def _transformers(model_class: str, config_class: str, **config: Any):
    def build(**more: Any) -> nn.Module:
        transformers = importlib.import_module("transformers")
        transformers.logging.set_verbosity_error()
        torch.manual_seed(0)
        made = getattr(transformers, config_class)(**(SPECIAL | config | more))
        return getattr(transformers, model_class)(made).eval()

    return build


def _timm(name: str, **config: Any):
    def build(**more: Any) -> nn.Module:
        torch.manual_seed(0)
        timm = importlib.import_module("timm")
        return timm.create_model(name, num_classes=5, **(config | more)).eval()

    return build


SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
BASE = {
    "vocab_size": VOCAB, "hidden_size": 60, "intermediate_size": 44, "num_hidden_layers": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
FULL = BASE | {"num_attention_heads": 5}
EVEN = BASE | {"hidden_size": 56, "num_attention_heads": 4, "num_key_value_heads": 2}
GROUPED = BASE | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 14}
VISION = {
    "hidden_size": 60, "num_attention_heads": 5, "num_hidden_layers": 2, "intermediate_size": 44,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip
NARROW = {"hidden_size": 60, "num_attention_heads": 5, "num_hidden_layers": 1}
SEQ2SEQ = {
    "d_model": 30, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 5,
    "decoder_attention_heads": 3, "encoder_ffn_dim": 11, "decoder_ffn_dim": 13,
}  # fmt: skip
WHISPER = SEQ2SEQ | {
    "vocab_size": VOCAB, "max_source_positions": 20, "max_target_positions": 20,
    "num_mel_bins": 8, "decoder_start_token_id": 1,
}  # fmt: skip
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2}
QWEN3_NEXT = EXPERTS | {
    "moe_intermediate_size": 12, "shared_expert_intermediate_size": 16,
    "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
YARN = {"rope_type": "default", "rope_theta": 1e4}
CLIP = {
    "text_config": NARROW | {"intermediate_size": 44, "vocab_size": VOCAB, "eos_token_id": 2},
    "vision_config": NARROW | {"intermediate_size": 44, "image_size": 16, "patch_size": 8},
}
VIT = {"img_size": 16, "patch_size": 8, "embed_dim": 45, "depth": 2, "num_heads": 3}
SWIN = {
    "img_size": 16, "patch_size": 2, "window_size": 4, "embed_dim": 10, "depths": (2, 1),
    "num_heads": (2, 5),
}  # fmt: skip
DAVIT = {"embed_dims": (10, 20), "depths": (1, 1), "num_heads": (2, 5), "window_size": 4}


def _seq2seq_batch(**encoder: Tensor) -> dict[str, Tensor]:
    return encoder | {"decoder_input_ids": tokens(7)["input_ids"]}


def _mel() -> Tensor:
    return torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(1))


def _llm(name: str, sites: int = 2, config: dict[str, Any] = GROUPED, **more: Any) -> Host:
    build = _transformers(f"{name}ForCausalLM", f"{name}Config", **(config | more))
    return Host(build, tokens, sites)


def _encoder(name: str, **config: Any) -> Host:
    return Host(_transformers(f"{name}Model", f"{name}Config", **config), tokens, 2)


def _vision(name: str) -> Host:
    return Host(_transformers(f"{name}Model", f"{name}Config", **VISION), pixels, 2)


GPT2 = {"vocab_size": VOCAB, "n_embd": 30, "n_layer": 2, "n_head": 5, "n_positions": 64}
TRANSFORMERS = {
    "gpt2": Host(_transformers("GPT2LMHeadModel", "GPT2Config", **GPT2), tokens, 2),
    "gpt2_cross": Host(
        _transformers("GPT2LMHeadModel", "GPT2Config", **GPT2, add_cross_attention=True),
        # Tokens that differ: with equal keys nothing could depend on a score.
        lambda: tokens() | {"encoder_hidden_states": torch.arange(780.0).sin().view(2, 13, 30)},
        4,
    ),
    "llama": _llm("Llama"),
    "mistral": _llm("Mistral", sliding_window=7),
    "qwen3": _llm("Qwen3"),
    "gemma2": _llm(
        "Gemma2", query_pre_attn_scalar=11, sliding_window=7, attn_logit_softcapping=3.0
    ),
    "gemma3": Host(
        _transformers(
            "Gemma3ForCausalLM", "Gemma3TextConfig", **GROUPED, query_pre_attn_scalar=11,
            sliding_window=7, layer_types=["sliding_attention", "full_attention"],
        ),
        tokens,
        2,
    ),
    "gpt_neox": _llm("GPTNeoX", config=FULL),
    "gpt_oss": _llm("GptOss", num_local_experts=3, num_experts_per_tok=2, rope_parameters=YARN),
    "olmo2": _llm("Olmo2", config=EVEN),
    "phi3": _llm("Phi3", config=EVEN),
    "qwen3_next": _llm("Qwen3Next", 1, **QWEN3_NEXT),
    "bert": _encoder("Bert", **FULL),
    "roberta": _encoder("Roberta", **FULL),
    "distilbert": _encoder(
        "DistilBert", vocab_size=VOCAB, dim=60, n_heads=5, n_layers=2, hidden_dim=11
    ),
    "nystromformer": _encoder(
        "Nystromformer", **FULL, num_landmarks=11, segment_means_seq_len=11, conv_kernel_size=3
    ),
    "vit": _vision("ViT"),
    "deit": _vision("DeiT"),
    "dinov2": _vision("Dinov2"),
    "clip": Host(_transformers("CLIPModel", "CLIPConfig", **CLIP), lambda: tokens() | pixels(), 2),
    "whisper": Host(
        _transformers("WhisperForConditionalGeneration", "WhisperConfig", **WHISPER),
        lambda: _seq2seq_batch(input_features=_mel()),
        3,
    ),
    "t5": Host(
        _transformers(
            "T5ForConditionalGeneration", "T5Config", vocab_size=VOCAB, d_model=30, d_kv=7,
            num_heads=3, num_layers=2, d_ff=11, decoder_start_token_id=0,
        ),
        lambda: _seq2seq_batch(**tokens()),
        6,
    ),
}  # fmt: skip

TIMM = {
    "timm_vit": (_timm("vit_tiny_patch16_224", **VIT), 2),
    "timm_deit3": (_timm("deit3_small_patch16_224", **VIT), 2),
    "timm_vit_norms": (
        _timm("vit_tiny_patch16_224", **VIT, qk_norm=True, scale_attn_norm=True), 2,
    ),
    "swin": (_timm("swin_tiny_patch4_window7_224", **SWIN), 3),
    "swin_v2": (_timm("swinv2_tiny_window8_256", **SWIN), 3),
    "xcit": (_timm("xcit_nano_12_p8_224", img_size=16, embed_dim=45, depth=2, num_heads=3), 4),
    "davit": (_timm("davit_tiny", **DAVIT), 4),
    "eva": (_timm("eva02_tiny_patch14_224", **(VIT | {"embed_dim": 60})), 2),
    "beit": (_timm("beit_base_patch16_224", **VIT), 2),
}  # fmt: skip
TIMM_SIZES = {"davit": 32}


def _torch_encoder(**more: Any) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(30, 5, 13, batch_first=True, **more)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def _torch_pair(**more: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Transformer(32, 4, 1, 1, 13, batch_first=True, **more).eval()


def _sequence(width: int, length: int) -> Tensor:
    return torch.randn(2, length, width, generator=torch.Generator().manual_seed(1))


TORCH = {
    "torch_encoder": Host(_torch_encoder, lambda: _sequence(30, 11), 2, "torch"),
    "torch_pair": Host(
        _torch_pair, lambda: {"src": _sequence(32, 11), "tgt": _sequence(32, 7)}, 3, "torch"
    ),
}
HOSTS: dict[str, Host] = (
    TRANSFORMERS
    | {
        name: Host(build, lambda name=name: images(TIMM_SIZES.get(name, 16)), num_sites, "timm")
        for name, (build, num_sites) in TIMM.items()
    }
    | TORCH
)


def _own(**more: Any) -> nn.Module:
    from levelhead.attention import Attention

    torch.manual_seed(0)
    layers = [Attention(30, 5, num_kv_heads=1, **more) for _ in range(2)]
    return nn.Sequential(layers[0], nn.LayerNorm(30), layers[1]).eval()


OWN = {"levelhead": Host(_own, lambda: _sequence(30, 11), 2, "levelhead")}
"""Not among ``HOSTS``, which are held to attention nobody here wrote."""

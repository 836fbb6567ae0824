"""Every architecture of transformers that fits a laptop: read rightly, or refused.

Rotation keeps the length of a vector and nothing touches values, so without norms of the host
``scale |q|``, ``|k|`` and ``v`` of a captured call must be those of the weights a site reads.
"""

import importlib
import inspect
from collections import Counter

import pytest
import torch
from torch import Tensor

from levelhead.capture import capture
from levelhead.sites.find import find_attention

LARGEST = 3_000_000
SMALL = {
    "vocab_size": 67, "intermediate_size": 40, "ffn_dim": 40, "d_ff": 40, "hidden_dim": 40,
    "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "moe_intermediate_size": 16, "d_kv": 12,
    "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2, "encoder_layers": 1,
    "decoder_layers": 1, "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 64, "n_positions": 64, "n_ctx": 64,
    "image_size": 16, "patch_size": 8, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "embedding_size": 24, "attention_dropout": 0.0, "sliding_window": 5,
    "decoder_start_token_id": 1, "num_mel_bins": 8, "max_source_positions": 20,
    "max_target_positions": 20,
} | dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim"), 48)  # fmt: skip
NOT_MADE_SMALL = (Exception,)
READ_AT_LEAST = 80


def batches():
    ids = torch.randint(3, 60, (2, 7))
    image, mel = torch.randn(2, 3, 16, 16), torch.randn(2, 8, 40)
    yield {"input_ids": ids}
    yield {"input_ids": ids, "decoder_input_ids": ids}
    yield {"pixel_values": image}
    yield {"input_ids": ids, "pixel_values": image}
    yield {"input_features": mel, "decoder_input_ids": ids}
    yield {"input_values": torch.randn(2, 4000)}


def build(config_class, auto_model):
    known = set(inspect.signature(config_class.__init__).parameters)
    for cls in config_class.__mro__:
        known |= set(getattr(cls, "__annotations__", {}))
    known |= set(getattr(config_class, "attribute_map", {}))
    config = config_class(**{name: value for name, value in SMALL.items() if name in known})
    config._attn_implementation = "eager"
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in auto_model.from_config(config).parameters())
    return auto_model.from_config(config).eval() if size <= LARGEST else None


def rotation_factor(model) -> float:
    factors = {getattr(module, "attention_scaling", 1.0) for module in model.modules()}
    return max((factor for factor in factors if isinstance(factor, float)), default=1.0)


class Compare:
    """A callback that compares each call with the weights of its site."""

    def __init__(self, model):
        self.factor, self.wrong, self.num_calls = rotation_factor(model), [], 0

    def __call__(self, call):
        self.num_calls += 1
        site, weights = call.site, call.site.read()
        if call.hidden_states is None or site.kind == "cross":
            return

        def project(letter: str, num_heads: int) -> Tensor:
            bias = getattr(weights, f"{letter}_bias")
            out = call.hidden_states @ getattr(weights, f"{letter}_weight")
            return (
                (out if bias is None else out + bias)
                .unflatten(-1, (num_heads, -1))
                .transpose(1, 2)
            )

        if call.query.shape[2] != call.key.shape[2]:
            return  # keys from elsewhere
        query, key = project("q", site.num_heads), project("k", site.num_kv_heads)
        self.compare(site, "v", call.value, project("v", site.num_kv_heads))
        if site.q_norm is not None:
            self.compare(site, "scale", torch.tensor(call.scale), torch.tensor(site.scale))
            return
        found = (
            call.scale
            * call.query.norm(dim=-1).mean(2)
            * call.key.norm(dim=-1).mean((1, 2))[:, None]
        )
        expected = site.scale * query.norm(dim=-1).mean(2) * key.norm(dim=-1).mean((1, 2))[:, None]
        self.compare(site, "scale |q| |k|", found, expected * self.factor**2)

    def compare(self, site, what, found, expected):
        if found.shape != expected.shape or not torch.allclose(
            found, expected, rtol=2e-3, atol=1e-4
        ):
            self.wrong.append((site.name, what, tuple(found.shape), tuple(expected.shape)))


def examine(config_class, auto_model) -> str:
    try:
        model = build(config_class, auto_model)
    except NOT_MADE_SMALL as error:
        return f"not built: {type(error).__name__}"
    if model is None:
        return "not built: too large"
    try:
        sites = find_attention(model)
    except ValueError:
        return "refused"
    with torch.no_grad():
        for site in sites:
            for parameter in site.parameters():
                parameter.normal_(0, 0.2)
    for batch in batches():
        compare = Compare(model)
        try:
            with torch.no_grad(), capture(model, compare):
                model(**batch)
        except NOT_MADE_SMALL:
            continue
        return f"WRONG: {compare.wrong[:3]}" if compare.wrong else "read"
    return "not run"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_architecture_is_read_rightly_or_refused():
    transformers = importlib.import_module("transformers")
    names = importlib.import_module("transformers.models.auto.modeling_auto").MODEL_MAPPING_NAMES
    transformers.logging.set_verbosity(50)
    said = {
        name: examine(transformers.CONFIG_MAPPING[name], transformers.AutoModel) for name in names
    }
    assert not {name: word for name, word in said.items() if word.startswith("WRONG")}
    count = Counter(word.split(":")[0] for word in said.values())
    assert count["read"] >= READ_AT_LEAST, count

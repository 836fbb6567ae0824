"""Layouts against each other, and what a site says of its host."""

import copy

import pytest
import torch
from torch import nn

import levelhead as lh
from hosts import HOSTS
from levelhead.attention import Attention
from levelhead.sites.find import find_attention
from levelhead.sites.layout import ProjectionWeights

E, H, KV, D = 42, 6, 2, 7


def only_site(model: nn.Module, readers=()):
    (site,) = find_attention(model, readers=readers)
    return site


def random_weights(width: int = E, kv_width: int = E) -> ProjectionWeights:
    def draw(*shape):
        return torch.randn(*shape) * 0.2

    weights = [draw(E, width), draw(E, kv_width), draw(E, kv_width), draw(width, E)]
    biases = [draw(width), draw(kv_width), draw(kv_width), draw(E)]
    return ProjectionWeights(*weights, *biases)


def test_case_a26_one_logical_matrix_in_every_layout():
    import timm.layers.attention as timm_attention
    from transformers import GPT2Config, ViTConfig
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
    from transformers.models.vit.modeling_vit import ViTAttention

    weights = random_weights()
    hosts = [
        nn.MultiheadAttention(E, H, batch_first=True),
        timm_attention.Attention(E, H, qkv_bias=True),
        Attention(E, H, qkv_bias=True),
        ViTAttention(ViTConfig(hidden_size=E, num_attention_heads=H, attn_implementation="sdpa")),
        GPT2Attention(GPT2Config(n_embd=E, n_head=H, attn_implementation="sdpa")),
    ]
    hidden, outputs = torch.randn(2, 11, E), []
    for host in hosts:
        host.eval()
        site = only_site(host)
        site.write(weights)
        for name, values in vars(site.read()).items():
            assert torch.equal(values, getattr(weights, name)), name
        site.module.is_causal = False
        outputs.append(run_bare(host, hidden))
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], atol=1e-6, rtol=0)


def run_bare(host, hidden):
    if isinstance(host, nn.MultiheadAttention):
        return host(hidden, hidden, hidden)[0]
    output = host(hidden)
    return output[0] if isinstance(output, tuple) else output


def test_case_a26_grouped_heads_split_as_q_kv_kv_and_not_in_thirds():
    model = HOSTS["phi3"].build()
    module = model.model.layers[0].self_attn
    site = find_attention(model)[0]
    q_rows, kv_rows = site.num_heads * site.head_dim, site.num_kv_heads * site.head_dim
    assert module.qkv_proj.weight.shape[0] == q_rows + 2 * kv_rows != 3 * q_rows
    q, k, v = module.qkv_proj.weight.split([q_rows, kv_rows, kv_rows])
    weights = site.read()
    assert torch.equal(weights.q_weight, q.T)
    assert torch.equal(weights.k_weight, k.T)
    assert torch.equal(weights.v_weight, v.T)


def test_case_a27_gpt2_and_its_linear_twin_are_one():
    model = HOSTS["gpt2"].build()
    twin = copy.deepcopy(model)
    for name, layer in list(twin.named_modules()):
        if type(layer).__name__ == "Conv1D":
            linear = nn.Linear(*layer.weight.shape)
            linear.weight, linear.bias = nn.Parameter(layer.weight.T.clone()), layer.bias
            twin.set_submodule(name, linear)
    sites, twin_sites = find_attention(model), find_attention(twin)
    assert len(sites) == len(twin_sites) == 2
    for site, twin_site in zip(sites, twin_sites, strict=True):
        for name, values in vars(site.read()).items():
            assert torch.equal(values, getattr(twin_site.read(), name)), name
        fresh = site.read().map(lambda values: torch.randn_like(values) * 0.2)
        site.write(fresh)
        twin_site.write(fresh)
    ids = HOSTS["gpt2"].batch()["input_ids"]
    torch.testing.assert_close(model(ids).logits, twin(ids).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "sizes", [{"kdim": 10, "vdim": 13}, {"bias": False}, {"kdim": 10, "bias": False}]
)
def test_torch_attention_with_separate_weights_or_without_biases(sizes):
    host = nn.MultiheadAttention(E, H, batch_first=True, **sizes).eval()
    site = only_site(host)
    key_width, value_width = sizes.get("kdim", E), sizes.get("vdim", E)
    assert site.kv_embed_dim == key_width
    assert site.kind == ("cross" if "kdim" in sizes else "self")
    fresh = site.read().map(torch.randn_like)
    site.write(fresh)
    assert (fresh.q_bias is None) == (sizes.get("bias") is False)
    hidden, keys, values = (
        torch.randn(2, n, w) for n, w in ((5, E), (7, key_width), (7, value_width))
    )
    output = host(hidden, keys, values)[0]
    split = [t.unflatten(-1, (H, -1)).transpose(1, 2) for t in (
        hidden @ fresh.q_weight + (0 if fresh.q_bias is None else fresh.q_bias),
        keys @ fresh.k_weight + (0 if fresh.k_bias is None else fresh.k_bias),
        values @ fresh.v_weight + (0 if fresh.v_bias is None else fresh.v_bias),
    )]  # fmt: skip
    attn_weights = (split[0] @ split[1].mT * site.scale).softmax(-1)
    plain = (attn_weights @ split[2]).transpose(1, 2).flatten(2) @ fresh.o_weight
    plain = plain + (0 if fresh.o_bias is None else fresh.o_bias)
    torch.testing.assert_close(output, plain, atol=1e-4, rtol=1e-4)


def test_eva_with_split_projections_has_no_key_bias():
    from timm.models.eva import EvaAttention

    for fused in (True, False):
        site = only_site(EvaAttention(E, H, qkv_fused=fused, norm_layer=nn.LayerNorm))
        weights = site.read()
        assert weights.k_bias is None
        assert weights.q_bias is not None
        assert site.output_norm is site.module.norm


def test_grouped_own_attention():
    host = Attention(E, H, num_kv_heads=KV, head_dim=D, scale=0.3, qkv_bias=True, proj_bias=False)
    site = only_site(nn.ModuleDict({"layer": host}))
    sizes = (site.name, site.num_heads, site.num_kv_heads, site.head_dim, site.embed_dim)
    assert sizes == ("layer", H, KV, D, E)
    assert site.scale == 0.3
    assert site.read().o_bias is None
    assert torch.equal(site.read().k_weight, host.k_proj.weight.T)


@pytest.mark.parametrize(
    ("options", "scales"),
    [
        ({}, [6**-0.5, 6**-0.5]),
        ({"scale_attn_weights": False}, [1.0, 1.0]),
        ({"scale_attn_by_inverse_layer_idx": True}, [6**-0.5, 6**-0.5 / 2]),
    ],
)
def test_case_a02_gpt2_scales_are_the_ones_it_uses(options, scales):
    assert [site.scale for site in find_attention(HOSTS["gpt2"].build(**options))] == scales


def test_case_a02_scales_of_other_hosts():
    found = {
        name: {round(site.scale**-2, 6) for site in find_attention(HOSTS[name].build())}
        for name in ("gemma2", "t5", "whisper", "llama")
    }
    assert found == {"gemma2": {11}, "t5": {1}, "whisper": {6, 10}, "llama": {14}}


def test_case_a02_two_different_scales_are_refused():
    model = HOSTS["llama"].build()
    model.model.layers[1].self_attn.scale = 0.125
    with pytest.raises(ValueError, match=r"layers.1.self_attn.*two different scales.*0.125"):
        find_attention(model)
    model.model.layers[1].self_attn.scale = model.model.layers[1].self_attn.scaling
    assert len(find_attention(model)) == 2


def test_what_sites_say_of_their_hosts():
    def facts(name: str, *fields: str):
        sites = find_attention(HOSTS[name].build())
        return [tuple(getattr(site, field) for field in fields) for site in sites]

    assert facts("gemma2", "window_size", "soft_cap") == [(7, 3.0), (None, 3.0)]
    assert facts("gemma3", "window_size") == [(7,), (None,)]
    assert facts("mistral", "window_size", "has_rope") == [(7, True)] * 2
    assert facts("gpt_oss", "has_sink", "has_rope") == [(True, True)] * 2
    assert facts("olmo2", "norm_spans_heads") == [(True,)] * 2
    assert facts("qwen3", "norm_spans_heads") == [(False,)] * 2
    assert facts("qwen3_next", "has_gate", "num_heads") == [(True, 4)]
    assert facts("clip", "is_causal") == [(True,), (False,)]
    assert facts("whisper", "kind", "is_causal") == [
        ("self", False), ("self", True), ("cross", False),
    ]  # fmt: skip
    assert facts("gpt2_cross", "kind", "is_causal") == [("self", True), ("cross", False)] * 2
    assert facts("t5", "kind", "has_position_bias") == [("self", True)] * 3 + [
        ("cross", False), ("self", True), ("cross", False),
    ]  # fmt: skip
    assert (
        facts("swin", "kind", "window_size", "has_position_bias") == [("window", (4, 4), True)] * 3
    )
    assert facts("davit", "kind") == [("window",), ("channel",)] * 2
    assert facts("xcit", "kind") == [("cross_covariance",)] * 2 + [("class",)] * 2
    assert facts("eva", "has_rope") == [(True,)] * 2
    assert facts("torch_pair", "kind") == [("self",), ("self",), ("cross",)]
    assert facts("nystromformer", "kind") == [("landmark",)] * 2


def test_shared_weights_are_named():
    model = HOSTS["llama"].build()
    first, second = (layer.self_attn for layer in model.model.layers)
    second.k_proj.weight = first.k_proj.weight
    ties = [site.tied_with for site in lh.find_attention(model)]
    assert ties == [("model.layers.1.self_attn",), ("model.layers.0.self_attn",)]


def test_writing_keeps_dtype_and_requires_grad_and_stays_out_of_autograd():
    model = HOSTS["gpt2"].build().to(torch.bfloat16)
    site = find_attention(model)[0]
    site.module.c_attn.weight.requires_grad_(False)
    site.write(site.read().map(lambda values: torch.randn_like(values, dtype=torch.float64)))
    for parameter in site.parameters():
        assert parameter.dtype == torch.bfloat16
        assert parameter.is_leaf
    assert [p.requires_grad for p in site.parameters()] == [False, True, True, True]


class Adapter(nn.Module):
    """Stands for a LoRA layer of PEFT: the layer it adapts is its ``base_layer``."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer, self.down = base_layer, nn.Linear(base_layer.in_features, 2)

    def forward(self, hidden_states):
        return self.base_layer(hidden_states)


def test_adapters_are_looked_through():
    model = HOSTS["llama"].build()
    attention = model.model.layers[0].self_attn
    base = attention.q_proj
    attention.q_proj = Adapter(base)
    site = find_attention(model)[0]
    assert torch.equal(site.read().q_weight, base.weight.T)
    assert [parameter is base.weight for parameter in site.parameters()].count(True) == 1

"""What cannot be described is refused, with the words that help."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from hosts import HOSTS
from levelhead.sites.find import find_attention
from levelhead.sites.layout import Layout, fused, linear
from levelhead.sites.sites import AttentionSite


class CausalSelfAttention(nn.Module):
    """A user's own module: fused projection, own names, heads counted as ``n_head``."""

    def __init__(self, n_embd, n_head):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.n_head, self.n_embd = n_head, n_embd

    def forward(self, x):
        q, k, v = (
            part.unflatten(2, (self.n_head, -1)).transpose(1, 2)
            for part in self.c_attn(x).split(self.n_embd, dim=2)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


def read_own_module(name, module, model):
    if not isinstance(module, CausalSelfAttention):
        return None
    width = module.n_embd
    q, k, v = fused(module.c_attn, width, width, width)
    return AttentionSite(
        name=name, module=module, layout=Layout(q, k, v, linear(module.c_proj)),
        num_heads=module.n_head, scale=(width // module.n_head) ** -0.5, is_causal=True,
    )  # fmt: skip


def test_own_module_is_refused_until_a_reader_describes_it():
    model = nn.Sequential(nn.Linear(12, 12), CausalSelfAttention(12, 3))
    with pytest.raises(ValueError, match=r"attention but.*'1'.*CausalSelfAttention.*readers"):
        find_attention(model)
    (site,) = find_attention(model, readers=[read_own_module])
    assert (site.name, site.num_heads, site.head_dim, site.is_causal) == ("1", 3, 4, True)
    assert torch.equal(site.read().v_weight, model[1].c_attn.weight[24:].T)


def test_half_of_the_attention_is_refused_too():
    model = nn.ModuleList([nn.MultiheadAttention(12, 3), CausalSelfAttention(12, 3)])
    with pytest.raises(ValueError, match="look like attention but cannot be read"):
        find_attention(model)
    assert len(find_attention(model, ignore=[CausalSelfAttention])) == 1


def test_case_a27_no_attention_lists_the_modules_seen():
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    with pytest.raises(ValueError, match=r"no attention found.*Linear x 2.*ReLU x 1.*own_module"):
        find_attention(model)


def test_unknown_parts_are_refused_by_name():
    model = HOSTS["llama"].build()
    model.model.layers[0].self_attn.memory = nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"layers.0.self_attn.*unknown parts: memory"):
        find_attention(model)
    model = HOSTS["timm_vit"].build()
    model.blocks[1].attn.temperature2 = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"blocks.1.attn.*unknown parts: temperature2"):
        find_attention(model)


def test_latent_attention_of_deepseek_is_refused():
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV3Config(
        vocab_size=67, hidden_size=32, intermediate_size=11, moe_intermediate_size=11,
        num_hidden_layers=1, num_attention_heads=4, n_routed_experts=8, q_lora_rank=7,
        kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"unknown parts: kv_a_layernorm, kv_a_proj_with_mqa"):
        find_attention(transformers.DeepseekV3ForCausalLM(config))


def test_a_key_that_is_no_token_is_refused():
    with pytest.raises(ValueError, match="add_bias_kv"):
        find_attention(nn.MultiheadAttention(12, 3, add_bias_kv=True))
    with pytest.raises(ValueError, match="add_zero_attn"):
        find_attention(nn.MultiheadAttention(12, 3, add_zero_attn=True))


def test_writing_what_does_not_fit_changes_nothing():
    model = HOSTS["llama"].build()
    site = find_attention(model)[0]
    before = copy.deepcopy(model.state_dict())
    weights = site.read().map(torch.randn_like)
    for name, wrong, words in [
        (
            "o_weight",
            torch.randn(3, 5),
            r"o_weight must have the host's.*\[3, 5\].*\[56, 60\]",
        ),
        ("q_bias", torch.randn(56), r"q_bias must be given where the host has one.*valid: None"),
        ("v_weight", None, r"v_weight must be given.*valid: a tensor"),
    ]:
        bad = copy.copy(weights)
        setattr(bad, name, wrong)
        with pytest.raises(ValueError, match=words):
            site.write(bad)
    assert all(torch.equal(values, before[name]) for name, values in model.state_dict().items())


def test_computed_and_quantised_and_absent_weights_are_refused():
    model = HOSTS["llama"].build()
    parametrizations.spectral_norm(model.model.layers[0].self_attn.q_proj)
    with pytest.raises(ValueError, match=r"weight must be a parameter"):
        find_attention(model)

    model = HOSTS["llama"].build()
    linear_layer = model.model.layers[0].self_attn.k_proj
    quantised = nn.Parameter(linear_layer.weight.to(torch.int8), requires_grad=False)
    linear_layer.weight = quantised
    with pytest.raises(ValueError, match=r"floating-point.*int8.*quantised"):
        find_attention(model)

    with torch.device("meta"):
        site = find_attention(HOSTS["gpt2"].build())[0]
    with pytest.raises(ValueError, match="meta device"):
        site.read()


def test_heads_that_do_not_fit_the_weights_are_refused():
    module = nn.Linear(12, 36), nn.Linear(12, 12)
    q, k, v = fused(module[0], 12, 12, 12)
    with pytest.raises(ValueError, match=r"num_heads must divide the outputs of q.*num_heads=5"):
        AttentionSite(name="x", module=module[0], layout=Layout(q, k, v), num_heads=5, scale=1.0)
    q, k, v = fused(module[0], 12, 9, 9)
    with pytest.raises(ValueError, match="whole heads"):
        AttentionSite(name="x", module=module[0], layout=Layout(q, k, v), num_heads=6, scale=1.0)
    with pytest.raises(ValueError, match=r"unknown kind.*'sideways'"):
        AttentionSite(
            name="x", module=module[0], layout=Layout(q, k, v), num_heads=4, scale=1.0,
            kind="sideways",
        )  # fmt: skip


def test_finding_loads_no_library():
    code = (
        "import sys, torch, levelhead as lh\n"
        "lh.find_attention(torch.nn.Transformer(8, 2, 1, 1, 3))\n"
        "print([name for name in ('timm', 'transformers') if name in sys.modules])"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr

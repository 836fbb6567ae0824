"""The same numbers from code that nobody here wrote: transformers' own attention, and torch's."""

import pytest
import torch
import torch.nn.functional as F

import levelhead as lh
from cases import NUM_KEYS, NUM_QUERIES, masks

transformers = pytest.importorskip("transformers")

B, T, E, H, HKV, D = 2, 7, 44, 4, 2, 10


@pytest.mark.parametrize("visibility", masks(NUM_QUERIES, NUM_KEYS))
def test_softmax_is_torch_attention(visibility):
    call = masks(NUM_QUERIES, NUM_KEYS)[visibility]
    query = torch.randn(B, 6, NUM_QUERIES, 5, dtype=torch.float64)
    key, value = (torch.randn(B, 3, NUM_KEYS, 5, dtype=torch.float64) for _ in range(2))
    scores = torch.zeros(1, 1, NUM_QUERIES, NUM_KEYS, dtype=torch.float64)
    if call.get("is_causal"):
        triangle = torch.ones(NUM_QUERIES, NUM_KEYS, dtype=torch.bool)
        scores = scores.masked_fill(~triangle.tril(NUM_KEYS - NUM_QUERIES), -torch.inf)
    if "attn_bias" in call:
        scores = scores + call["attn_bias"]
        scores = scores.masked_fill(scores <= torch.finfo(torch.float32).min / 2, -torch.inf)
    if "attn_mask" in call:
        scores = scores.masked_fill(~call["attn_mask"], -torch.inf)
    inner = lh.InnerAttention("softmax", embed_dim=30, num_heads=6, num_kv_heads=3)
    # The plain kernel of torch, asked for by name.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(query, key, value, scores, enable_gqa=True)
    torch.testing.assert_close(inner(query, key, value, **call), expected)


def leaves(num_queries=T):
    query = torch.randn(B, H, num_queries, D, dtype=torch.float64, requires_grad=True)
    key, value = (
        torch.randn(B, HKV, T, D, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    return query, key, value


def causal_bias():
    return torch.zeros(1, 1, T, T, dtype=torch.float64).masked_fill(
        ~lh.causal_mask(T, T), torch.finfo(torch.float64).min
    )


class Host(torch.nn.Module):
    """What transformers' eager functions read of their module."""

    num_key_value_groups = H // HKV

    def __init__(self, sinks=None):
        super().__init__()
        self.sinks = sinks


def assert_same(ours, theirs, inputs):
    torch.testing.assert_close(ours, theirs)
    direction = torch.randn_like(theirs)
    for one, other in zip(
        torch.autograd.grad((ours * direction).sum(), inputs),
        torch.autograd.grad((theirs * direction).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-8)


def test_sink_is_that_of_gpt_oss():
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    inputs = leaves()
    inner = lh.InnerAttention(
        "sink", embed_dim=E, num_heads=H, num_kv_heads=HKV, head_dim=D, dtype=torch.float64
    )
    torch.nn.init.normal_(inner.normaliser.score)
    host = Host(inner.normaliser.score)
    theirs, _ = eager_attention_forward(host, *inputs, causal_bias(), scaling=D**-0.5)
    ours = inner(*inputs, is_causal=True).transpose(1, 2)
    assert_same(ours, theirs, [*inputs, inner.normaliser.score])


def test_soft_cap_is_that_of_gemma_2():
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    inputs = leaves()
    inner = lh.InnerAttention(
        "soft_cap(cap=1.5)", embed_dim=E, num_heads=H, num_kv_heads=HKV, head_dim=D
    )
    theirs, _ = eager_attention_forward(
        Host(), *inputs, causal_bias(), scaling=D**-0.5, softcap=1.5
    )
    # transformers takes its softmax in float32 always, so its own weights carry that error
    ours = inner(*inputs, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


def rotary(tokens=T, width=D):
    angle = torch.arange(tokens, dtype=torch.float64)[:, None] * torch.rand(width // 2).double()
    angle = torch.cat([angle, angle], dim=-1)[None]
    return angle.cos(), angle.sin()


def sizes(**other):
    return {
        "hidden_size": E,
        "num_attention_heads": H,
        "num_key_value_heads": HKV,
        "head_dim": D,
        "attention_bias": True,
        "rms_norm_eps": 1e-12,
        "attn_implementation": "eager",
        **other,
    }


def build(module_class, config):
    """A host in float64 whose eager softmax does not fall back to float32."""
    host = module_class(config, 0).double().eval()
    with torch.no_grad():
        for parameter in host.parameters():
            parameter.copy_(0.4 * torch.randn_like(parameter))
    config._attn_implementation = "sdpa"
    return host


def copy_projections(host, layer, q_weight, q_bias):
    with torch.no_grad():
        layer.q_proj.weight.copy_(q_weight)
        layer.q_proj.bias.copy_(q_bias)
        for name in ("k_proj", "v_proj", "o_proj"):
            getattr(layer, name).load_state_dict(getattr(host, name).state_dict())


def set_gains(layer, q_gain, k_gain):
    """Unit vectors times gain g and RMS-normed rows with gain w and 1/sqrt(D): g = D^(1/4) w."""
    with torch.no_grad():
        layer.inner.norm.q_scale.copy_(D**0.25 * q_gain)
        layer.inner.norm.k_scale.copy_(D**0.25 * k_gain)


def layer_like(variant, num_heads=H, num_kv_heads=HKV):
    cos, sin = rotary()
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    layer = lh.Attention(
        E, num_heads, variant=variant, num_kv_heads=num_kv_heads, head_dim=D, qkv_bias=True,
        proj_bias=True, dtype=torch.float64,
        rope=lambda query, key: apply_rotary_pos_emb(query, key, cos, sin),
    )  # fmt: skip
    return layer, (cos, sin)


def test_query_key_norm_is_that_of_qwen3():
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

    host = build(Qwen3Attention, Qwen3Config(**sizes()))
    layer, embeddings = layer_like("qknorm_ds")
    copy_projections(host, layer, host.q_proj.weight, host.q_proj.bias)
    set_gains(layer, host.q_norm.weight, host.k_norm.weight)
    hidden_states = torch.randn(B, T, E, dtype=torch.float64)
    theirs, _ = host(hidden_states, embeddings, causal_bias())
    # their norm runs in float32
    torch.testing.assert_close(layer(hidden_states, is_causal=True), theirs, atol=2e-5, rtol=2e-5)


def test_query_key_norm_is_that_of_olmo_2_where_a_head_is_the_whole():
    """OLMo-2 norms all heads together: the same thing for one head."""
    from transformers import Olmo2Config
    from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention

    config = Olmo2Config(**sizes(num_attention_heads=1, num_key_value_heads=1))
    host = build(Olmo2Attention, config)
    layer, embeddings = layer_like("qknorm_ds", 1, 1)
    copy_projections(host, layer, host.q_proj.weight, host.q_proj.bias)
    set_gains(layer, host.q_norm.weight, host.k_norm.weight)
    hidden_states = torch.randn(B, T, E, dtype=torch.float64)
    theirs, _ = host(hidden_states, embeddings, causal_bias())
    torch.testing.assert_close(layer(hidden_states, is_causal=True), theirs, atol=2e-5, rtol=2e-5)


def test_elementwise_gate_is_that_of_qwen3_next():
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

    host = build(Qwen3NextAttention, Qwen3NextConfig(**sizes()))
    layer, embeddings = layer_like("qknorm_ds + gate(bias=True)")
    weight = host.q_proj.weight.unflatten(0, (H, 2, D))
    bias = host.q_proj.bias.unflatten(0, (H, 2, D))
    copy_projections(host, layer, weight[:, 0].flatten(0, 1), bias[:, 0].flatten())
    with torch.no_grad():
        layer.inner.gate.gate_proj.weight.copy_(weight[:, 1].flatten(0, 1))
        layer.inner.gate.gate_proj.bias.copy_(bias[:, 1].flatten())
    set_gains(layer, 1 + host.q_norm.weight, 1 + host.k_norm.weight)  # its gains count from one
    hidden_states = torch.randn(B, T, E, dtype=torch.float64)
    theirs, _ = host(hidden_states, embeddings, causal_bias())
    torch.testing.assert_close(layer(hidden_states, is_causal=True), theirs, atol=2e-5, rtol=2e-5)

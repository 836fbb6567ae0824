"""A site's weights, put into plain attention, give back what the host computes.

The plain attention below is written from the equations alone, in float64, so agreement proves the
layout, the order of heads, the grouping, the norms and the scale of every architecture at once.
"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hosts import HOSTS, run
from levelhead.sites.find import find_attention
from levelhead.sites.layout import ProjectionWeights
from levelhead.sites.sites import AttentionSite

T, S, B = 11, 13, 2
WINDOW_TOKENS = 16
FLOAT32_SOFTMAX = 1e-5
"""Hosts that take their softmax in float32 agree to its precision only."""


def split(projected: Tensor, num_heads: int) -> Tensor:
    return projected.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def normed(projected: Tensor, norm: nn.Module | None, num_heads: int, spans: bool) -> Tensor:
    if norm is None:
        return split(projected, num_heads)
    if spans:
        return split(norm(projected), num_heads)
    return norm(split(projected, num_heads))


def plain_attention(
    site: AttentionSite, weights: ProjectionWeights, hidden: Tensor, context: Tensor
) -> Tensor:
    """output = softmax(cap(scale * q k^T)) v, by the description of the site."""

    def project(letter: str, states: Tensor) -> Tensor:
        bias = getattr(weights, f"{letter}_bias")
        projected = states @ getattr(weights, f"{letter}_weight")
        return projected if bias is None else projected + bias

    asks = hidden[:, :1] if site.kind == "class" else hidden
    q = normed(project("q", asks), site.q_norm, site.num_heads, site.norm_spans_heads)
    k = normed(project("k", context), site.k_norm, site.num_kv_heads, site.norm_spans_heads)
    v = split(project("v", context), site.num_kv_heads)
    k, v = (t.repeat_interleave(site.num_heads // site.num_kv_heads, dim=1) for t in (k, v))
    over_channels = site.kind in ("cross_covariance", "channel")
    if over_channels:
        q, k, v = q.mT, k.mT, v.mT
    if site.is_cosine:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    scores = site.scale * q @ k.mT
    if site.head_scale is not None:
        scores = scores * site.head_scale()
    if site.soft_cap is not None:
        scores = site.soft_cap * (scores / site.soft_cap).tanh()
    if site.sink_score is not None:
        sink = site.sink_score.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores, v = torch.cat([scores, sink], -1), F.pad(v, (0, 0, 0, 1))
    attn_output = scores.softmax(-1) @ v
    merged = (attn_output.mT if over_channels else attn_output).transpose(1, 2).flatten(2)
    if site.output_norm is not None:
        merged = site.output_norm(merged)
    return project("o", merged)


WITHOUT_EFFECT = ("relative_position_bias_table", "conv", "cpb_mlp", "relative_attention_bias")


def neutralise(site: AttentionSite) -> None:
    """Random weights everywhere, but position biases, gates and convolutions without effect."""
    generator = torch.Generator().manual_seed(3)
    for parameter in site.module.parameters():
        parameter.normal_(0, 0.4, generator=generator)
    module = site.module
    for name, parameter in module.named_parameters():
        if name.split(".")[0] in WITHOUT_EFFECT:
            parameter.zero_()
    if type(module).__name__ == "Qwen3NextAttention":  # gate logits 0: a gate of one half
        module.q_proj.weight.view(site.num_heads, 2, site.head_dim, -1)[:, 1] = 0.0


def call_host(site: AttentionSite, hidden: Tensor, context: Tensor) -> Tensor:
    """What the host's own code makes of the hidden states: no mask, rotation by angle zero."""
    module = site.module
    if isinstance(module, nn.MultiheadAttention):
        return module(hidden, context, context, need_weights=False)[0]
    if type(module).__module__.startswith("timm"):
        return module(hidden)
    arguments = {"hidden_states": hidden}
    if site.has_rope:
        arguments["position_embeddings"] = rotation_by_nothing(site, hidden)
    if site.kind == "cross":
        name = "encoder_hidden_states" if hasattr(module, "q_attn") else "key_value_states"
        arguments[name] = context
    if type(module).__name__ != "T5Attention":
        arguments["attention_mask"] = None
    output = module(**arguments)[0]
    if not any(child is site.layout.o.weight.owner for child in module.modules()):
        output = site.layout.o.weight.owner(output)  # BERT: the output projection sits beside
    return 2 * output if site.has_gate else output


def rotation_by_nothing(site: AttentionSite, hidden: Tensor) -> tuple[Tensor, Tensor]:
    width = ROTATED.get(type(site.module).__name__, lambda head_dim: head_dim)(site.head_dim)
    angle = torch.zeros(1, hidden.shape[1], width, dtype=hidden.dtype)
    return angle.cos(), angle.sin()


ROTATED = {
    "GPTNeoXAttention": lambda head_dim: head_dim // 4,
    "Qwen3NextAttention": lambda head_dim: head_dim // 4,
    "GptOssAttention": lambda head_dim: head_dim // 2,
}
"""Width of the angles, where it is not the width of a head."""


def assert_same(plain: Tensor, expected: Tensor, site: AttentionSite) -> None:
    atol = FLOAT32_SOFTMAX * expected.abs().max().item()
    torch.testing.assert_close(plain, expected, rtol=0, atol=atol, msg=site.name)


@pytest.fixture(params=list(HOSTS))
def host(request):
    more = (
        {"attn_implementation": "eager"} if HOSTS[request.param].library == "transformers" else {}
    )
    return HOSTS[request.param].build(**more).double()


def states_for(site: AttentionSite) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    length = WINDOW_TOKENS if site.kind == "window" else T
    if hasattr(site.module, "relative_position_index"):  # its bias fits one number of tokens
        length = site.module.relative_position_index.shape[0]
    hidden = torch.randn(B, length, site.embed_dim, dtype=torch.double, generator=generator)
    if site.kind != "cross":
        return hidden, hidden
    shape = (B, S, site.kv_embed_dim)
    return hidden, torch.randn(shape, dtype=torch.double, generator=generator)


def randomised(weights: ProjectionWeights) -> ProjectionWeights:
    return weights.map(lambda t: torch.randn_like(t) * 0.3)


@torch.no_grad()
def test_read_weights_reproduce_the_host(host):
    for site in find_attention(host):
        neutralise(site)
        hidden, context = states_for(site)
        expected = call_host(site, hidden, context)
        plain = plain_attention(site, site.read(), hidden, context)
        assert expected.std() > 1e-3
        assert_same(plain, expected, site)


@torch.no_grad()
def test_written_weights_come_back_and_are_what_the_host_computes_with(host):
    for site in find_attention(host):
        neutralise(site)
        hidden, context = states_for(site)
        before = call_host(site, hidden, context)
        weights = randomised(site.read())
        site.write(weights)
        for field, values in vars(site.read()).items():
            assert values is None or torch.equal(values, getattr(weights, field)), field
        after = call_host(site, hidden, context)
        plain = plain_attention(site, weights, hidden, context)
        assert_same(plain, after, site)
        assert (after - before).abs().max() > 1e-2


def test_writing_what_was_read_changes_no_bit_and_no_object(host):
    before = {name: (p, p.detach().clone()) for name, p in host.named_parameters()}
    for site in find_attention(host):
        site.write(site.read())
    for name, parameter in host.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])


@pytest.mark.parametrize("name", list(HOSTS))
def test_sites_are_complete_ordered_and_own_what_they_name(name):
    model = HOSTS[name].build()
    sites = find_attention(model)
    assert [site.layer_idx for site in sites] == list(range(HOSTS[name].num_sites))
    for site in sites:
        assert model.get_submodule(site.name) is site.module
        owned = {id(parameter) for parameter in model.parameters()}
        assert {id(parameter) for parameter in site.parameters()} <= owned
        assert site.tied_with == ()
    with torch.no_grad():
        run(model, HOSTS[name].batch())


def test_a_wrong_scale_or_head_order_would_be_seen():
    model = HOSTS["gpt_neox"].build(attn_implementation="eager").double()
    site = find_attention(model)[0]
    with torch.no_grad():
        neutralise(site)
        hidden, context = states_for(site)
        expected = call_host(site, hidden, context)
        doubled = dataclasses.replace(site, scale=2 * site.scale)
        weights = site.read()
        rolled = dataclasses.replace(weights, q_weight=weights.q_weight.roll(site.head_dim, 1))
        for plain in (
            plain_attention(doubled, weights, hidden, context),
            plain_attention(site, rolled, hidden, context),
        ):
            assert (plain - expected).abs().max() > 1e-3

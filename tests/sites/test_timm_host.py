"""Converted timm attentions: the stock model at the neutral setting, the equation elsewhere."""

import copy
import pickle

import pytest
import timm
import torch
import torch.nn.functional as F
from converting import assert_same_gradients, gradients, install, randomise, uninstall
from timm.layers.attention import Attention, AttentionRope
from timm.layers.pos_embed_rel import RelPosBias
from timm.layers.pos_embed_sincos import RotaryEmbeddingCat
from timm.models.cait import ClassAttn
from timm.models.davit import ChannelAttention
from timm.models.davit import WindowAttention as DavitWindow
from timm.models.eva import EvaAttention
from timm.models.swin_transformer import WindowAttention
from timm.models.swin_transformer_v2 import WindowAttention as CosineWindow
from timm.models.vision_transformer_relpos import RelPosAttention
from timm.models.xcit import XCA
from torch import nn

from hosts import HOSTS, run
from levelhead.sites.find import find_attention
from levelhead.sites.host import installed_in

TIMM = [name for name, host in HOSTS.items() if host.library == "timm"]
E, H, B, T, D = 40, 5, 2, 16, 8
EXACT = 1e-10


def hidden_states(length=T, width=E):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(B, length, width, dtype=torch.double, generator=generator)


def rope(num_tokens=T):
    angles = RotaryEmbeddingCat(D, max_res=4, feat_shape=[4, num_tokens // 4], in_pixels=False)
    return angles.get_embed().double()


NORM = {"qk_norm": True, "norm_layer": nn.LayerNorm}
SEPARATE = {"qkv_fused": False, "num_prefix_tokens": 0}
MODULES = {
    "plain": lambda: Attention(E, H),
    "bias": lambda: Attention(E, H, qkv_bias=True),
    "norms": lambda: Attention(E, H, qkv_bias=True, scale_norm=True, **NORM),
    "gated": lambda: Attention(E, H, qkv_bias=True, gated=True),
    "wide_heads": lambda: Attention(E, H, attn_head_dim=7, dim_out=11),
    "rope": lambda: AttentionRope(E, H, num_prefix_tokens=0, **NORM),
    "rope_grouped": lambda: AttentionRope(
        E, 6, attn_head_dim=D, num_kv_heads=2, **SEPARATE, **NORM
    ),
    "eva_separate": lambda: EvaAttention(
        E, H, scale_norm=True, rotate_half=True, **NORM, **SEPARATE
    ),
    "eva_late_bias": lambda: EvaAttention(
        E, H, scale_norm=False, qkv_bias_separate=True, gated=True, num_prefix_tokens=0
    ),
    "relative_bias": lambda: RelPosAttention(
        E, H, rel_pos_cls=lambda num_heads, **dd: RelPosBias((4, 4), num_heads, **dd), **NORM
    ),
    "swin": lambda: WindowAttention(E, H, head_dim=7, window_size=4),
    "swin_v2": lambda: CosineWindow(E, (4, 4), H),
    "swin_v2_late_bias": lambda: CosineWindow(E, (4, 4), H, qkv_bias_separate=True),
    "class": lambda: ClassAttn(E, H),
    "class_bias": lambda: ClassAttn(E, H, qkv_bias=True),
    "xca": lambda: XCA(E, H, qkv_bias=True),
    "davit_window": lambda: DavitWindow(E, (4, 4), H),
    "davit_channel": lambda: ChannelAttention(E, H, qkv_bias=True),
}


def region_mask():
    """What Swin hands to two windows: -100 between the two regions of the second."""
    region = torch.arange(T) < 6
    mask = torch.zeros(2, T, T, dtype=torch.double)
    mask[1][region[:, None] != region[None, :]] = -100.0
    return mask


def calls(name):
    """Arguments beside the hidden states that the stock module takes."""
    if name.startswith("swin"):
        return [{}, {"mask": region_mask()}]
    if name.startswith(("rope", "eva")):
        return [{}, {"rope": rope()}, {"rope": rope(), "is_causal": True}]
    if name in ("plain", "bias", "norms", "gated", "wide_heads"):
        generator = torch.Generator().manual_seed(4)
        allowed = torch.rand(B, 1, T, T, generator=generator) < 0.7
        allowed[..., 0] = True
        bias = torch.randn(T, T, dtype=torch.double, generator=generator)
        return [{}, {"attn_mask": allowed}, {"attn_mask": bias}, {"is_causal": True}]
    return [{}]


def module_and_twin(name, variant="softmax"):
    torch.manual_seed(0)
    stock = randomise(MODULES[name]().double())
    twin = copy.deepcopy(stock)
    install(twin, variant)
    return stock, twin


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("is_fused", [True, False])
def test_neutral_module_equals_stock_in_values_and_gradients(name, is_fused):
    stock, twin = module_and_twin(name)
    for module in (stock, twin):
        module.fused_attn = is_fused
    inputs = hidden_states().requires_grad_()
    for arguments in calls(name):
        expected, found = stock(inputs, **arguments), twin(inputs, **arguments)
        torch.testing.assert_close(found, expected, rtol=0, atol=EXACT)
        assert_same_gradients(
            gradients(stock, expected, inputs), gradients(twin, found, inputs), EXACT
        )


@pytest.mark.parametrize("name", TIMM)
def test_neutral_model_equals_stock_and_comes_back(name):
    stock = randomise(HOSTS[name].build().double())
    model = copy.deepcopy(stock)
    inputs = HOSTS[name].batch().double().requires_grad_()
    expected = run(stock, inputs)
    classes = [type(module) for module in model.modules()]
    sites = install(model, "softmax")
    found = run(model, inputs)
    torch.testing.assert_close(found, expected, rtol=EXACT, atol=0)
    assert_same_gradients(
        gradients(stock, expected, inputs), gradients(model, found, inputs), EXACT
    )
    assert list(model.state_dict()) == list(stock.state_dict())
    uninstall(sites)
    assert [type(module) for module in model.modules()] == classes
    assert torch.equal(run(model, inputs), expected)


UNCHANGED = (
    "spectral(strength=0)", "spectral(strength=0, layout='per_head')", "sigma_reparam",
    "sink(start=-1e4)",
)  # fmt: skip


@pytest.mark.parametrize("name", TIMM)
@pytest.mark.parametrize("variant", UNCHANGED)
def test_variants_at_their_neutral_setting_change_nothing(name, variant):
    stock = randomise(HOSTS[name].build().double())
    model = copy.deepcopy(stock)
    install(model, variant)
    inputs = HOSTS[name].batch().double()
    with torch.no_grad():
        torch.testing.assert_close(run(model, inputs), run(stock, inputs), rtol=1e-8, atol=1e-8)


def test_spectral_acts_on_the_projection_of_its_role():
    """DaViT's channel attention names its query k: adding to V must not touch the scores."""
    stock, twin = module_and_twin("davit_channel", "spectral(strength=2)")
    folded = copy.deepcopy(stock)
    with torch.no_grad():
        folded.qkv.weight.add_(2 * torch.eye(E, dtype=torch.double).repeat(3, 1))
        torch.testing.assert_close(twin(hidden_states()), folded(hidden_states()))


def plain_parts(module, inputs):
    query, key, value = (
        part.unflatten(-1, (H, D)).transpose(1, 2) for part in module.qkv(inputs).chunk(3, dim=-1)
    )
    return query, key, value


def by_equation(twin, variant, query, key, value, inputs):
    """The methods written out once more, without this library."""
    inner, scale = installed_in(twin).inner, D**-0.5
    if variant == "quest":
        key, scale = key / key.norm(dim=-1, keepdim=True), 1.0
    scores = scale * query @ key.mT
    if variant == "sink":
        weights = scores.exp() / (
            scores.exp().sum(-1, keepdim=True) + inner.normaliser.score.exp()[:, None, None]
        )
    else:
        weights = scores.softmax(-1)
    if variant == "affine":
        alpha = (0.1 * inputs @ inner.weights.alpha_proj.weight.mT + 0.5).clamp(0, 1).mT[..., None]
        mean = inner.weights.alpha_mean[:, None, None]
        weights = alpha * weights + (mean - alpha) / scores.shape[-1]
    attn_output = weights @ value
    if variant == "precondition":
        attn_output = attn_output / attn_output.norm(dim=-1, keepdim=True)
    return attn_output


def gate(twin, inputs):
    logits = installed_in(twin).inner.gate.gate_proj(inputs)
    return logits.sigmoid().unflatten(-1, (H, D)).transpose(1, 2)


@pytest.mark.parametrize("variant", ["quest", "sink", "affine", "precondition", "gate"])
@torch.no_grad()
def test_variants_follow_their_equation_over_tokens(variant):
    stock, twin = module_and_twin("bias", variant)
    randomise(installed_in(twin))
    inputs = hidden_states()
    if variant == "affine":
        twin.train()(inputs)
        twin.eval()
    attn_output = by_equation(twin, variant, *plain_parts(stock, inputs), inputs)
    if variant == "gate":
        attn_output = attn_output * gate(twin, inputs)
    expected = stock.proj(attn_output.transpose(1, 2).flatten(2))
    torch.testing.assert_close(twin(inputs), expected, rtol=0, atol=EXACT)
    assert (expected - stock(inputs)).abs().max() > 1e-2


@pytest.mark.parametrize("variant", ["quest", "sink", "precondition", "gate"])
@torch.no_grad()
def test_variants_follow_their_equation_over_channels(variant):
    stock, twin = module_and_twin("davit_channel", variant)
    randomise(installed_in(twin))
    inputs = hidden_states()
    third, first, second = plain_parts(stock, inputs)
    query, key, value = first.mT, second.mT, third.mT
    attn_output = by_equation(twin, variant, query, key, value, inputs).mT
    if variant == "gate":
        attn_output = attn_output * gate(twin, inputs)
    expected = stock.proj(attn_output.transpose(1, 2).flatten(2))
    torch.testing.assert_close(twin(inputs), expected, rtol=0, atol=EXACT)
    assert (expected - stock(inputs)).abs().max() > 1e-2


@torch.no_grad()
def test_gains_act_before_the_rotation():
    stock, twin = module_and_twin("eva_late_bias", "qknorm_ds")
    norm = randomise(installed_in(twin).inner.norm)
    inputs, angles = hidden_states(), rope()
    query, key, value = (
        rows.unflatten(-1, (H, D)).transpose(1, 2)
        for rows in (
            F.linear(inputs, stock.qkv.weight)
            + torch.cat([stock.q_bias, stock.k_bias, stock.v_bias])
        ).chunk(3, dim=-1)
    )
    query = F.normalize(query, dim=-1) * norm.q_scale
    key = F.normalize(key, dim=-1) * norm.k_scale

    def turn(rows):
        sine, cosine = angles.chunk(2, dim=-1)
        swapped = torch.stack([-rows[..., 1::2], rows[..., ::2]], -1).flatten(-2)
        return rows * cosine + swapped * sine

    attn_output = (turn(query) @ turn(key).mT).softmax(-1) @ value
    merged = attn_output.transpose(1, 2).flatten(2) * stock.gate(inputs).sigmoid()
    torch.testing.assert_close(twin(inputs, rope=angles), stock.proj(merged), rtol=0, atol=EXACT)


@pytest.mark.parametrize("variant", ["softmax", "affine", "sink", "affine + gate"])
@torch.no_grad()
def test_shifted_windows_do_not_reach_across_regions(variant):
    """timm's -100 forbids: not even the sums of affine see the other region."""
    twin = module_and_twin("swin", variant)[1].eval()
    inputs, mask = hidden_states(), region_mask()
    changed = inputs.clone()
    changed[:, 0] += 1.0  # in the first region
    before, after = twin(inputs, mask=mask), twin(changed, mask=mask)
    assert torch.equal(before[1, 6:], after[1, 6:])
    assert not torch.equal(before[1, :6], after[1, :6])
    assert not torch.equal(before[0, 6:], after[0, 6:])  # one region: no mask


@torch.no_grad()
def test_mask_and_causality_both_apply():
    _, twin = module_and_twin("plain")
    inputs = hidden_states()
    allowed = torch.ones(T, T, dtype=torch.bool)
    allowed[5, 2] = False
    both = twin(inputs, attn_mask=allowed, is_causal=True)
    merged = twin(inputs, attn_mask=allowed.tril())
    torch.testing.assert_close(both, merged, rtol=0, atol=EXACT)


def test_attention_dropout_of_the_host_is_kept():
    torch.manual_seed(0)
    module = Attention(E, H, attn_drop=0.4)
    install(module, "quest")
    inner = installed_in(module).inner
    assert inner.dropout_p == 0.4
    inputs = hidden_states().float()
    assert not torch.equal(module.train()(inputs), module(inputs))
    assert torch.equal(module.eval()(inputs), module(inputs))


@pytest.mark.parametrize("name", ["plain", "swin", "xca"])
def test_copies_and_pickles_of_a_converted_module_run_and_come_back(name):
    stock, twin = module_and_twin(name, "sink")
    inputs = hidden_states()
    expected = twin(inputs)
    for made in (copy.deepcopy(twin), pickle.loads(pickle.dumps(twin))):
        assert isinstance(made, type(stock))
        assert torch.equal(made(inputs), expected)
        uninstall(find_attention(made))
        assert type(made) is type(stock)
        torch.testing.assert_close(made(inputs), stock(inputs), rtol=0, atol=0)


def test_low_precision_under_autocast_stays_close():
    stock, twin = module_and_twin("rope", "softmax")
    inputs, angles = hidden_states().float(), rope().float()
    stock, twin = stock.float(), twin.float()
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = stock(inputs, rope=angles), twin(inputs, rope=angles)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02 * expected.abs().max().item())


def test_a_subclass_with_its_own_forward_is_refused():
    class Doubled(Attention):
        def forward(self, x):
            return 2 * super().forward(x)

    with pytest.raises(ValueError, match=r"Doubled has a forward of its own.*nothing is known"):
        install(Doubled(E, H), "quest")


def test_a_subclass_without_one_keeps_what_it_adds():
    class Named(Attention):
        def shout(self):
            return "AHA"

    module = Named(E, H)
    install(module, "quest")
    assert isinstance(module, Named)
    assert module.shout() == "AHA"


COMPILED = [
    "xcit",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("timm_vit", "swin", "davit", "eva")),
]


@pytest.mark.compile
@pytest.mark.parametrize("name", COMPILED)
def test_one_graph_and_the_same_gradients(name):
    torch.compiler.reset()
    model = randomise(HOSTS[name].build())
    install(model, "sink")
    inputs = HOSTS[name].batch().requires_grad_()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected, found = run(model, inputs), run(compiled, inputs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert_same_gradients(
        gradients(model, expected, inputs), gradients(model, found, inputs), 1e-4
    )


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("name", TIMM)
@pytest.mark.parametrize("variant", ["softmax", "gate + precondition", "sigma_reparam"])
def test_export_gives_the_same_numbers(name, variant):
    torch.compiler.reset()
    model = randomise(HOSTS[name].build())
    install(model, variant)
    inputs = HOSTS[name].batch()
    exported = torch.export.export(model, (inputs,)).module()
    torch.testing.assert_close(exported(inputs), run(model, inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.compile
def test_export_of_a_converted_vit():
    model = HOSTS["timm_vit"].build()
    install(model, "quest")
    inputs = HOSTS["timm_vit"].batch()
    exported = torch.export.export(model, (inputs,)).module()
    torch.testing.assert_close(exported(inputs), run(model, inputs))


@pytest.mark.filterwarnings("ignore::UserWarning:timm")  # its own interpolation
def test_window_size_can_still_change():
    model = HOSTS["swin"].build()
    install(model, "quest")
    model.set_input_size(img_size=32, window_size=(8, 8))
    with torch.no_grad():
        assert model(torch.randn(1, 3, 32, 32)).shape == (1, 5)


def test_reset_classifier_and_no_weight_decay_still_answer():
    model = timm.create_model("xcit_nano_12_p8_224", img_size=16, embed_dim=45, depth=1,
                              num_heads=3, num_classes=5)  # fmt: skip
    install(model, "sink")
    assert model.blocks[0].attn.no_weight_decay() == {"temperature"}

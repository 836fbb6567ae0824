"""Converted ``nn.MultiheadAttention``: stock at the neutral setting, whatever the masks say."""

import copy
import itertools
import pickle

import pytest
import torch
from converting import assert_same_gradients, gradients, install, uninstall
from torch import nn

from hosts import HOSTS, run
from levelhead.sites.find import find_attention
from levelhead.sites.host import installed_in

E, H, B, T, S = 30, 5, 2, 7, 11
EXACT = 1e-10
LAYOUTS = ("batch_first", "tokens_first", "unbatched")


def pair(variant="softmax", **options):
    """A stock attention and its converted twin, in double precision."""
    torch.manual_seed(0)
    stock = nn.MultiheadAttention(E, H, **options).double()
    twin = copy.deepcopy(stock)
    install(twin, variant)
    return stock, twin


def states(layout, length, width=E):
    rows = torch.randn(B, length, width, dtype=torch.double)
    return {
        "batch_first": rows,
        "tokens_first": rows.transpose(0, 1).contiguous(),
        "unbatched": rows[0],
    }[layout]


def masks(layout, num_keys):
    """Every pair of masks the stock module takes; True = may not attend, key 0 always may."""
    batch = 1 if layout == "unbatched" else B
    plain, per_head = (torch.rand(*shape, T, num_keys) > 0.6 for shape in ((), (batch * H,)))
    padding = torch.zeros(batch, num_keys, dtype=torch.bool)
    padding[0, -3:] = True
    padding = padding[0] if layout == "unbatched" else padding
    for mask in (plain, per_head):
        mask[..., 0] = False
    floats = [torch.randn(mask.shape, dtype=torch.double) for mask in (plain, per_head)]
    float_padding = torch.zeros(padding.shape, dtype=torch.double).masked_fill(padding, -torch.inf)
    yield from itertools.product([None, plain, per_head], [None, padding])
    yield from itertools.product(floats, [None, float_padding])


def assert_same_result(stock, twin, inputs, **call):
    expected, found = stock(*inputs, **call), twin(*inputs, **call)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=EXACT)
    assert (found[1] is None) == (expected[1] is None)
    if expected[1] is not None:
        torch.testing.assert_close(found[1], expected[1], rtol=0, atol=EXACT)
    assert_same_gradients(
        gradients(stock, expected[0], inputs[0]), gradients(twin, found[0], inputs[0]), EXACT
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["self", "cross", "three", "widths"])
@pytest.mark.parametrize("bias", [True, False])
def test_neutral_equals_stock_under_every_mask(layout, kind, bias):
    widths = {"kdim": 13, "vdim": 17} if kind == "widths" else {}
    stock, twin = pair(bias=bias, batch_first=layout == "batch_first", **widths)
    query = states(layout, T).requires_grad_()
    key = query if kind == "self" else states(layout, S, widths.get("kdim", E))
    value = key if kind in ("self", "cross") else states(layout, S, widths.get("vdim", E))
    num_keys = T if kind == "self" else S
    for (mask, padding), need_weights in itertools.product(masks(layout, num_keys), [True, False]):
        assert_same_result(
            stock, twin, (query, key, value), attn_mask=mask, key_padding_mask=padding,
            need_weights=need_weights, average_attn_weights=mask is None,
        )  # fmt: skip


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("has_padding", [True, False])
def test_the_causal_hint_means_what_it_means_in_torch(need_weights, has_padding):
    stock, twin = pair(batch_first=True)
    inputs = [states("batch_first", T).requires_grad_()] * 3
    causal = torch.ones(T, T).triu(1).bool()
    padding = torch.zeros(B, T, dtype=torch.bool)
    padding[0, -2:] = True
    assert_same_result(
        stock, twin, inputs, attn_mask=causal, is_causal=True, need_weights=need_weights,
        key_padding_mask=padding if has_padding else None,
    )  # fmt: skip


def test_the_hint_alone_is_refused():
    _, twin = pair()
    inputs = [states("tokens_first", T)] * 3
    with pytest.raises(ValueError, match=r"attn_mask must be given, got is_causal=True"):
        twin(*inputs, is_causal=True)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ({"attn_mask": torch.ones(T, S + 1, dtype=torch.bool)}, r"attn_mask must fit.*\(7, 11\)"),
        ({"attn_mask": torch.ones(B, T, S)}, r"attn_mask must fit.*\(10, 7, 11\)"),
        ({"attn_mask": torch.ones(T, S, dtype=torch.long)}, r"boolean \(True = may not attend\)"),
        ({"key_padding_mask": torch.ones(B, T)}, r"key_padding_mask must fit.*\(2, 11\)"),
    ],
)
def test_masks_that_do_not_fit_are_refused(mask, words):
    _, twin = pair(batch_first=True)
    query, key = states("batch_first", T), states("batch_first", S)
    with pytest.raises(ValueError, match=words):
        twin(query, key, key, **mask)


@pytest.mark.parametrize("variant", ["softmax", "quest", "sink", "affine", "quest + gate"])
@torch.no_grad()
def test_case_a03_true_means_ignore_here_and_the_future_stays_hidden(variant):
    """L=5, ``triu(1)``: outputs 0 to 3 must not see token 4; the inverted mask must leak."""
    _, twin = pair(variant, batch_first=True)
    twin.eval()
    mask = torch.ones(5, 5).triu(1).bool()
    inputs = states("batch_first", 5)
    changed = inputs.clone()
    changed[:, 4] += 1.0

    def moved(mask):
        before, after = (
            twin(x, x, x, attn_mask=mask, need_weights=False)[0] for x in (inputs, changed)
        )
        return (before - after).abs().amax(dim=(0, 2))

    assert moved(mask)[:4].eq(0).all()
    assert moved(mask)[4] > 1e-3
    assert moved(~mask)[:4].max() > 1e-3


@torch.no_grad()
def test_weights_and_fused_form_agree_for_every_stage():
    _, twin = pair("quest + sink + affine + gate", batch_first=True)
    twin.eval()
    inputs = [states("batch_first", T)] * 3
    with_weights, weights = twin(*inputs, average_attn_weights=False)
    torch.testing.assert_close(
        with_weights, twin(*inputs, need_weights=False)[0], rtol=0, atol=EXACT
    )
    assert weights.shape == (B, H, T, T)


@torch.no_grad()
def test_running_mean_of_affine_counts_every_query_of_cross_attention():
    """Keys that are padding say nothing about queries that are not."""
    _, twin = pair("affine", batch_first=True)
    query, key = states("batch_first", T), states("batch_first", T)
    padding = torch.zeros(B, T, dtype=torch.bool)
    padding[:, 3:] = True
    part = installed_in(twin).inner.weights
    twin.train()(query, key, key, key_padding_mask=padding, need_weights=False)
    alpha = (0.1 * query @ part.alpha_proj.weight.mT + 0.5).clamp(0, 1)
    torch.testing.assert_close(part.alpha_mean, 0.1 * alpha.mean(dim=(0, 1)))


@pytest.mark.parametrize("variant", ["spectral(strength=0)", "sigma_reparam", "sink(start=-1e4)"])
@pytest.mark.parametrize("name", ["torch_encoder", "torch_pair"])
@torch.no_grad()
def test_variants_at_their_neutral_setting_change_nothing(name, variant):
    stock = HOSTS[name].build().double()
    model = copy.deepcopy(stock)
    install(model, variant)
    batch = HOSTS[name].batch()
    batch = batch.double() if torch.is_tensor(batch) else {k: v.double() for k, v in batch.items()}
    torch.testing.assert_close(run(model, batch), run(stock, batch), rtol=0, atol=1e-9)


def encoder(num_heads, is_nested=True):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32 if num_heads == 4 else 30, num_heads, 13,
                                       batch_first=True)  # fmt: skip
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=is_nested).eval()


@pytest.mark.filterwarnings("ignore:.*nested tensor")
@pytest.mark.parametrize(("num_heads", "is_nested"), [(4, True), (4, False), (3, False)])
@pytest.mark.parametrize("has_padding", [True, False])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_case_a09_the_fast_path_is_never_taken(num_heads, is_nested, has_padding, mode):
    stock = encoder(num_heads, is_nested)
    model, calls = copy.deepcopy(stock), []
    for site in install(model, "softmax"):
        site.module.register_forward_hook(lambda *_, name=site.name: calls.append(name))
        installed_in(site.module).inner.register_forward_hook(lambda *_: calls.append("inner"))
    hidden = torch.randn(3, T, 32 if num_heads == 4 else 30)
    padding = torch.zeros(3, T, dtype=torch.bool)
    padding[0, 4:] = padding[2, 6:] = True
    with mode():
        expected = stock(hidden, src_key_padding_mask=padding if has_padding else None)
        found = model(hidden, src_key_padding_mask=padding if has_padding else None)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert calls == ["inner", "layers.0.self_attn", "inner", "layers.1.self_attn"]


@pytest.mark.filterwarnings("ignore:.*nested tensor")
def test_case_a09_without_hooks_neither():
    """Hooks themselves switch the fast path off, so this looks at what is computed."""
    model = encoder(4)
    install(model, "quest")
    hidden = torch.randn(3, T, 32)
    with torch.inference_mode():
        fast = model(hidden)
    torch.testing.assert_close(fast, model(hidden), rtol=0, atol=1e-6)
    with torch.inference_mode():
        assert (fast - encoder(4)(hidden)).abs().max() > 1e-3


def test_uninstall_gives_the_very_same_module_back():
    stock, twin = pair(batch_first=True)
    before = vars(stock).keys()
    uninstall(find_attention(twin))
    assert type(twin) is nn.MultiheadAttention
    assert vars(twin).keys() == before
    inputs = [states("batch_first", T)] * 3
    assert torch.equal(twin(*inputs)[0], stock(*inputs)[0])


def test_copies_and_pickles_run_and_weights_can_be_reset():
    _, twin = pair("sink", batch_first=True)
    inputs = [states("batch_first", T)] * 3
    for made in (copy.deepcopy(twin), pickle.loads(pickle.dumps(twin))):
        assert torch.equal(made(*inputs)[0], twin(*inputs)[0])
    kept = twin.in_proj_weight.clone()
    twin._reset_parameters()
    assert type(twin).__name__ == "LevelheadMultiheadAttention"
    assert not torch.equal(twin.in_proj_weight, kept)


def test_refusals_say_why():
    class Doubled(nn.MultiheadAttention):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    with pytest.raises(ValueError, match=r"Doubled has a forward of its own"):
        install(Doubled(E, H), "quest")
    with pytest.raises(ValueError, match=r"one width, not kdim=13, vdim=17"):
        install(nn.MultiheadAttention(E, H, kdim=13, vdim=17), "spectral")
    with pytest.raises(ValueError, match=r"add a key that is no token"):
        install(nn.MultiheadAttention(E, H, add_bias_kv=True), "quest")


@pytest.mark.compile
@pytest.mark.parametrize(
    "variant", ["quest", pytest.param("affine + gate", marks=pytest.mark.slow)]
)
def test_one_graph_and_the_same_gradients(variant):
    torch.compiler.reset()
    model = HOSTS["torch_encoder"].build()
    install(model, variant)
    inputs = HOSTS["torch_encoder"].batch().requires_grad_()
    mask = nn.Transformer.generate_square_subsequent_mask(11)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected, found = (m(inputs, mask=mask, is_causal=True) for m in (model, compiled))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert_same_gradients(
        gradients(model, expected, inputs), gradients(model, found, inputs), 1e-4
    )

"""Capped attention on a CPU, tile by tile, against the reference: output and every gradient."""

import pytest
import torch

import levelhead as lh
from levelhead import capped_tiles
from levelhead.capped_kernel import CappedKernel
from levelhead.compiled import find_compiler

B, H, HKV, T, S, D, DV = 2, 6, 3, 11, 13, 5, 7


@pytest.fixture(params=["one tile", "many tiles"])
def _tile_size(request, monkeypatch):
    if request.param == "many tiles":
        monkeypatch.setattr(capped_tiles, "_TILE_QUERIES", 3)
        monkeypatch.setattr(capped_tiles, "_TILE_KEYS", 5)
        monkeypatch.setattr(capped_tiles, "_DIAGONAL_KEYS", 2)
        heads_at_a_time = 4
        room = 3 * 5 * 8 * heads_at_a_time
        monkeypatch.setattr(capped_tiles, "_TILE_BYTES", room // torch.get_num_threads())


@pytest.fixture(params=["compiled", "tiles"])
def _form(request, monkeypatch):
    if request.param == "tiles":
        monkeypatch.setattr(CappedKernel, "fits", lambda *inputs: False)
    elif find_compiler() is None:
        pytest.skip("no C compiler for this processor")


def draw(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def visible(*shape):
    """A mask in which one query may attend to nothing."""
    mask = torch.rand(shape) < 0.6
    mask[..., 2 if shape[-2] > 2 else 0, :] = False
    return mask


MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "heads": {"attn_mask": visible(B, H, T, S)},
    "padding": {"attn_mask": torch.arange(S) < torch.tensor([5, 13])[:, None, None, None]},
    "bias": {"attn_bias": torch.randn(1, H, T, S).masked_fill(~visible(T, S), -torch.inf)},
    "all": {
        "attn_mask": visible(B, 1, 1, S), "attn_bias": torch.randn(B, 1, T, 1), "is_causal": True
    },
}  # fmt: skip


@pytest.mark.usefixtures("_tile_size")
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("normaliser", ["softmax", "off_by_one", "sink(start=0.7)"])
def test_output_and_gradients_are_those_of_the_reference(normaliser, masks):
    variant = f"soft_cap(cap=1.3) + {normaliser}"
    inner = lh.InnerAttention(
        variant, embed_dim=H * D, num_heads=H, num_kv_heads=HKV, head_dim=D, dtype=torch.float64
    )
    query, key, value = draw(B, H, T, D), draw(B, HKV, S, D), draw(B, HKV, S, DV)
    masks = {
        k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in masks.items()
    }
    learning = [query, key, value, *inner.parameters()]
    grad = torch.randn(B, H, T, DV, dtype=torch.float64)
    output = inner(query, key, value, **masks)
    assert type(output.grad_fn).__name__ == "CappedAttentionBackward"
    expected = lh.reference_attention(inner, query, key, value, **masks).attn_output
    torch.testing.assert_close(output, expected, atol=1e-12, rtol=1e-12)
    found = torch.autograd.grad(output, learning, grad)
    torch.testing.assert_close(found, torch.autograd.grad(expected, learning, grad))


@pytest.mark.usefixtures("_form")
@pytest.mark.parametrize("cap", [2.0, 50.0])
@pytest.mark.parametrize("size", [0.01, 1.0, 10.0])
def test_float32_is_as_near_to_float64_as_its_scores_allow(cap, size):
    inner = lh.InnerAttention(f"soft_cap(cap={cap})", embed_dim=H * D, num_heads=H)
    query, key, value = (torch.randn(B, H, 131, D) for _ in range(3))
    wide = [t.double() for t in (size * query, key, value)]
    error = inner(size * query, key, value, is_causal=True) - inner(*wide, is_causal=True)
    assert error.abs().max() < 1e-5 * value.abs().max()


@pytest.mark.usefixtures("_tile_size")
@pytest.mark.parametrize("normaliser", ["softmax", "sink(start=-300.0)", "sink(start=300.0)"])
@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0])
def test_scores_far_from_each_other_and_from_the_cap_keep_their_digits(size, normaliser):
    """Rows whose every score is at one end of the band, or far outside it by a bias."""
    inner = lh.InnerAttention(f"soft_cap(cap=80.0) + {normaliser}", embed_dim=H * D, num_heads=H)
    signs = torch.tensor([1.0, -1.0, 0.0])[:, None].repeat(4, 1)[:T]
    query, key, value = (torch.randn(B, H, n, D) for n in (T, S, S))
    query, key = query.abs() * signs * size, key.abs() * size
    bias = size * torch.randn(1, H, T, S)
    inputs = [t.requires_grad_() for t in (query, key, value)]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    output = inner(*inputs, attn_bias=bias)
    expected = lh.reference_attention(inner.double(), *wide, attn_bias=bias.double()).attn_output
    torch.testing.assert_close(output.double(), expected, rtol=1e-3, atol=1e-4)
    grad = torch.randn_like(output)
    found = torch.autograd.grad(output, inputs, grad)
    for got, want in zip(found, torch.autograd.grad(expected, wide, grad.double()), strict=True):
        assert (got - want).abs().max() <= 1e-3 * max(1.0, want.abs().max())


@pytest.mark.parametrize(
    ("cap", "options"),
    [
        (2.0, {"dropout_p": 0.3}),
        (2.0, {"attn_bias": torch.zeros(T, T, requires_grad=True)}),
        (100.0, {}),
    ],
)
def test_what_it_cannot_take_goes_the_plain_way(cap, options):
    inner = lh.InnerAttention(f"soft_cap(cap={cap})", embed_dim=H * D, num_heads=H)
    output = inner(*(draw(B, H, T, D, dtype=torch.float32) for _ in range(3)), **options)
    assert type(output.grad_fn).__name__ != "CappedAttentionBackward"


def test_no_matrix_of_scores_is_kept_for_the_backward_pass():
    inner = lh.InnerAttention("soft_cap(cap=2.0)", embed_dim=H * D, num_heads=H)
    kept = []
    tensors = [draw(B, H, 257, D, dtype=torch.float32) for _ in range(3)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        inner(*tensors, is_causal=True)
    assert max(t.numel() for t in kept) == B * H * 257 * D


def test_a_gradient_with_a_graph_is_the_gradient_where_inputs_depend_on_each_other():
    inner = lh.InnerAttention(
        "soft_cap(cap=1.3) + sink", embed_dim=H * D, num_heads=H, dtype=torch.float64
    )
    rows = draw(B, H, T, D)
    learning = [rows, *inner.parameters()]
    for query, key, value in [(rows, rows, rows), (rows, 2 * rows, rows.sin())]:
        loss = inner(query, key, value, is_causal=True).square().sum()
        expected = torch.autograd.grad(loss, learning, retain_graph=True)
        found = torch.autograd.grad(loss, learning, create_graph=True)
        torch.testing.assert_close(found, expected)


def test_second_derivatives_of_parameters_lent_to_one_call_are_those_of_its_own():
    inner = lh.InnerAttention(
        "soft_cap(cap=1.3) + sink", embed_dim=H * D, num_heads=H, dtype=torch.float64
    )
    rows = tuple(draw(B, H, T, D) for _ in range(3))

    def mixed(parameters, output):
        loss = output.square().sum()
        (first,) = torch.autograd.grad(loss, parameters, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [*parameters, *rows])

    lent = inner.normaliser.score.detach().clone().requires_grad_()
    output = torch.func.functional_call(inner, {"normaliser.score": lent}, rows)
    found = mixed([lent], output)
    torch.testing.assert_close(found, mixed([inner.normaliser.score], inner(*rows)))


def test_many_gradients_at_once_are_those_one_by_one():
    inner = lh.InnerAttention("soft_cap(cap=1.3)", embed_dim=10, num_heads=2, dtype=torch.float64)
    inputs = tuple(draw(1, 2, 3, D) for _ in range(3))
    found = torch.autograd.functional.jacobian(inner, inputs, vectorize=True)
    torch.testing.assert_close(found, torch.autograd.functional.jacobian(inner, inputs))


def test_a_backward_pass_under_autocast_keeps_the_precision_of_the_forward_pass():
    inner = lh.InnerAttention("soft_cap(cap=1.3)", embed_dim=H * D, num_heads=H)
    inputs = [draw(B, H, T, D, dtype=torch.float32) for _ in range(3)]
    output = inner(*inputs)
    grad = torch.randn_like(output)
    expected = torch.autograd.grad(output, inputs, grad, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(output, inputs, grad)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.usefixtures("_tile_size")
@pytest.mark.parametrize("normaliser", ["softmax", "sink"])
@pytest.mark.parametrize("size", [-1e38, -1e30, -1e9, 1e9, 1e30])
def test_a_large_bias_on_a_whole_row_keeps_the_digits_of_its_gradients(size, normaliser):
    inner = lh.InnerAttention(f"soft_cap(cap=50.0) + {normaliser}", embed_dim=H * D, num_heads=H)
    inputs = [draw(B, H, n, D, dtype=torch.float32) for n in (T, S, S)]
    bias = torch.zeros(T, S)
    bias[3] = size
    output = inner(*inputs, attn_bias=bias)
    expected = lh.reference_attention(inner, *inputs, attn_bias=bias).attn_output
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    learning, grad = [*inputs, *inner.parameters()], torch.randn_like(output)
    found = torch.autograd.grad(output, learning, grad)
    wanted = torch.autograd.grad(expected, learning, grad)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_sink_in_half_precision_beside_wider_rows_keeps_its_digits():
    inner = lh.InnerAttention(
        "soft_cap(cap=50.0) + sink(start=0.71)", embed_dim=H * D, num_heads=H, dtype=torch.bfloat16
    )
    inputs = [draw(B, H, T, D, dtype=torch.float32) for _ in range(3)]
    output = inner(*inputs)
    expected = lh.reference_attention(inner, *inputs).attn_output
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    learning = list(inner.parameters())
    (found,) = torch.autograd.grad(output.sum(), learning)
    torch.testing.assert_close(found, torch.autograd.grad(expected.sum(), learning)[0])


def test_its_output_may_be_written_in_place_where_nothing_is_learnt_from_it():
    inner = lh.InnerAttention("soft_cap(cap=1.3)", embed_dim=H * D, num_heads=H)
    inputs = [draw(B, H, T, D, dtype=torch.float32) for _ in range(3)]
    torch.testing.assert_close(inner(*inputs).mul_(2), 2 * inner(*inputs))


def test_what_is_written_in_place_before_the_backward_pass_is_refused():
    inner = lh.InnerAttention("soft_cap(cap=1.3)", embed_dim=H * D, num_heads=H)
    for number in range(4):
        inputs = [draw(B, H, T, D, dtype=torch.float32) + 0 for _ in range(3)]
        mask = torch.ones(T, T, dtype=torch.bool)
        output = inner(*inputs, attn_mask=mask)
        [*inputs, mask][number].zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
def test_tangents_in_forward_mode_are_those_of_the_reference():
    inner = lh.InnerAttention(
        "soft_cap(cap=1.3) + sink", embed_dim=H * D, num_heads=H, dtype=torch.float64
    )
    with torch.autograd.forward_ad.dual_level():
        inputs = [
            torch.autograd.forward_ad.make_dual(draw(B, H, T, D), torch.randn(B, H, T, D).double())
            for _ in range(3)
        ]
        outputs = inner(*inputs), lh.reference_attention(inner, *inputs).attn_output
        found, expected = (torch.autograd.forward_ad.unpack_dual(o).tangent for o in outputs)
    torch.testing.assert_close(found, expected)

"""The compiled kernel of capped attention, against the reference in float64."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import levelhead as lh
from levelhead import capped
from levelhead.capped_compiled import CompiledCapped, has_compiled_kernel
from levelhead.capped_tiles import CappedTiles

pytestmark = pytest.mark.skipif(
    not has_compiled_kernel(), reason="no C compiler for this processor"
)

B, H = 2, 3
NORMALISERS = ["softmax", "off_by_one", "sink(start=0.7)"]


@pytest.fixture
def forms(monkeypatch):
    """Return the list of forms that calls come to run in."""
    seen = []
    choose = capped._form

    def watch(*inputs):
        seen.append(choose(*inputs))
        return seen[-1]

    monkeypatch.setattr(capped, "_form", watch)
    return seen


def build(cap, normaliser, width):
    variant = f"soft_cap(cap={cap}) + {normaliser}"
    return lh.InnerAttention(variant, embed_dim=H * width, num_heads=H, head_dim=width)


def check(inner, query, key, value, *, tolerance=3e-6, **masks):
    """Compare output and every gradient, each to its own largest entry."""
    assert CompiledCapped.fits(query, lh.inner.resolve_mask(query, key, **full(masks)))
    inputs = [t.detach().requires_grad_() for t in (query, key, value)]
    output = inner(*inputs, **masks)
    grad = torch.randn_like(output)
    learning = [*inputs, *inner.parameters()]
    found = [output, *torch.autograd.grad(output, learning, grad)]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    inner = inner.double()
    learning = [*wide, *inner.parameters()]
    expected = lh.reference_attention(inner, *wide, **masks).attn_output
    wanted = [expected, *torch.autograd.grad(expected, learning, grad.double())]
    for got, want in zip(found, wanted, strict=True):
        assert got.shape == want.shape
        assert (got - want).abs().max() <= tolerance * max(1.0, want.abs().max())


def full(masks):
    return {"attn_mask": None, "attn_bias": None, "is_causal": False, **masks}


def rows(*shape):
    return torch.randn(shape)


@pytest.mark.parametrize("normaliser", NORMALISERS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("num_queries", "num_keys"),
    # Below, at and above the sizes of panels, tiles and blocks of queries.
    [(1, 1), (1, 521), (61, 67), (191, 193), (192, 256), (257, 257), (193, 769), (577, 577)],
)
def test_output_and_gradients_around_the_sizes_of_its_tiles(
    num_queries, num_keys, is_causal, normaliser
):
    query, key, value = (rows(B, H, n, 16) for n in (num_queries, num_keys, num_keys))
    check(build(3.0, normaliser, 16), 3 * query, key, value, is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("width", "value_width"), [(1, 1), (7, 23), (48, 80), (64, 64), (96, 128)]
)
def test_widths_of_a_head_that_fill_no_register_and_many(width, value_width, is_causal):
    query, key, value = (
        rows(B, H, n, d) for n, d in ((67, width), (131, width), (131, value_width))
    )
    check(build(3.0, "sink", width), 3 * query, key, value, is_causal=is_causal)


@given(
    st.integers(1, 300), st.integers(0, 300), st.integers(1, 40), st.booleans(),
    st.sampled_from(NORMALISERS), st.sampled_from([(1, 1), (B, 1), (1, H), (B, H)]),
    st.booleans(), st.floats(0.02, 0.98),
)  # fmt: skip
def test_output_and_gradients_under_a_mask_in_which_a_query_may_see_nothing(
    num_queries, num_more, width, is_causal, normaliser, axes, is_wide, density
):
    num_keys = num_queries + num_more
    query, key, value = (rows(B, H, n, width) for n in (num_queries, num_keys, num_keys))
    mask = torch.rand(*axes, num_queries if is_wide else 1, num_keys) < density
    mask[0, 0, 0] = False
    inner = build(2.0, normaliser, width)
    check(inner, 2 * query, key, value, attn_mask=mask, is_causal=is_causal)


def test_a_query_that_sees_nothing_gives_exact_zeros_and_zero_gradients():
    query, key, value = (rows(B, H, 37, 8).requires_grad_() for _ in range(3))
    mask = torch.ones(37, 37, dtype=torch.bool)
    mask[5] = False
    output = build(2.0, "softmax", 8)(query, key, value, attn_mask=mask)
    assert (output[:, :, 5] == 0).all()
    (grad,) = torch.autograd.grad(output.sum(), query)
    assert (grad[:, :, 5] == 0).all()
    assert grad[:, :, 4].abs().min() > 0


@pytest.mark.parametrize("normaliser", ["softmax", "sink(start=-300.0)", "sink(start=300.0)"])
@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0, 1e30])
def test_scores_at_either_end_of_the_band_keep_their_digits(size, normaliser):
    signs = torch.tensor([1.0, -1.0, 0.0])[:, None].repeat(70, 1)
    query, key, value = rows(B, H, 210, 16), rows(B, H, 300, 16), rows(B, H, 300, 16)
    query, key = query.abs() * signs * size, key.abs()
    inner = build(80.0, normaliser, 16)
    inputs = [t.requires_grad_() for t in (query, key, value)]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    output = inner(*inputs)
    expected = lh.reference_attention(inner.double(), *wide).attn_output
    torch.testing.assert_close(output.double(), expected, rtol=1e-3, atol=1e-4)
    grad = torch.randn_like(output)
    found = torch.autograd.grad(output, inputs, grad)
    for got, want in zip(found, torch.autograd.grad(expected, wide, grad.double()), strict=True):
        assert (got - want).abs().max() <= 1e-3 * max(1.0, want.abs().max())


def test_what_is_not_a_number_stays_visible():
    query, key, value = rows(1, 2, 70, 8), rows(1, 2, 70, 8), rows(1, 2, 70, 8)
    query[0, 0, 41, 3] = torch.nan
    inner = lh.InnerAttention("soft_cap(cap=2.0)", embed_dim=16, num_heads=2)
    output = inner(query, key, value, is_causal=True)
    assert output[0, 0, 41].isnan().all()
    assert output.isnan().sum() == 8


LAYOUTS = {
    "fused projection": lambda: rows(B, 131, 3, H, 16).permute(2, 0, 3, 1, 4).unbind(),
    "columns": lambda: [rows(B, H, 16, 131).mT for _ in range(3)],
    "one for all heads": lambda: [rows(B, 1, 131, 16).expand(B, H, -1, -1) for _ in range(3)],
    "one for all tokens": lambda: [rows(B, H, 1, 16).expand(-1, -1, 131, -1) for _ in range(3)],
    "negated": lambda: [torch._neg_view(rows(B, H, 131, 16)) for _ in range(3)],
    "part of wider rows": lambda: [rows(B, H, 131, 33)[..., 5:21] for _ in range(3)],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_rows_may_lie_in_memory_as_they_like(layout):
    # Of equal keys the query's gradient is a sum that cancels.
    check(build(2.0, "softmax", 16), *layout(), is_causal=True, tolerance=1e-5)


def test_a_gradient_may_lie_in_memory_as_it_likes():
    query, key, value = (rows(B, H, 131, 16).requires_grad_() for _ in range(3))
    output = build(2.0, "softmax", 16)(query, key, value)
    for grad in (rows(B, H, 16, 131).mT, rows(1, 1, 1, 1).expand_as(output)):
        found = torch.autograd.grad(output, (query, key, value), grad, retain_graph=True)
        dense = grad.contiguous()
        expected = torch.autograd.grad(output, (query, key, value), dense, retain_graph=True)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


def both_passes(inner, inputs):
    output = inner(*inputs, is_causal=True)
    return [output, *torch.autograd.grad(output.square().sum(), inputs)]


def test_threads_change_no_digit():
    inner = build(2.0, "softmax", 16)
    inputs = [rows(B, H, 521, 16).requires_grad_() for _ in range(3)]
    before, results = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            results.append(both_passes(inner, inputs))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)


def test_callers_side_by_side_do_not_disturb_each_other():
    inner = build(2.0, "softmax", 16)
    calls = [[rows(B, H, 257, 16).requires_grad_() for _ in range(3)] for _ in range(8)]
    expected = [both_passes(inner, inputs) for inputs in calls]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda inputs: both_passes(inner, inputs), calls))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("form", "dtype", "masks"),
    [
        (CompiledCapped, torch.float32, {}),
        (CompiledCapped, torch.float32, {"is_causal": True}),
        (CompiledCapped, torch.float32, {"attn_mask": torch.ones(B, 1, 1, 13, dtype=torch.bool)}),
        (CappedTiles, torch.float32, {"attn_mask": torch.ones(11, 1, dtype=torch.bool)}),
        (CappedTiles, torch.float32, {"attn_mask": torch.ones(13, 11, dtype=torch.bool).T}),
        (CappedTiles, torch.float32, {"attn_bias": torch.zeros(11, 13)}),
        (CappedTiles, torch.float64, {}),
    ],
)
def test_which_calls_it_takes(forms, form, dtype, masks):
    inner = build(2.0, "softmax", 8).to(dtype)
    tensors = [rows(B, H, n, 8).to(dtype).requires_grad_() for n in (11, 13, 13)]
    masks = {k: v.to(dtype) if k == "attn_bias" else v for k, v in masks.items()}
    inner(*tensors, **masks).sum().backward()
    assert forms == [form, form]


def test_who_counts_operations_sees_them(forms):
    inner = build(2.0, "softmax", 8)
    with FlopCounterMode(display=False) as counter:
        inner(rows(B, H, 11, 8), rows(B, H, 13, 8), rows(B, H, 13, 8))
    assert forms == [CappedTiles]
    assert counter.get_total_flops() == 2 * 2 * B * H * 11 * 13 * 8


def test_a_thread_that_ends_early_is_no_silent_success(monkeypatch):
    def start_nothing(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", start_nothing)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            build(2.0, "softmax", 16)(*(rows(B, H, 521, 16) for _ in range(3)))
    finally:
        torch.set_num_threads(before)

"""The compiled kernel of capped attention, against the reference in float64."""

import contextlib
import functools
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import levelhead as lh
from levelhead import capped, capped_kernel
from levelhead.capped_kernel import CappedKernel, load_kernel
from levelhead.capped_tiles import CappedTiles
from levelhead.compiled import find_compiler, load_library

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C compiler for this processor")

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


@pytest.fixture(params=["AVX2", "AVX512"])
def _instructions(request, monkeypatch):
    """Have the kernel of a processor; one that knows AVX-512 knows AVX2."""
    if request.param > torch.backends.cpu.get_cpu_capability():
        pytest.skip(f"this processor has no {request.param}")
    kernel = kernel_for(request.param)
    assert kernel is not None
    monkeypatch.setattr(capped_kernel, "load_kernel", lambda: kernel)


@functools.cache
def kernel_for(instructions):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)
        patch.setattr(capped_kernel, "load_library", load_library.__wrapped__)
        return load_kernel.__wrapped__()


def build(cap, normaliser, width):
    variant = f"soft_cap(cap={cap}) + {normaliser}"
    return lh.InnerAttention(variant, embed_dim=H * width, num_heads=H, head_dim=width)


def check(inner, query, key, value, *, tolerance=3e-6, least=0.1, **masks):
    """Compare output and every gradient, each to its own largest entry.

    Where that is below ``least``, as of the gradients where a query sees one key, to ``least``:
    what the terms that cancel there add up to.
    """
    assert CappedKernel.fits(query, lh.inner.resolve_mask(query, key, **full(masks)))
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
        assert (got - want).abs().max() <= tolerance * max(least, want.abs().max())


def full(masks):
    return {"attn_mask": None, "attn_bias": None, "is_causal": False, **masks}


def rows(*shape):
    return torch.randn(shape)


@pytest.mark.usefixtures("_instructions")
@pytest.mark.parametrize("normaliser", ["softmax", "sink(start=0.7)"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("num_queries", "num_keys"),
    # Below, at and above the sizes of panels, tiles and blocks of queries.
    [(1, 521), (61, 67), (191, 193), (192, 256), (257, 257), (193, 769)],
)
def test_output_and_gradients_around_the_sizes_of_its_tiles(
    num_queries, num_keys, is_causal, normaliser
):
    query, key, value = (rows(B, H, n, 16) for n in (num_queries, num_keys, num_keys))
    check(build(3.0, normaliser, 16), 3 * query, key, value, is_causal=is_causal)


def test_more_queries_than_keys():
    query, key, value = (rows(B, H, n, 16) for n in (577, 61, 61))
    check(build(3.0, "sink", 16), 3 * query, key, value)


@pytest.mark.usefixtures("_instructions")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("width", "value_width"), [(1, 1), (7, 23), (48, 80), (64, 64), (96, 128)]
)
def test_widths_of_a_head_that_fill_no_register_and_many(width, value_width, is_causal):
    query, key, value = (
        rows(B, H, n, d) for n, d in ((67, width), (131, width), (131, value_width))
    )
    check(build(3.0, "sink", width), 3 * query, key, value, is_causal=is_causal)


@settings(deadline=None)  # the first call may compile
@given(
    st.integers(1, 300), st.integers(0, 300), st.integers(1, 40), st.booleans(),
    st.sampled_from(NORMALISERS), st.sampled_from([(1, 1), (B, 1), (1, H), (B, H)]),
    st.booleans(), st.floats(0.02, 0.98), st.integers(0, 2**31),
)  # fmt: skip
def test_output_and_gradients_under_a_mask_in_which_a_query_may_see_nothing(
    num_queries, num_more, width, is_causal, normaliser, axes, is_wide, density, seed
):
    torch.manual_seed(seed)
    num_keys = num_queries + num_more
    query, key, value = (rows(B, H, n, width) for n in (num_queries, num_keys, num_keys))
    mask = torch.rand(*axes, num_queries if is_wide else 1, num_keys) < density
    mask[0, 0, 0] = False
    inner = build(2.0, normaliser, width)
    # A key's gradient sums over queries what a product of D terms leaves of itself.
    least = max(1.0, inner.scale * math.sqrt(num_queries * width))
    check(inner, 2 * query, key, value, attn_mask=mask, is_causal=is_causal, least=least)


def test_a_query_that_sees_nothing_gives_exact_zeros_and_zero_gradients():
    query, key, value = (rows(B, H, 37, 8).requires_grad_() for _ in range(3))
    mask = torch.ones(37, 37, dtype=torch.bool)
    mask[5] = False
    output = build(2.0, "softmax", 8)(query, key, value, attn_mask=mask)
    assert (output[:, :, 5] == 0).all()
    (grad,) = torch.autograd.grad(output.sum(), query)
    assert (grad[:, :, 5] == 0).all()
    assert grad[:, :, 4].abs().min() > 0


@pytest.mark.parametrize("normaliser", ["softmax", "sink(start=-300.0)", "sink(start=30.0)"])
@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0, 1e30])
def test_scores_at_either_end_of_the_band_are_as_exact_as_in_tiles(
    monkeypatch, forms, size, normaliser
):
    signs = torch.tensor([1.0, -1.0, 0.0])[:, None].repeat(70, 1)
    query, key, value = rows(B, H, 210, 16), rows(B, H, 300, 16), rows(B, H, 300, 16)
    inputs = [t.requires_grad_() for t in (query.abs() * signs * size, key.abs(), value)]
    grad = rows(B, H, 210, 16)
    inner = build(80.0, normaliser, 16)

    def run(inner, attend, *inputs):
        output = attend(inner, *inputs)
        return [output, *torch.autograd.grad(output, inputs, grad.to(output.dtype))]

    found = run(inner, lambda inner, *inputs: inner(*inputs), *inputs)
    monkeypatch.setattr(CappedKernel, "fits", lambda *inputs: False)
    tiled = run(inner, lambda inner, *inputs: inner(*inputs), *inputs)
    assert forms == 2 * [CappedKernel] + 2 * [CappedTiles]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    wanted = run(inner.double(), lambda *given: lh.reference_attention(*given).attn_output, *wide)
    for got, tile, want in zip(found, tiled, wanted, strict=True):
        error, usual = ((t - want).abs().max() for t in (got, tile))
        assert error <= 1.5 * usual + 1e-6 * want.abs().max()


def test_infinite_scores_are_capped_and_a_cap_near_zero_leaves_the_mean():
    query, key, value = (rows(B, H, 70, 16) for _ in range(3))
    key[:, :, 7, 0] = torch.inf
    output = build(2.0, "softmax", 16)(query, key, value)
    expected = lh.reference_attention(build(2.0, "softmax", 16), query, key, value).attn_output
    torch.testing.assert_close(output, expected)
    query[:, :, 3] = 0.0
    mean = value.mean(dim=2, keepdim=True).expand_as(value)
    output = build(1e-40, "softmax", 16)(query, rows(B, H, 70, 16), value)
    torch.testing.assert_close(output, mean, atol=1e-6, rtol=1e-5)


def test_an_infinite_sink_stays_visible():
    inner = build(2.0, "sink", 16)
    with torch.no_grad():
        inner.normaliser.score.fill_(torch.inf)
    output = inner(*(rows(B, H, 70, 16) for _ in range(3)))
    assert output.isnan().all()


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
    check(build(2.0, "softmax", 16), *layout(), is_causal=True, tolerance=1e-5, least=1.0)


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
        (CappedKernel, torch.float32, {}),
        (CappedKernel, torch.float32, {"is_causal": True}),
        (CappedKernel, torch.float32, {"attn_mask": torch.ones(B, 1, 1, 13, dtype=torch.bool)}),
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


def test_what_has_no_numbers_in_memory_is_left_to_the_operators(forms):
    query, key, value = (rows(B, H, 11, 8).requires_grad_() for _ in range(3))
    inner = build(2.0, "softmax", 8)
    empty = inner(query, key, value[..., :0])
    found = torch.autograd.grad(empty.sum(), (query, key))
    assert not any(t.any() for t in found)
    assert not inner(query, key[:, :, :0], value[:, :, :0]).any()
    assert set(forms) == {CappedTiles}
    with pytest.raises(RuntimeError):
        inner(query, key.to("meta"), value)


@pytest.mark.parametrize("first", ["compiled", "tiles"])
@pytest.mark.parametrize("normaliser", NORMALISERS)
def test_either_form_may_go_on_where_the_other_began(forms, first, normaliser):
    inner = build(2.0, normaliser, 16)
    inputs = [rows(B, H, n, 16).requires_grad_() for n in (67, 131, 131)]
    learning = [*inputs, *inner.parameters()]
    mask = torch.rand(67, 131) < 0.5
    mask[4] = False
    output = inner(*inputs, attn_mask=mask)
    expected = torch.autograd.grad(output.square().sum(), learning)
    watched = [FlopCounterMode(display=False), contextlib.nullcontext()]
    before, after = watched if first == "tiles" else reversed(watched)
    with before:
        output = inner(*inputs, attn_mask=mask)
    with after:
        found = torch.autograd.grad(output.square().sum(), learning)
    kinds = [CappedTiles, CappedKernel]
    assert forms == 2 * [CappedKernel] + (kinds if first == "tiles" else kinds[::-1])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_only_what_learns_gets_a_gradient():
    query, key, value = rows(B, H, 67, 16), rows(B, H, 67, 16).requires_grad_(), rows(B, H, 67, 16)
    build(2.0, "softmax", 16)(query, key, value).sum().backward()
    assert key.grad is not None
    assert query.grad is value.grad is None


def test_where_no_thread_is_to_be_had_the_caller_does_it_all(monkeypatch):
    inner = build(2.0, "softmax", 16)
    inputs = [rows(B, H, 521, 16).requires_grad_() for _ in range(3)]
    expected = both_passes(inner, inputs)

    def start_nothing(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", start_nothing)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    torch.testing.assert_close(both_passes(inner, inputs), expected, rtol=0, atol=0)


BOUND = """
import os, threading, torch
from levelhead import capped_kernel
torch.set_num_threads(2)
torch.randn(512, 512) @ torch.randn(512, 512)
assert len(os.sched_getaffinity(0)) == 1, "OpenMP did not bind this thread"
seen = []
set_affinity = os.sched_setaffinity
os.sched_setaffinity = lambda thread, cores: (seen.append(cores), set_affinity(thread, cores))
import levelhead as lh
inner = lh.InnerAttention("soft_cap(cap=2.0)", embed_dim=48, num_heads=3)
inner(*(torch.randn(2, 3, 521, 16) for _ in range(3)))
assert seen and all(len(cores) > 1 for cores in seen), seen
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_threads_do_not_stay_on_the_core_that_openmp_bound_the_caller_to():
    environment = {**os.environ, "OMP_PROC_BIND": "true", "OMP_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", BOUND], env=environment, check=True)

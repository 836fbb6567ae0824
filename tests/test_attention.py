"""The fused form against the plain one, for every term, pair, mask and dtype."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import levelhead as lh
from cases import (
    BATCH,
    EMBED_DIM,
    HEAD_DIM,
    NUM_KEYS,
    NUM_QUERIES,
    OPTIONS,
    all_terms,
    full_house,
    inner_terms,
    legal_pairs,
    masks,
)
from levelhead.parts.weights import Affine
from promises import assert_fused_equals_reference

INNER_OPTIONS = [option for option in OPTIONS if not option.startswith("spectral")]
INNER_PAIRS = [
    pair for pair in legal_pairs() if not {"spectral", "sigma_reparam"} & set(pair.split(" + "))
]


def make_inner(variant, num_heads=6, num_kv_heads=3, dtype=torch.float64, training=True):
    inner = lh.InnerAttention(
        variant,
        embed_dim=EMBED_DIM,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=HEAD_DIM,
        dtype=dtype,
    )
    with torch.no_grad():
        for parameter in inner.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    if inner.weights is not None:
        inner.weights.set_state("alpha_mean", torch.rand_like(inner.weights.alpha_mean))
    return lh.track_steps(inner).train(training)


def make_inputs(num_heads=6, num_kv_heads=3, dtype=torch.float64, sizes=(NUM_QUERIES, NUM_KEYS)):
    num_queries, num_keys = sizes
    return [
        torch.randn(BATCH, num_heads, num_queries, HEAD_DIM, dtype=dtype),
        torch.randn(BATCH, num_kv_heads, num_keys, HEAD_DIM, dtype=dtype),
        torch.randn(BATCH, num_kv_heads, num_keys, HEAD_DIM, dtype=dtype),
        torch.randn(BATCH, num_queries, EMBED_DIM, dtype=dtype),
    ]


@pytest.mark.parametrize("visibility", masks(NUM_QUERIES, NUM_KEYS))
@pytest.mark.parametrize("variant", [*inner_terms(), *INNER_OPTIONS])
def test_fused_equals_reference(variant, visibility):
    call = masks(NUM_QUERIES, NUM_KEYS)[visibility]
    assert_fused_equals_reference(make_inner(variant), make_inputs(), **call)


@pytest.mark.parametrize("visibility", ["everything", "causal_padding", "dense"])
@pytest.mark.parametrize("variant", [*INNER_PAIRS, full_house().split(" + ", 1)[1]])
def test_every_legal_pair_fused_equals_reference(variant, visibility):
    sizes = (NUM_KEYS, NUM_KEYS)
    call = masks(*sizes)[visibility]
    assert_fused_equals_reference(make_inner(variant), make_inputs(sizes=sizes), **call)


# A detached norm is by choice not the true gradient.
@pytest.mark.parametrize(
    "variant",
    [*inner_terms(), *(o for o in INNER_OPTIONS if "detach" not in o), *INNER_PAIRS],
)
def test_gradcheck(variant):
    """Finite differences, which share no code with either form."""
    inner = make_inner(variant, num_heads=2, num_kv_heads=1, training=False)
    mask = torch.ones(1, 1, 3, 5, dtype=torch.bool)
    mask[..., 1, :] = False
    inputs = [tensor[:1].requires_grad_() for tensor in make_inputs(2, 1, sizes=(3, 5))]

    def attend(*inputs):
        return inner(*inputs, attn_mask=mask)

    assert torch.autograd.gradcheck(attend, inputs, fast_mode=True)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_fused_equals_reference_on_any_sizes(data):
    """Random variants, sizes, groupings and visibilities."""
    variant = data.draw(st.sampled_from([*inner_terms(), *INNER_OPTIONS, *INNER_PAIRS]))
    num_kv_heads = data.draw(st.sampled_from([1, 2, 3]))
    num_heads = num_kv_heads * data.draw(st.sampled_from([1, 2, 5]))
    num_keys = data.draw(st.integers(1, 17))
    num_queries = data.draw(st.integers(1, 17))
    found = masks(num_queries, num_keys, num_heads=num_heads)
    call = found[data.draw(st.sampled_from(sorted(found)))]
    training = data.draw(st.booleans())
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    inner = make_inner(variant, num_heads, num_kv_heads, training=training)
    inputs = make_inputs(num_heads, num_kv_heads, sizes=(num_queries, num_keys))
    assert_fused_equals_reference(inner, inputs, **call)


class LargestFloat(TorchDispatchMode):
    """Remembers the size of the largest floating-point tensor that an operator returned."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                self.size = max(self.size, leaf.untyped_storage().nbytes() // leaf.itemsize)
        return result


LONG = (67, 71)


@pytest.mark.parametrize(
    "visibility",
    [v for v in masks(*LONG) if v not in ("dense", "bias", "bias_minimum", "causal_dense")],
)
@pytest.mark.parametrize(
    "variant", [v for v in (*inner_terms(), *INNER_OPTIONS) if "cap" not in v]
)
def test_no_fused_form_builds_a_matrix_of_scores(variant, visibility):
    """A mask of T x S for each sample at most, never a matrix for each head, as the plain form."""
    if "bias" in visibility:
        call = {"attn_bias": torch.randn(1, 1, *LONG), "is_causal": "causal" in visibility}
    else:
        call = masks(*LONG)[visibility]
    inner = make_inner(variant)
    inputs = [tensor.requires_grad_() for tensor in make_inputs(sizes=LONG)]
    limit = BATCH * LONG[0] * LONG[1]
    with LargestFloat() as fused:
        inner(*inputs, **call).sum().backward()
    assert fused.size <= limit
    with LargestFloat() as plain:
        lh.reference_attention(inner, *inputs, **call)
    assert plain.size > limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", [*inner_terms(), full_house().split(" + ", 1)[1]])
def test_half_and_single_precision(variant, dtype):
    """Against the reference in float64 on the same rounded inputs."""
    inner = make_inner(variant, dtype=dtype, training=False)
    inputs = make_inputs(dtype=dtype)
    call = masks(NUM_QUERIES, NUM_KEYS)["causal_padding"]
    output = inner(*inputs, **call)
    exact = lh.reference_attention(
        copy.deepcopy(inner).double(), *(tensor.double() for tensor in inputs), **call
    ).attn_output
    assert output.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]
    torch.testing.assert_close(output.double(), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("variant", [*all_terms(), full_house()])
def test_layer_equals_its_own_plain_form(variant):
    """The whole layer, projections stage included: need_weights takes the plain form."""
    torch.manual_seed(3)
    layer = lh.Attention(
        30, 6, variant=variant, num_kv_heads=2, qkv_bias=True, dtype=torch.float64
    )
    layer = lh.track_steps(layer)
    twin = copy.deepcopy(layer)
    hidden_states = torch.randn(BATCH, NUM_KEYS, 30, dtype=torch.float64)
    call = masks(NUM_KEYS, NUM_KEYS)["causal_dense"]
    output = layer(hidden_states, **call)
    plain_output, attn_weights = twin(hidden_states, need_weights=True, **call)
    torch.testing.assert_close(output, plain_output, atol=1e-11, rtol=1e-11)
    assert attn_weights.shape == (BATCH, 6, NUM_KEYS, NUM_KEYS)
    visible = call["attn_mask"] & lh.causal_mask(NUM_KEYS, NUM_KEYS)
    assert (attn_weights.masked_select(~visible) == 0).all()


@pytest.mark.parametrize("variant", [*legal_pairs(), full_house()])
def test_every_parameter_receives_a_gradient(variant):
    layer = lh.track_steps(lh.Attention(30, 6, variant=variant, num_kv_heads=2, qkv_bias=True))
    layer(torch.randn(BATCH, NUM_KEYS, 30), is_causal=True).square().sum().backward()
    without = [n for n, p in layer.named_parameters() if p.grad is None]
    assert without == []
    zero = {n for n, p in layer.named_parameters() if p.grad.abs().max() == 0}
    assert zero == set()
    assert all(parameter.ndim > 0 for parameter in layer.parameters())


def test_cross_attention_attends_to_the_context():
    layer = lh.Attention(12, 3, kv_embed_dim=7, variant="affine + gate")
    lh.track_steps(layer)
    hidden_states, context = torch.randn(2, 5, 12), torch.randn(2, 11, 7)
    mask = torch.ones(2, 1, 1, 11, dtype=torch.bool)
    mask[0, ..., 4:] = False
    before = layer.eval()(hidden_states, context, attn_mask=mask)
    context[0, 4:] += 1
    torch.testing.assert_close(layer(hidden_states, context, attn_mask=mask), before)
    context[0, 3] += 1
    assert not torch.allclose(layer(hidden_states, context, attn_mask=mask)[0], before[0])


class ListCache:
    """The smallest KV cache."""

    def __init__(self):
        self.key, self.value = [], []

    def update(self, key, value):
        self.key.append(key)
        self.value.append(value)
        return torch.cat(self.key, 2), torch.cat(self.value, 2)


@pytest.mark.parametrize("variant", [*all_terms(), full_house()])
def test_cached_decoding_equals_the_full_pass(variant):
    """Affine with count="keys" is the one documented exception, tested in test_promises."""
    layer = lh.track_steps(lh.Attention(30, 6, variant=variant, num_kv_heads=2)).eval()
    if layer.inner.weights is not None:
        layer.inner.weights.set_state("alpha_mean", 0.4)
    hidden_states = torch.randn(2, 10, 30)
    full = layer(hidden_states, is_causal=True)
    cache, chunks = ListCache(), []
    for start, stop in ((0, 6), (6, 9), (9, 10)):
        chunks.append(layer(hidden_states[:, start:stop], is_causal=True, kv_cache=cache))
    torch.testing.assert_close(torch.cat(chunks, 1), full, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", ["softmax", "sink", "off_by_one", "soft_cap(cap=3.0)"])
def test_dropout_is_unbiased_and_only_in_training(variant):
    inner = lh.InnerAttention(variant, embed_dim=8, num_heads=1, head_dim=8, dropout_p=0.5)
    query, key, value = (torch.randn(1, 1, 3, 8) for _ in range(3))
    exact = inner.eval()(query, key, value)
    torch.testing.assert_close(inner(query, key, value), exact)
    many = [tensor.expand(20_000, -1, -1, -1) for tensor in (query, key, value)]
    dropped = inner.train()(*many)
    assert not torch.allclose(dropped[0], dropped[1])
    standard_error = dropped.std(dim=0) / many[0].shape[0] ** 0.5
    assert ((dropped.mean(dim=0) - exact).abs() <= 5 * standard_error[None] + 1e-6).all()


def test_rope_and_custom_scale_are_used():
    layer = lh.Attention(12, 3, scale=0.25)
    hidden_states = torch.randn(1, 5, 12)

    def flip(query, key):
        return query.flip(-1), key

    plain = layer(hidden_states)
    assert not torch.allclose(layer(hidden_states, rope=flip), plain)
    twin = lh.Attention(12, 3, scale=0.25, rope=flip)
    twin.load_state_dict(layer.state_dict())
    torch.testing.assert_close(twin(hidden_states), layer(hidden_states, rope=flip))
    assert layer.scale == 0.25
    assert lh.Attention(12, 3, variant="quest", scale=0.25).scale == 1.0


@pytest.mark.parametrize("variant", [*all_terms(), full_house()])
def test_autocast_gives_finite_low_precision_output_close_to_full(variant):
    layer = lh.track_steps(lh.Attention(30, 6, variant=variant)).eval()
    hidden_states = torch.randn(2, 11, 30)
    full = layer(hidden_states, is_causal=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = layer(hidden_states, is_causal=True)
    assert low.dtype == torch.bfloat16
    scale = full.abs().max().item()
    torch.testing.assert_close(low.float(), full, atol=0.08 * scale, rtol=0.0)


def test_affine_state_stays_wide_in_half_precision():
    layer = lh.Attention(12, 3, variant="affine")
    layer.inner.weights.set_state("alpha_mean", 0.4512345)
    affine = layer.to(torch.bfloat16).inner.weights
    assert isinstance(affine, Affine)
    assert torch.equal(affine.alpha_mean, torch.full((3,), 0.4512345))
    assert affine.alpha_proj.weight.dtype == torch.bfloat16
    assert affine.alpha_mean.dtype == torch.float32
    assert lh.Attention(12, 3, variant="affine").double().inner.weights.alpha_mean.dtype == (
        torch.float64
    )

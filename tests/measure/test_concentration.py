"""Streamed measures against the dense float64 attention, under every mask."""

import math

import pytest
import scipy.stats
import torch

from levelhead.bench.timing import peak_extra_bytes
from levelhead.measure import streaming
from levelhead.measure.attention_rows import attention_head_similarity, attention_sensitivity
from levelhead.measure.concentration import concentration, row_quantiles
from levelhead.measure.row_block import MEASURES
from levelhead.measure.row_statistics import head_similarity
from levelhead.measure.sensitivity import sensitivity, sink_sensitivity
from levelhead.measure.streaming import AttentionScores, first_tokens

B, H, HKV, T, S, D = 2, 6, 3, 11, 13, 5
LOWEST = torch.finfo(torch.float32).min


def qkv(dtype=torch.float64, num_queries=T):
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(B, H, num_queries, D, generator=generator, dtype=torch.float64)
    key = torch.randn(B, HKV, S, D, generator=generator, dtype=torch.float64)
    return (2 * query).to(dtype), key.to(dtype)


def masks():
    generator = torch.Generator().manual_seed(2)
    random = torch.rand(B, H, T, S, generator=generator) > 0.5
    random[1, 2, 3] = False
    padding = torch.ones(B, 1, 1, S, dtype=torch.bool)
    padding[1, ..., :4] = False
    bias = torch.randn(H, T, S, generator=generator)[None]
    return {
        "none": {},
        "causal": {"is_causal": True},
        "padding": {"attn_mask": padding},
        "padding, causal": {"attn_mask": padding, "is_causal": True},
        "random": {"attn_mask": random},
        "two axes": {"attn_mask": random[0, 0]},
        "bias": {"attn_bias": bias},
        "lowest bias": {"attn_bias": torch.where(random, 0.0, LOWEST)},
        "all three": {"attn_mask": random, "attn_bias": bias, "is_causal": True},
    }


def dense_scores(query, key, scale=None, attn_mask=None, attn_bias=None, is_causal=False):
    """The definition, written out: no code shared with what is tested."""
    key = key.double().repeat_interleave(H // HKV, 1)
    scores = torch.einsum("bhtd,bhsd->bhts", query.double(), key)
    scores = scores * (1 / math.sqrt(D) if scale is None else scale)
    if attn_bias is not None:
        scores = scores + torch.where(attn_bias <= LOWEST / 2, -torch.inf, attn_bias.double())
    if attn_mask is not None:
        scores = torch.where(attn_mask, scores, -torch.inf)
    if is_causal:
        num_queries, num_keys = scores.shape[-2:]
        for t in range(num_queries):
            scores[:, :, t, t + num_keys - num_queries + 1 :] = -torch.inf
    return scores


def dense_measures(scores, sink_score=None, affine=None):
    visible = scores > -torch.inf
    extra = [] if sink_score is None else [sink_score.double().view(1, -1, 1, 1)]
    columns = torch.cat([scores, *(e.expand(*scores.shape[:3], 1) for e in extra)], -1)
    everything = columns.softmax(-1).nan_to_num(0)
    p, sink = everything[..., :S], everything[..., S:].sum(-1)
    count = visible.sum(-1)
    alpha, beta = affine or (torch.ones(B, H, T), torch.zeros(B, H, T))
    weights = (alpha[..., None] * p + beta[..., None]) * visible
    entropy = torch.tensor(scipy.stats.entropy(everything.clamp(min=1e-300), axis=-1))
    hidden = scores.masked_fill(~visible, torch.nan)
    std = ((hidden - hidden.nanmean(-1, keepdim=True)) ** 2).nanmean(-1).sqrt()
    measures = {
        "entropy_nats": entropy,
        "normalized_entropy": entropy / (count + (sink_score is not None)).double().log(),
        "p_max": p.amax(-1),
        "effective_keys": p.sum(-1) ** 2 / (p**2).sum(-1),
        "sink_mass": p[..., 0] if sink_score is None else sink,
        "first_token_mass": p[..., 0],
        "row_mass": weights.sum(-1),
        "negative_mass": weights.clamp(max=0).sum(-1).neg(),
        "score_max": scores.amax(-1),
        "score_std": std,
    }
    single = count + (sink_score is not None) < 2
    measures["normalized_entropy"][single] = torch.nan
    return {name: value.masked_fill(count == 0, torch.nan) for name, value in measures.items()}


@pytest.fixture(params=[1, 40, 1 << 18], ids=lambda numbers: f"blocks of {numbers}")
def block_numbers(request, monkeypatch):
    monkeypatch.setitem(streaming._BLOCK_NUMBERS, "cpu", request.param)


@pytest.mark.usefixtures("block_numbers")
@pytest.mark.parametrize("name", masks())
@pytest.mark.parametrize("has_sink", [False, True])
def test_every_measure_equals_the_dense_one(name, has_sink):
    query, key = qkv()
    sink_score = torch.linspace(-2, 30, H) if has_sink else None
    affine = (torch.rand(B, H, T), torch.randn(B, H, T) / 10)
    start = torch.zeros(B, S, dtype=torch.bool)
    start[:, 0] = True
    found = concentration(
        AttentionScores(query, key, sink_score=sink_score, **masks()[name]),
        num_queries=None,
        first_tokens=start,
        affine=affine,
    )
    expected = dense_measures(dense_scores(query, key, **masks()[name]), sink_score, affine)
    assert found.rows.keys() == expected.keys() == MEASURES.keys()
    for measure, values in expected.items():
        torch.testing.assert_close(
            found.rows[measure], values, rtol=1e-9, atol=1e-12, equal_nan=True, msg=measure
        )
    assert found.num_empty == int(expected["score_max"].isnan().sum())
    assert not found.is_sample


@pytest.mark.usefixtures("block_numbers")
@pytest.mark.parametrize("name", masks())
def test_sensitivity_and_head_similarity_equal_the_dense_ones(name):
    query, key = qkv()
    attn_weights = dense_scores(query, key, **masks()[name]).softmax(-1).nan_to_num(0)
    scores = AttentionScores(query, key, **masks()[name])
    bounds, query_idx = attention_sensitivity(scores)
    dense = sensitivity(attn_weights)
    assert query_idx.tolist() == list(range(T))
    torch.testing.assert_close(bounds.lower, dense.lower, rtol=0, atol=1e-9, equal_nan=True)
    torch.testing.assert_close(bounds.upper, dense.upper, rtol=0, atol=1e-9, equal_nan=True)
    similar = attention_head_similarity(scores, num_queries=None)
    torch.testing.assert_close(similar, head_similarity(attn_weights))


def test_sensitivity_with_a_sink_equals_the_dense_one():
    query, key = qkv()
    sink_score = torch.linspace(-2, 30, H)
    columns = torch.cat(
        [dense_scores(query, key), sink_score.view(1, H, 1, 1).expand(B, H, T, 1)], -1
    )
    dense = sink_sensitivity(columns.softmax(-1)[..., :S])
    bounds, _ = attention_sensitivity(AttentionScores(query, key, sink_score=sink_score))
    torch.testing.assert_close(bounds.lower, dense.lower, rtol=0, atol=1e-12)
    torch.testing.assert_close(bounds.upper, dense.upper, rtol=0, atol=1e-12)


def test_scale_and_soft_cap_are_those_of_the_call():
    query, key = qkv()
    found = concentration(
        AttentionScores(query, key, scale=0.7, soft_cap=1.5), ["score_max"], num_queries=None
    )
    expected = (1.5 * torch.tanh(dense_scores(query, key, scale=0.7) / 1.5)).amax(-1)
    torch.testing.assert_close(found.rows["score_max"], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_lower_precision_inputs_are_computed_in_float32(dtype):
    query, key = qkv(dtype)
    found = concentration(AttentionScores(query, key, is_causal=True), num_queries=None)
    expected = dense_measures(dense_scores(query, key, is_causal=True))
    for measure, values in expected.items():
        assert found.rows[measure].dtype == torch.float32
        torch.testing.assert_close(
            found.rows[measure].double(), values, rtol=1e-4, atol=1e-5, equal_nan=True
        )


def test_a_sample_is_evenly_spaced_stated_and_equal_to_those_rows():
    query, key = qkv()
    scores = AttentionScores(query, key, is_causal=True)
    sample, full = concentration(scores, num_queries=3), concentration(scores, num_queries=None)
    assert sample.query_idx.tolist() == [1, 5, 9]
    assert sample.is_sample
    assert sample.num_queries == T
    for name, values in sample.rows.items():
        torch.testing.assert_close(values, full.rows[name][:, :, [1, 5, 9]], equal_nan=True)
    bounds, query_idx = attention_sensitivity(scores, num_queries=3)
    assert query_idx.tolist() == [1, 5, 9]
    assert bounds.lower.shape == (B, H, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_case_a01_empty_rows_are_skipped_and_counted_under_both_kinds_of_mask(dtype):
    query, key = torch.randn(2, 2, 2, 6, 8).to(dtype)
    boolean = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    boolean[1, :, 3] = False
    lowest = torch.where(boolean, 0.0, torch.finfo(dtype).min).to(dtype)
    by_mask = concentration(AttentionScores(query, key, attn_mask=boolean))
    by_bias = concentration(AttentionScores(query, key, attn_bias=lowest))
    for found in (by_mask, by_bias):
        assert found.num_empty == 2
        for name, values in found.rows.items():
            assert values.isnan().nonzero().tolist() == [[1, 0, 3], [1, 1, 3]], name
            assert found.mean(name).isfinite().all()
            assert found.maximum(name).isfinite().all()
    for name, values in by_mask.rows.items():
        torch.testing.assert_close(values, by_bias.rows[name], equal_nan=True)
    bounds, _ = attention_sensitivity(AttentionScores(query, key, attn_mask=boolean))
    assert bounds.num_empty == 2


def test_case_a13_memory_stays_below_a_tenth_of_the_matrix_and_values_agree():
    generator = torch.Generator().manual_seed(13)
    query, key = torch.randn(2, 1, 4, 4096, 64, generator=generator)
    scores = AttentionScores(query, key, is_causal=True)
    found = concentration(scores, num_queries=64)
    matrix_bytes = 4096 * 4096 * 4
    assert peak_extra_bytes(lambda: concentration(scores, num_queries=512)) < matrix_bytes / 10
    assert peak_extra_bytes(lambda: attention_sensitivity(scores, num_queries=64)) < (
        matrix_bytes / 2
    )
    rows = torch.einsum("bhtd,bhsd->bhts", query[:, :, found.query_idx].double(), key.double()) / 8
    later = torch.arange(4096) > found.query_idx[:, None]
    p = rows.masked_fill(later, -torch.inf).softmax(-1)
    entropy = torch.tensor(scipy.stats.entropy(p, axis=-1))
    torch.testing.assert_close(found.rows["entropy_nats"].double(), entropy, rtol=0, atol=1e-4)
    torch.testing.assert_close(found.rows["p_max"].double(), p.amax(-1), rtol=1e-4, atol=0)
    torch.testing.assert_close(found.rows["sink_mass"].double(), p[..., 0], rtol=1e-4, atol=1e-12)


def test_case_a18_a_scale_of_one_after_q_k_norms_is_seen_as_saturation():
    generator = torch.Generator().manual_seed(18)
    query, key = torch.randn(2, 1, 4, 128, 256, generator=generator)
    query, key = (torch.nn.functional.rms_norm(t, (256,)) for t in (query, key))
    names = ["score_std", "entropy_nats"]
    saturated = concentration(AttentionScores(query, key, scale=1.0), names)
    healthy = concentration(AttentionScores(query, key), names)
    assert saturated.mean("score_std").tolist() == pytest.approx([16] * 4, rel=0.03)
    assert healthy.mean("score_std").tolist() == pytest.approx([1] * 4, rel=0.03)
    to_bits = 1 / math.log(2)
    assert (saturated.mean("entropy_nats") * to_bits).tolist() == pytest.approx([0.4] * 4, abs=0.1)
    assert (healthy.mean("entropy_nats") * to_bits).tolist() == pytest.approx([6.3] * 4, abs=0.05)


def test_case_a19_maxima_join_over_micro_batches_and_start_anew():
    def largest(factor):
        query, key = qkv()
        found = concentration(AttentionScores(factor * query, key), ["score_max"])
        return found.maximum("score_max")

    small, large = largest(1), largest(16)
    running = torch.full((H,), torch.nan, dtype=torch.float64)
    for now in (small, large, small):
        running = torch.fmax(running, now)
    torch.testing.assert_close(running, 16 * small)
    torch.testing.assert_close(torch.fmax(torch.full_like(running, torch.nan), small), small)


def test_broken_scores_are_counted_and_never_become_numbers():
    query, key = qkv()
    query[0, 1, 2, 3] = torch.nan
    query[1, 4, 5, 0] = torch.inf
    found = concentration(AttentionScores(query, key), num_queries=None)
    assert found.num_nonfinite == 2
    assert found.num_empty == 0
    where = [[0, 1, 2], [1, 4, 5]]
    assert found.rows["entropy_nats"].isnan().nonzero().tolist() == where
    with pytest.raises(ValueError, match="scores must not be NaN or .inf, got 1 such rows"):
        attention_sensitivity(AttentionScores(query[:1], key[:1]))


def test_padding_queries_are_left_out_and_counted():
    query, key = qkv()
    real = torch.ones(B, T, dtype=torch.bool)
    real[1, :4] = False
    found = concentration(AttentionScores(query, key), num_queries=None, real_queries=real)
    assert found.num_padding == 4 * H
    assert found.rows["p_max"][1, :, :4].isnan().all()
    assert found.rows["p_max"].isnan().sum() == 4 * H


def test_first_tokens_are_found_behind_padding_and_at_documents():
    ids = torch.tensor([[-1, -1, 0, 0, 1, 1, 1], [5, 5, 5, 2, 2, -1, -1]])
    starts = first_tokens(ids)
    assert starts.nonzero().tolist() == [[0, 2], [0, 4], [1, 0], [1, 3]]
    query, key = qkv()
    scores = AttentionScores(query, key, **masks()["padding"])
    found = concentration(scores, ["first_token_mass"], num_queries=None)
    p = dense_scores(query, key, **masks()["padding"]).softmax(-1)
    expected = torch.stack([p[0, ..., 0], p[1, ..., 4]])
    torch.testing.assert_close(found.rows["first_token_mass"], expected)


def test_quantiles_ignore_rows_that_were_left_out():
    values = torch.randn(3, 101, dtype=torch.float64)
    values[0, ::7] = torch.nan
    values[2] = torch.nan
    levels = [0.0, 0.1, 0.5, 0.99, 1.0]
    expected = values.nanquantile(torch.tensor(levels, dtype=torch.float64), dim=-1)
    torch.testing.assert_close(row_quantiles(values, levels), expected, equal_nan=True)
    with pytest.raises(ValueError, match="levels must lie in .0, 1., got levels=.1.5."):
        row_quantiles(values, [1.5])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"key": torch.randn(B, 4, S, D)}, "divide"),
        ({"key": torch.randn(B, HKV, S, D + 1)}, "head_dim"),
        ({"key": torch.randn(B, HKV, 0, D)}, "query and key must not be empty"),
        ({"sink_score": torch.zeros(H + 1)}, "sink_score must hold one score a head, got"),
        ({"scale": torch.nan}, "scale must be finite and soft_cap positive"),
        ({"soft_cap": 0.0}, "scale must be finite and soft_cap positive"),
        ({"attn_mask": torch.zeros(T, S)}, "attn_mask must be boolean with True = may attend"),
        ({"attn_bias": torch.zeros(T, S + 1)}, "attn_bias must be broadcastable"),
        ({"is_causal": True, "key": torch.randn(B, HKV, T - 1, D)}, "queries may not outnumber"),
    ],
)
def test_shapes_that_disagree_are_refused(change, words):
    query, key = qkv(torch.float32)
    with pytest.raises(ValueError, match=words):
        AttentionScores(**{"query": query, "key": key, **change})


def test_bad_requests_are_refused():
    scores = AttentionScores(*qkv())
    with pytest.raises(ValueError, match="unknown measure 'entropy'; known: entropy_nats"):
        concentration(scores, ["entropy"])
    with pytest.raises(ValueError, match="unknown measure 'p_max'; known: score_max"):
        concentration(scores, ["score_max"]).mean("p_max")
    with pytest.raises(ValueError, match="num_queries must be at least 1, got num_queries=0"):
        concentration(scores, num_queries=0)
    with pytest.raises(ValueError, match=r"first_tokens must be \[2, 13\] of torch.bool"):
        concentration(scores, first_tokens=torch.zeros(B, T, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"alpha must be \[2, 6, 11\]"):
        concentration(scores, affine=(torch.zeros(H), torch.zeros(B, H, T)))
    with pytest.raises(ValueError, match="documents must be .B, S., boolean starts or integer"):
        first_tokens(torch.zeros(B, S))

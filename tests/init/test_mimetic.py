"""Mimetic initialisation: the products, not the factors."""

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
import torch

from levelhead.init.blocks import split_heads
from levelhead.init.factors import balanced_factors, least_squares_queries
from levelhead.init.mimetic import mimetic_, mimetic_qk, mimetic_vo


def seeded(seed=3):
    return torch.Generator().manual_seed(seed)


def target_from(generator, size, noise, identity):
    gaussian = torch.randn(size, size, generator=generator).double() / size**0.5
    return noise * gaussian + identity * torch.eye(size).double()


def best_approximation(target, rank):
    u, s, vt = np.linalg.svd(target.numpy())
    return torch.from_numpy((u[:, :rank] * s[:rank]) @ vt[:rank])


def wide(rows, columns):
    return torch.empty(rows, columns, dtype=torch.float64)


def test_each_query_key_product_is_the_best_approximation_of_its_target():
    """The first target is the one drawn, every other one that target in other coordinates."""
    size, heads, head_dim = 31, 3, 7
    q, k = mimetic_qk(wide(size, 21), wide(size, 21), num_heads=heads, generator=seeded())
    drawn = target_from(seeded(), size, 0.7, 0.7)
    pairs = torch.cat([split_heads(q, heads), split_heads(k, heads)], dim=2)
    turns = [turn_between(pairs[0], pair) for pair in pairs]
    for turn, pair in zip(turns, pairs, strict=True):
        query, key = pair.tensor_split(2, dim=1)
        expected = best_approximation(turn @ drawn @ turn.mT, head_dim)
        torch.testing.assert_close(query @ key.mT, expected, atol=1e-7, rtol=0)
    first = best_approximation(drawn, head_dim)
    torch.testing.assert_close(q[:, :7] @ k[:, :7].mT, first, atol=1e-7, rtol=0)
    assert (q[:, 7:14] @ k[:, 7:14].mT - first).abs().max() > 0.1


def turn_between(before, after):
    """A rotation (or reflection) that takes the rows of one matrix to those of another."""
    turn, _ = scipy.linalg.orthogonal_procrustes(before.mT.numpy(), after.mT.numpy())
    return torch.from_numpy(turn.T)


@pytest.mark.parametrize("sizes", [(11, 11), (11, 7), (7, 11), (5, 5)])
def test_a_turned_head_has_the_law_of_a_head_of_its_own(sizes):
    head_dim, count = 3, 400
    ours = torch.stack([last_product(sizes, head_dim) for _ in range(count)])
    theirs = torch.stack([own_product(sizes, head_dim, 0.7) for _ in range(count)])
    weaker = torch.stack([own_product(sizes, head_dim, 0.5) for _ in range(count)])
    statistics = {
        "first": lambda m: m[:, 0, 0],
        "beside": lambda m: m[:, 0, 1],
        "below": lambda m: m[:, -1, 0],
        "last": lambda m: m[:, -1, -1],
        "trace": lambda m: m.diagonal(dim1=1, dim2=2).sum(1),
        "norm": lambda m: m.flatten(1).norm(dim=1),
        "symmetric": lambda m: m[:, 0, 2] * m[:, 2, 0],
    }
    for name, statistic in statistics.items():
        test = scipy.stats.ks_2samp(statistic(ours), statistic(theirs))
        assert test.pvalue > 1e-4, name  # 28 tests
    norm = statistics["norm"]
    assert scipy.stats.ks_2samp(norm(ours), norm(weaker)).pvalue < 1e-6


def last_product(sizes, head_dim):
    rows, columns = sizes
    q, k = mimetic_qk(wide(rows, 2 * head_dim), wide(columns, 2 * head_dim), num_heads=2)
    return q[:, head_dim:] @ k[:, head_dim:].mT


def own_product(sizes, head_dim, noise):
    gaussian = torch.randn(*sizes, dtype=torch.float64) / sizes[0] ** 0.5
    return best_approximation(noise * gaussian + 0.7 * torch.eye(*sizes), head_dim)


def test_heads_look_from_independent_directions():
    size, heads = 61, 5
    q, _ = mimetic_qk(wide(size, 35), wide(size, 35), num_heads=heads)
    units = torch.nn.functional.normalize(split_heads(q, heads), dim=1)
    across = torch.cat(
        [(units[i].mT @ units[j]).flatten() for i in range(heads) for j in range(i)]
    )
    # Inner products of independent unit vectors have the law of one coordinate of such a vector.
    law = scipy.stats.beta((size - 1) / 2, (size - 1) / 2, loc=-1, scale=2)
    assert scipy.stats.kstest(across, law.cdf).pvalue > 1e-3


def test_value_output_product_is_its_target_and_not_the_transpose():
    size, heads = 42, 6
    v, o = mimetic_vo(wide(size, size), wide(size, size), num_heads=heads, generator=seeded())
    target = target_from(seeded(), size, 0.4, -0.4)
    torch.testing.assert_close(v @ o, target, atol=1e-7, rtol=0)
    assert (o @ v - target).abs().max() > 0.1


def test_product_statistics_lie_within_their_standard_errors():
    size = 193
    v, o = mimetic_vo(torch.empty(size, size), torch.empty(size, size), num_heads=1)
    product = (v @ o).double()
    off = product[~torch.eye(size, dtype=torch.bool)]
    std = 0.4 / size**0.5
    assert abs(product.diagonal().mean() + 0.4) < 4 * std / size**0.5
    assert abs(off.mean()) < 4 * std / off.numel() ** 0.5
    assert abs(off.std() - std) < 4 * std / (2 * off.numel()) ** 0.5


@pytest.mark.parametrize(("size", "diagonal"), [(192, 0.39), (384, 0.22)])
def test_the_truncation_leaves_the_known_diagonal(size, diagonal):
    q, k = mimetic_qk(torch.empty(size, 64), torch.empty(size, 64), num_heads=1)
    assert float((q * k).sum() / size) == pytest.approx(diagonal, abs=0.012)


def test_factors_share_the_singular_values_evenly():
    target = torch.randn(23, 29, dtype=torch.float64)
    left, right = balanced_factors(target, 11, None)
    root = torch.linalg.svdvals(target)[:11].sqrt()
    torch.testing.assert_close(torch.linalg.vector_norm(left, dim=0), root)
    torch.testing.assert_close(torch.linalg.vector_norm(right, dim=1), root)


def test_a_rank_above_the_matrix_own_is_filled_without_changing_the_product():
    target = torch.randn(5, 7, dtype=torch.float64)
    left, right = balanced_factors(target, 13, seeded())
    torch.testing.assert_close(left @ right, target)
    assert (torch.linalg.vector_norm(left, dim=0) > 0).all()


def test_grouped_heads_follow_the_stated_rule():
    size, heads, kv_heads, head_dim = 30, 6, 2, 5
    host = wide(size, heads * head_dim), wide(size, kv_heads * head_dim)
    q, k = mimetic_qk(*host, num_heads=heads, num_kv_heads=kv_heads, generator=seeded())
    queries = split_heads(q, heads).unflatten(0, (kv_heads, -1))
    keys = split_heads(k, kv_heads)
    first = best_approximation(target_from(seeded(), size, 0.7, 0.7), head_dim)
    torch.testing.assert_close(queries[0, 0] @ keys[0].mT, first, atol=1e-7, rtol=0)
    turn = turn_between(
        torch.cat([queries[0, 0], keys[0]], 1), torch.cat([queries[1, 0], keys[1]], 1)
    )
    torch.testing.assert_close(
        queries[1, 0] @ keys[1].mT, turn @ first @ turn.mT, atol=1e-7, rtol=0
    )


@pytest.mark.parametrize(
    ("rows", "columns", "rank"), [(23, 23, 5), (23, 17, 5), (13, 19, 7), (11, 5, 7)]
)
def test_the_other_queries_of_a_group_solve_for_targets_of_their_own(rows, columns, rank):
    _, right = balanced_factors(torch.randn(rows, columns, dtype=torch.float64), rank, seeded())
    queries = least_squares_queries(right, rows, 50, 0.7, 0.3, None)
    identity = torch.eye(rows, columns, dtype=torch.float64)
    seen = torch.from_numpy(scipy.linalg.orth(right.mT.numpy()))
    noise = []
    for query in queries:
        gaussian = torch.randn(rows, columns, dtype=torch.float64) / rows**0.5
        unseen = (0.7 * gaussian + 0.3 * identity) @ (torch.eye(columns) - seen @ seen.mT)
        target = query @ right + unseen
        solution = torch.from_numpy(np.linalg.lstsq(right.mT.numpy(), target.mT.numpy())[0]).mT
        torch.testing.assert_close(query, solution, atol=1e-9, rtol=0)
        noise.append((target - 0.3 * identity) / 0.7 * rows**0.5)
    entries = torch.stack(noise)
    assert scipy.stats.kstest(entries.flatten(), "norm").pvalue > 1e-3
    assert scipy.stats.kstest((entries @ seen).flatten(), "norm").pvalue > 1e-3


def test_grouped_values_and_outputs_come_from_one_factorisation():
    size, heads, kv_heads, head_dim = 30, 6, 2, 5
    host = wide(size, kv_heads * head_dim), wide(heads * head_dim, size)
    v, o = mimetic_vo(*host, num_heads=heads, num_kv_heads=kv_heads, generator=seeded())
    shares = o.unflatten(0, (kv_heads, heads // kv_heads, head_dim))
    assert torch.equal(shares[:, 0], shares[:, 2])
    # With equal attention in all heads the layer maps x to sum_h x W_V^h W_O^h.
    value = split_heads(v, kv_heads).repeat_interleave(heads // kv_heads, dim=0)
    layer = (value @ o.unflatten(0, (heads, head_dim))).sum(0)
    target = target_from(seeded(), size, 0.4, -0.4)
    expected = best_approximation(target, kv_heads * head_dim)
    torch.testing.assert_close(layer, expected, atol=1e-7, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_in_place_form_casts_once_and_repeats_under_a_seed(dtype):
    weights = [torch.zeros(24, 24, dtype=dtype) for _ in range(4)]
    mimetic_(*weights, num_heads=4, generator=seeded())
    once = [w.clone() for w in weights]
    mimetic_(*weights, num_heads=4, generator=seeded())
    assert all(torch.equal(a, b) for a, b in zip(once, weights, strict=True))
    q, k = mimetic_qk(*weights[:2], num_heads=4, generator=seeded())
    assert torch.equal(weights[0], q.to(dtype))
    assert torch.equal(weights[1], k.to(dtype))


def test_in_place_form_takes_the_constants():
    weights = [torch.zeros(24, 24) for _ in range(4)]
    constants = {"qk_noise": 0.0, "qk_identity": 0.3, "vo_noise": 0.0, "vo_identity": 0.2}
    mimetic_(*weights, num_heads=1, **constants, generator=seeded())
    q, k, v, o = weights
    torch.testing.assert_close(q @ k.T, 0.3 * torch.eye(24), atol=1e-6, rtol=0)
    torch.testing.assert_close(v @ o, 0.2 * torch.eye(24), atol=1e-6, rtol=0)

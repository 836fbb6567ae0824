"""Mimetic initialisation: the products, not the factors."""

import numpy as np
import pytest
import torch

from levelhead.init.blocks import split_heads
from levelhead.init.mimetic import balanced_factors, mimetic_, mimetic_qk, mimetic_vo


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
    size, heads, head_dim = 31, 3, 7
    q, k = mimetic_qk(wide(size, 21), wide(size, 21), num_heads=heads, generator=seeded())
    generator = seeded()
    for q_head, k_head in zip(split_heads(q, heads), split_heads(k, heads), strict=True):
        target = target_from(generator, size, 0.7, 0.7)
        expected = best_approximation(target, head_dim)
        torch.testing.assert_close(q_head @ k_head.mT, expected, atol=1e-7, rtol=0)


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
    generator = seeded()
    for group, key in zip(queries, split_heads(k, kv_heads), strict=True):
        targets = [target_from(generator, size, 0.7, 0.7) for _ in group]
        first = best_approximation(targets[0], head_dim)
        torch.testing.assert_close(group[0] @ key.mT, first, atol=1e-7, rtol=0)
        for query, target in zip(group, targets, strict=True):
            solution = torch.linalg.lstsq(key, target.mT).solution.mT
            torch.testing.assert_close(query, solution, atol=1e-6, rtol=0)


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

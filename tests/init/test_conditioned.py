"""Conditioned initialisation: the promises of the method, on tensors."""

import pytest
import torch

from levelhead.init.blocks import split_heads
from levelhead.init.conditioned import conditioned, conditioned_
from levelhead.init.orthogonal import uniform_orthogonal

E, H, HKV, D = 60, 6, 3, 7


def seeded(seed=3):
    return torch.Generator().manual_seed(seed)


def host(rows=E, columns=H * D, kv_columns=HKV * D, dtype=torch.float32, std=0.02):
    shapes = (rows, columns), (rows, kv_columns), (rows, kv_columns)
    return [(torch.randn(s, generator=seeded(9)) * std).to(dtype) for s in shapes]


def worst_residual(weight, num_heads, gain=1.0):
    blocks = split_heads(weight.detach().double() / gain, num_heads)
    return float((blocks.mT @ blocks - torch.eye(blocks.shape[2])).abs().max())


def test_each_head_of_q_and_k_is_semi_orthogonal_in_float32():
    q, k, v = host()
    conditioned_(q, k, v, num_heads=H, num_kv_heads=HKV, generator=seeded())
    assert worst_residual(q, H) < 1e-6
    assert worst_residual(k, HKV) < 1e-6
    q[0, 0] += 1e-3
    assert worst_residual(q, H) > 1e-4


def test_heads_are_drawn_one_after_the_other_query_first():
    q, k, _ = conditioned(*host(), num_heads=H, num_kv_heads=HKV, generator=seeded())
    generator = seeded()
    for block in (*split_heads(q, H), *split_heads(k, HKV)):
        assert torch.equal(block, uniform_orthogonal((E, D), q, generator))


def test_heads_are_independent_not_orthogonal_to_each_other():
    q, _, _ = conditioned(*host(), num_heads=H, num_kv_heads=HKV, generator=seeded())
    across = q[:, :D].mT @ q[:, D : 2 * D]
    # Each entry is an inner product of independent unit vectors: variance 1 / E.
    assert float(across.std()) == pytest.approx(E**-0.5, rel=0.3)


def test_fused_value_hands_the_hidden_states_through():
    q, k, v = (torch.randn(E, E) for _ in range(3))
    conditioned_(q, k, v, num_heads=5, value="fused", generator=seeded())
    hidden_states = torch.randn(2, 11, E)
    assert torch.equal(hidden_states @ v, hidden_states)


def test_fused_value_of_grouped_heads_reads_the_first_coordinates():
    _, _, v = conditioned(*host(), num_heads=H, num_kv_heads=HKV)
    hidden_states = torch.randn(5, E)
    assert torch.equal(hidden_states @ v, hidden_states[:, : HKV * D])


def test_per_head_value_reads_the_first_head_dim_coordinates_in_every_head():
    _, _, v = conditioned(*host(), num_heads=H, num_kv_heads=HKV, value="per_head")
    hidden_states = torch.randn(5, E)
    assert torch.equal(hidden_states @ v, hidden_states[:, :D].repeat(1, HKV))


def test_columns_beyond_the_width_stay_zero_in_the_fused_value():
    _, _, v = conditioned(*host(rows=13), num_heads=H, num_kv_heads=HKV)
    assert torch.equal(v, torch.eye(13, HKV * D))


def test_match_keeps_frobenius_norms_and_the_condition_number():
    q, k, v = before = host(std=0.031)
    norms = [float(w.double().norm()) for w in before]
    conditioned_(q, k, v, num_heads=H, num_kv_heads=HKV, gain="match", generator=seeded())
    for weight, norm in zip((q, k, v), norms, strict=True):
        assert float(weight.double().norm()) == pytest.approx(norm, rel=1e-6)
    assert worst_residual(q, H, gain=norms[0] / (H * D) ** 0.5) < 1e-6
    assert torch.linalg.cond(split_heads(k, HKV)).max() < 1 + 1e-5


def test_a_gain_scales_all_three():
    plain = conditioned(*host(), num_heads=H, num_kv_heads=HKV, generator=seeded())
    scaled = conditioned(*host(), num_heads=H, num_kv_heads=HKV, gain=2.5, generator=seeded())
    for one, other in zip(plain, scaled, strict=True):
        torch.testing.assert_close(other, 2.5 * one)


def test_a_head_wider_than_the_model_gets_orthonormal_rows():
    q, _, _ = conditioned(*(torch.randn(5, 14) for _ in range(3)), num_heads=2)
    blocks = split_heads(q, 2)
    torch.testing.assert_close(blocks @ blocks.mT, torch.eye(5).expand(2, 5, 5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_one_seed_gives_one_matrix_in_every_dtype(dtype):
    wide = conditioned(*host(), num_heads=H, num_kv_heads=HKV, generator=seeded())
    weights = host(dtype=dtype)
    conditioned_(*weights, num_heads=H, num_kv_heads=HKV, generator=seeded())
    for weight, expected in zip(weights, wide, strict=True):
        assert weight.dtype == dtype
        if dtype == torch.float64:
            torch.testing.assert_close(weight, expected.double(), atol=1e-7, rtol=0)
        else:
            assert torch.equal(weight, expected.to(dtype))


def test_idempotent_under_a_seed_and_silent_on_the_global_stream():
    weights = host()
    state = torch.get_rng_state()
    conditioned_(*weights, num_heads=H, num_kv_heads=HKV, generator=seeded())
    once = [w.clone() for w in weights]
    conditioned_(*weights, num_heads=H, num_kv_heads=HKV, generator=seeded())
    assert all(torch.equal(a, b) for a, b in zip(once, weights, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    conditioned_(*weights, num_heads=H, num_kv_heads=HKV, generator=seeded(4))
    assert not torch.equal(once[0], weights[0])


def test_transposed_parameters_are_filled_through_their_views():
    linears = [torch.nn.Linear(E, E) for _ in range(3)]
    conditioned_(*(linear.weight.T for linear in linears), num_heads=5, generator=seeded())
    assert worst_residual(linears[0].weight.T, 5) < 1e-6
    assert torch.equal(linears[2].weight, torch.eye(E))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"value": "eye"}, "unknown value 'eye'; known: fused, per_head"),
        ({"gain": 0}, "gain must be a positive number or 'match', got gain=0"),
        ({"gain": "host"}, "gain must be a positive number or 'match', got gain='host'"),
        ({"num_heads": 4}, "num_kv_heads must divide num_heads, got num_kv_heads=3, num_heads=4"),
        ({"num_heads": 12, "num_kv_heads": 4}, "num_kv_heads must divide columns of v_weight"),
    ],
)
def test_options_that_do_not_fit_are_refused(changes, words):
    options = {"num_heads": H, "num_kv_heads": HKV} | changes
    with pytest.raises(ValueError, match=words):
        conditioned(*host(), **options)


def test_hosts_that_cannot_be_used_are_refused():
    with pytest.raises(ValueError, match="finite and positive, got a .* matrix of norm 0.0"):
        conditioned(*(torch.zeros(6, 6) for _ in range(3)), num_heads=2, gain="match")
    with pytest.raises(
        ValueError, match="must hold data .* on the meta device; valid: materialise"
    ):
        conditioned(*(torch.empty(6, 6, device="meta") for _ in range(3)), num_heads=2)
    with pytest.raises(ValueError, match="must be a floating-point tensor"):
        conditioned(*(torch.ones(6, 6, dtype=torch.int8) for _ in range(3)), num_heads=2)

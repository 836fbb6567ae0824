"""Every method finds the kappa of autograd's Jacobian, and says what it does not know."""

import math

import pytest
import torch
from heads import (
    autograd_input_jacobian,
    autograd_weight_jacobian,
    forms,
    kappa_and_rank,
    random_head,
)

from levelhead.measure.head import HeadForm, attention_head
from levelhead.measure.jacobian import (
    jacobian_condition,
    jacobian_conditions,
    operator_condition,
)

EPS = torch.finfo(torch.float64).eps
EXACT = ["dense", "lanczos", "autograd"]
SIZES = {
    "full rank": {"tokens": 7, "embed_dim": 11, "head_dim": 5},
    "more rows than weights": {"tokens": 41, "embed_dim": 5, "head_dim": 3},
    "null space by gauge": {"tokens": 31, "embed_dim": 7, "head_dim": 3},
}


def head_arguments(size):
    return random_head(**SIZES[size])


@pytest.mark.parametrize("wrt", ["weights", "input"])
@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("size", SIZES)
def test_exact_methods_agree_with_the_singular_values_of_autograd(size, method, wrt):
    arguments = head_arguments(size)
    oracle = autograd_weight_jacobian if wrt == "weights" else autograd_input_jacobian
    jacobian = oracle(attention_head(*arguments, scale=0.4))
    kappa, rank = kappa_and_rank(jacobian)
    found = jacobian_condition(*arguments, scale=0.4, method=method, wrt=wrt)
    assert found.kappa == pytest.approx(kappa, rel=1e-8)
    assert found.sigma_max == pytest.approx(float(torch.linalg.matrix_norm(jacobian, 2)))
    assert found.sigma_max / found.sigma_min == pytest.approx(found.kappa)
    assert found.shape == tuple(jacobian.shape)
    assert found.rank == rank
    assert found.literal_kappa_is_infinite == (rank < min(jacobian.shape))
    assert (found.method, found.kind) == (method, "exact")
    assert found.residual < 1e-3


def test_the_sizes_cover_full_and_deficient_rank():
    ranks = {
        size: jacobian_condition(*head_arguments(size), scale=0.4).literal_kappa_is_infinite
        for size in SIZES
    }
    assert ranks == {
        "full rank": False,
        "more rows than weights": True,
        "null space by gauge": True,
    }


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("name", forms())
def test_every_form_and_method_agrees_with_autograd(name, method):
    states, *weights = random_head()
    options = {"scale": 0.1, "form": forms()[name], "is_causal": True, "k_bias": torch.ones(5)}
    jacobian = autograd_weight_jacobian(attention_head(states, *weights, **options))
    found = jacobian_condition(states, *weights, method=method, **options)
    kappa, rank = kappa_and_rank(jacobian)
    assert found.kappa == pytest.approx(kappa, rel=max(1e-8, EPS * kappa))
    assert (found.rank, found.kind) == (rank, "exact")


@pytest.mark.parametrize("method", ["dense", "lanczos"])
def test_a_saturated_head_is_exact_or_called_a_lower_bound(method):
    arguments, options = random_head(), {"scale": 0.7, "is_causal": True}
    exact = jacobian_condition(*arguments, method="autograd", **options)
    found = jacobian_condition(*arguments, method=method, **options)
    assert exact.kappa > 1e11
    if method == "dense":
        assert found.kappa == pytest.approx(exact.kappa, rel=exact.residual)
        assert found.kind == "exact"
    else:
        assert found.kappa <= exact.kappa
        assert (found.kind, found.rank, found.literal_kappa_is_infinite) == (
            "lower bound", None, None,
        )  # fmt: skip


@pytest.mark.parametrize("strength", [0.1, 10.0])
def test_spectral_conditioning_is_the_jacobian_at_the_changed_weight(strength):
    states, *weights = random_head()
    shift = strength * torch.eye(11, 5, dtype=torch.float64)

    def conditioned(*weights):
        query, key, value = (states @ (weight + shift) for weight in weights)
        return (0.4 * query @ key.mT).softmax(-1) @ value

    expected = operator_condition(conditioned, weights)
    found = jacobian_condition(states, *(weight + shift for weight in weights), scale=0.4)
    tolerance = max(1e-8, expected.residual)
    assert found.kappa == pytest.approx(expected.kappa, rel=tolerance)
    assert found.rank == expected.rank


@pytest.mark.parametrize("method", EXACT)
def test_empty_rows_and_equal_tokens_only_cost_rank(method):
    states, *weights = random_head()
    mask = torch.rand(7, 7, generator=torch.Generator().manual_seed(0)) > 0.3
    mask[2] = False
    states[5] = states[1]
    mask[5] = mask[1]
    options = {"scale": 0.4, "attn_mask": mask}
    jacobian = autograd_weight_jacobian(attention_head(states, *weights, **options))
    kappa, rank = kappa_and_rank(jacobian)
    found = jacobian_condition(states, *weights, method=method, **options)
    assert rank == 5 * 5
    assert (found.kappa, found.rank) == pytest.approx((kappa, rank), rel=1e-8)
    assert found.literal_kappa_is_infinite


@pytest.mark.parametrize("wrt", ["weights", "input"])
@pytest.mark.parametrize("size", SIZES)
def test_matrix_free_has_sigma_max_and_a_lower_bound(size, wrt):
    arguments = head_arguments(size)
    exact = jacobian_condition(*arguments, scale=0.4, wrt=wrt, method="autograd")
    found = jacobian_condition(*arguments, scale=0.4, wrt=wrt, method="matrix_free")
    assert found.sigma_max == pytest.approx(exact.sigma_max, rel=1e-9)
    assert found.sigma_min >= exact.sigma_min * (1 - 1e-9)
    assert 1 <= found.kappa <= exact.kappa * (1 + 1e-9)
    assert found.kind == "lower bound"
    assert found.rank is None
    assert found.literal_kappa_is_infinite is None


def test_matrix_free_is_only_a_lower_bound_when_it_stops_early():
    from levelhead.measure.conditioning import by_matrix_free
    from levelhead.measure.linearise import linearise
    from levelhead.measure.operators import WeightJacobian

    arguments = random_head(tokens=13, embed_dim=17, head_dim=5)
    operator = WeightJacobian(linearise(attention_head(*arguments, scale=0.4)))
    exact = jacobian_condition(*arguments, scale=0.4, method="autograd")
    few, many = by_matrix_free(operator, max_steps=7), by_matrix_free(operator)
    assert few.kappa < 0.9 * exact.kappa
    assert few.kappa < many.kappa <= exact.kappa * (1 + 1e-9)
    assert few.residual > 50 * many.residual


@pytest.mark.parametrize("method", [*EXACT, "matrix_free"])
def test_one_token_is_perfectly_conditioned_and_nothing_visible_is_no_jacobian(method):
    one = random_head(tokens=1, embed_dim=1, head_dim=1)
    assert jacobian_condition(*one, scale=1.0, method=method).kappa == pytest.approx(1)
    states, *weights = random_head(tokens=3)
    hidden = torch.zeros(3, 3, dtype=torch.bool)
    found = jacobian_condition(states, *weights, scale=1.0, method=method, attn_mask=hidden)
    assert (found.kappa, found.sigma_max, found.rank) == (math.inf, 0, 0)
    assert found.literal_kappa_is_infinite


@pytest.mark.parametrize("method", EXACT)
def test_equal_tokens_everywhere_leave_the_rank_of_one(method):
    _, *weights = random_head()
    states = torch.ones(7, 11, dtype=torch.float64)
    found = jacobian_condition(states, *weights, scale=1.0, method=method)
    assert found.rank == 5
    assert found.kappa == pytest.approx(1, rel=1e-8)


@pytest.mark.parametrize(("exponent", "method"), [(2, "lanczos"), (2, "dense"), (4, "dense")])
def test_digits_survive_where_the_gram_matrix_squares_kappa(exponent, method):
    states, *weights = random_head(tokens=5, embed_dim=13, head_dim=3)
    states = states * torch.logspace(0, -exponent, 5, dtype=torch.float64)[:, None]
    jacobian = autograd_weight_jacobian(attention_head(states, *weights, scale=0.4))
    kappa, rank = kappa_and_rank(jacobian)
    found = jacobian_condition(states, *weights, scale=0.4, method=method)
    assert kappa > 10 ** (exponent + 2)
    assert found.kappa == pytest.approx(kappa, rel=max(1e-8, 10 * EPS * kappa))
    assert (found.rank, found.kind) == (rank, "exact")


def test_lanczos_says_lower_bound_where_the_gram_matrix_is_blind():
    states, *weights = random_head(tokens=5, embed_dim=13, head_dim=3)
    states[4] = states[3] + 1e-9 * torch.randn(13, dtype=torch.float64)
    exact = jacobian_condition(states, *weights, scale=0.4, method="autograd")
    dense = jacobian_condition(states, *weights, scale=0.4, method="dense")
    blind = jacobian_condition(states, *weights, scale=0.4, method="lanczos")
    assert exact.kappa > 1e9
    assert dense.kappa == pytest.approx(exact.kappa, rel=1e-4)
    assert blind.kind == "lower bound"
    assert blind.kappa <= exact.kappa


def test_float32_is_computed_in_float64_and_nothing_carries_a_graph():
    arguments = [tensor.float().requires_grad_() for tensor in random_head()]
    wide = jacobian_condition(*(tensor.double() for tensor in arguments), scale=0.4)
    assert jacobian_condition(*arguments, scale=0.4) == wide


def test_all_heads_of_a_layer_under_grouped_queries():
    states, q_weight, _, _ = random_head(embed_dim=13, head_dim=12)
    _, _, k_weight, v_weight = random_head(embed_dim=13, head_dim=6, seed=1)
    q_bias = torch.randn(12)
    found = jacobian_conditions(
        states, q_weight, k_weight, v_weight, num_heads=4, num_kv_heads=2, scale=0.5,
        q_bias=q_bias, is_causal=True,
    )  # fmt: skip
    for head in range(4):
        query, group = slice(3 * head, 3 * head + 3), slice(3 * (head // 2), 3 * (head // 2) + 3)
        alone = jacobian_condition(
            states, q_weight[:, query], k_weight[:, group], v_weight[:, group], scale=0.5,
            q_bias=q_bias[query], is_causal=True,
        )  # fmt: skip
        assert found[head] == alone


def test_any_function_by_exact_products():
    matrix = torch.randn(7, 5, dtype=torch.float64)
    squares = torch.linalg.svdvals(matrix)
    found = operator_condition(lambda x: matrix @ x, [torch.randn(5)])
    assert found.kappa == pytest.approx(float(squares[0] / squares[-1]), rel=1e-12)
    lower = operator_condition(lambda x: matrix @ x, [torch.randn(5)], method="matrix_free")
    assert lower.kappa == pytest.approx(found.kappa, rel=1e-8)


def test_gated_head_to_its_input_by_exact_products():
    states, *weights = random_head()
    gate_weight = torch.randn(11, 5, dtype=torch.float64)
    head = attention_head(states, *weights, scale=0.4)

    def gated(states):
        return head.output_of_input(states) * torch.sigmoid(states @ gate_weight)

    dense = torch.autograd.functional.jacobian(gated, states).flatten(2).flatten(0, 1)
    found = operator_condition(gated, [states])
    assert (found.kappa, found.rank) == pytest.approx(kappa_and_rank(dense), rel=1e-9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "svd"}, "unknown method 'svd'; known: auto, dense, lanczos"),
        ({"wrt": "output"}, "unknown wrt 'output'; known: weights, input"),
        ({"k_weight": torch.zeros(11, 4)}, "q_weight and k_weight share head_dim, got.*11, 4"),
        ({"hidden_states": torch.zeros(2, 7, 11)}, "must be matrices with entries"),
        ({"v_weight": torch.full((11, 5), torch.nan)}, "v_weight must be finite, got 55 non-fin"),
        ({"hidden_states": torch.full((7, 11), torch.inf)}, "hidden_states must be finite"),
        ({"q_weight": torch.zeros(11, 5, dtype=torch.int64)}, "must be a floating-point tensor"),
        ({"q_bias": torch.zeros(4)}, "q_bias must have one number a column"),
        ({"attn_mask": torch.ones(7, 7)}, "attn_mask must be boolean"),
        ({"attn_mask": torch.ones(7, 6, dtype=torch.bool)}, "attn_mask must be broadcastable"),
        ({"attn_bias": torch.full((7, 7), torch.nan)}, "attn_bias may hold finite numbers"),
        ({"form": HeadForm(soft_cap=0.0)}, "soft_cap must be positive, got soft_cap=0.0"),
        ({"form": HeadForm(row_scale=torch.ones(6))}, r"row_scale must be finite and \[7\]"),
        (
            {"form": HeadForm(output_gate=torch.ones(7, 5)), "wrt": "input"},
            "needs every slot as a function of the input, got fixed numbers in output_gate.*"
            "operator_condition",
        ),
        ({"wrt": "input", "key_value_states": torch.ones(7, 11)}, "is for self-attention"),
    ],
)
def test_bad_input_is_refused_in_words(change, message):
    names = ("hidden_states", "q_weight", "k_weight", "v_weight")
    arguments = dict(zip(names, random_head(), strict=True)) | {"scale": 0.4} | change
    with pytest.raises(ValueError, match=message):
        jacobian_condition(**arguments)


@pytest.mark.slow
def test_vit_base_head_by_lanczos_against_all_eigenvalues():
    """T 67, E 768, D 64: 4,288 rows; the Gram matrix whole against its two ends."""
    generator = torch.Generator().manual_seed(0)
    states = torch.nn.functional.layer_norm(torch.randn(67, 768, generator=generator), (768,))
    weights = [0.02 * torch.randn(768, 64, generator=generator) for _ in range(3)]
    dense = jacobian_condition(states, *weights, scale=0.125, method="dense")
    found = jacobian_condition(states, *weights, scale=0.125, method="lanczos")
    assert found.kappa == pytest.approx(dense.kappa, rel=1e-9)
    assert found.residual < 1e-6


@pytest.mark.slow
def test_a_middling_head_against_autograd():
    generator = torch.Generator().manual_seed(0)
    states = torch.nn.functional.layer_norm(torch.randn(41, 97, generator=generator), (97,))
    weights = [0.07 * torch.randn(97, 17, generator=generator) for _ in range(3)]
    exact = jacobian_condition(states, *weights, scale=17**-0.5, method="autograd")
    for method in ("dense", "lanczos"):
        found = jacobian_condition(states, *weights, scale=17**-0.5, method=method)
        assert (found.kappa, found.rank) == pytest.approx((exact.kappa, exact.rank), rel=1e-8)

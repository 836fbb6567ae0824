"""The valid bound holds; the papers' surrogate is computed right and is no bound."""

import math

import numpy as np
import pytest
import torch
from heads import forms, random_head

from levelhead.measure.jacobian import jacobian_condition
from levelhead.measure.surrogate import jacobian_bound, jacobian_surrogate


def nonzero_kappa(matrix):
    values = np.linalg.svd(np.asarray(matrix), compute_uv=False)
    kept = values[values > max(matrix.shape) * np.finfo(float).eps * values[0]]
    return kept[0] / kept[-1]


def test_surrogate_is_the_papers_expression_over_non_zero_singular_values():
    states, q_weight, k_weight, v_weight = random_head(tokens=5, embed_dim=7, head_dim=3, gain=0.3)
    found = jacobian_surrogate(states, q_weight, k_weight, v_weight, scale=0.5, is_causal=True)
    scores = 0.5 * (states @ q_weight) @ (states @ k_weight).mT
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    attn_weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    blocks = torch.diag_embed(attn_weights) - attn_weights[:, :, None] * attn_weights[:, None]
    kappas = [nonzero_kappa(m) for m in (states, q_weight, k_weight, v_weight, attn_weights)]
    softmax = nonzero_kappa(torch.block_diag(*blocks))
    expected = kappas[0] ** 3 * softmax * kappas[3] * (kappas[1] + kappas[2])
    assert found.value == pytest.approx(expected + kappas[0] * kappas[4], rel=1e-9)
    assert found.kappa_softmax == pytest.approx(softmax, rel=1e-9)
    assert "not a bound" in found.label


def test_surrogate_of_one_visible_key_is_infinite():
    found = jacobian_surrogate(*random_head(), scale=0.5, attn_mask=torch.eye(7, dtype=torch.bool))
    assert found.kappa_softmax == found.value == math.inf


def test_the_surrogate_is_no_bound_because_it_does_not_see_the_scale_of_the_value_weight():
    """A first token that sees itself alone answers to W_V only, the others to its product."""
    states, q_weight, k_weight, v_weight = random_head(4, 6, 2)
    found = {}
    for gain in (1, 1e8):
        arguments = (states, q_weight, k_weight, gain * v_weight)
        surrogate = jacobian_surrogate(*arguments, scale=0.3, is_causal=True)
        exact = jacobian_condition(*arguments, scale=0.3, is_causal=True)
        assert exact.kappa <= jacobian_bound(*arguments, scale=0.3, is_causal=True).kappa
        found[gain] = (surrogate.value, exact.kappa)
    assert found[1e8][0] == pytest.approx(found[1][0], rel=1e-6)
    assert found[1e8][1] > found[1e8][0]
    assert found[1][1] < found[1][0]


def check_bounds(seeds):
    ratios = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        tokens, head_dim = (int(torch.randint(2, 6, (), generator=generator)) for _ in range(2))
        gain = float(torch.rand((), generator=generator)) + 0.05
        arguments = random_head(tokens, 7, head_dim, gain=gain, seed=seed)
        options = {"scale": head_dim**-0.5, "is_causal": bool(seed % 2)}
        bound = jacobian_bound(*arguments, **options)
        found = jacobian_condition(*arguments, method="dense", **options)
        rounding = 1e-10 + found.residual
        assert found.sigma_max <= bound.sigma_max * (1 + rounding)
        assert found.sigma_min >= bound.sigma_min * (1 - rounding)
        assert found.kappa <= bound.kappa * (1 + rounding)
        if bound.exists:
            ratios.append(bound.kappa / found.kappa)
    assert len(ratios) >= 0.99 * len(seeds)
    return torch.tensor(ratios).median()


def test_the_bound_holds_and_is_within_sight():
    assert check_bounds(range(100)) < 10


@pytest.mark.slow
def test_the_bound_holds_on_a_thousand_random_heads():
    assert check_bounds(range(1000)) < 10


@pytest.mark.parametrize("name", forms(tokens=5, head_dim=5))
def test_the_bound_holds_for_every_form(name):
    form = forms(tokens=5, head_dim=5)[name]
    for seed in range(5):
        arguments = random_head(5, 11, 5, seed=seed)
        options = {"scale": 0.3, "form": form, "q_bias": torch.randn(5), "v_bias": torch.randn(5)}
        bound = jacobian_bound(*arguments, **options)
        found = jacobian_condition(*arguments, **options)
        assert found.sigma_max <= bound.sigma_max * (1 + 1e-10)
        assert found.kappa <= bound.kappa * (1 + 1e-10)


def test_no_bound_where_there_are_more_tokens_than_channels():
    bound = jacobian_bound(*random_head(tokens=13, embed_dim=5, head_dim=3), scale=0.5)
    assert not bound.exists
    assert (bound.kappa, bound.sigma_min) == (math.inf, 0)
    exact = jacobian_condition(*random_head(tokens=13, embed_dim=5, head_dim=3), scale=0.5)
    assert exact.sigma_max <= bound.sigma_max < math.inf

"""LayerNorm's Jacobian, its contraction, and residual blocks, against autograd."""

import pytest
import torch
from heads import kappa_and_rank
from torch import nn
from torch.nn.functional import layer_norm

from levelhead.measure.layernorm import (
    layer_norm_contraction,
    layer_norm_jacobian,
    residual_jacobian,
)


@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.3])
def test_layer_norm_jacobian_is_autograds(eps):
    states, gamma = torch.randn(3, 7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    found = layer_norm_jacobian(states, gamma, eps)
    for token, jacobian in zip(states, found, strict=True):
        norm = lambda x: layer_norm(x, (7,), gamma, torch.ones(7).double(), eps)  # noqa: E731
        expected = torch.autograd.functional.jacobian(norm, token)
        assert (jacobian - expected).abs().max() < 1e-13 * expected.abs().max()


@pytest.mark.parametrize(("eps", "lost"), [(0.0, 2), (1e-5, 1)])
def test_layer_norm_jacobian_loses_the_directions_of_the_mean_and_of_itself(eps, lost):
    jacobian = layer_norm_jacobian(torch.randn(3, 7, dtype=torch.float64), eps=eps)
    assert torch.linalg.matrix_rank(jacobian).tolist() == [7 - lost] * 3


def test_contraction_factor_is_never_below_the_norm():
    states, gamma = 2 * torch.randn(2, 5, 11, dtype=torch.float64), torch.randn(11).double()
    found = layer_norm_contraction(states, gamma)
    norms = torch.linalg.matrix_norm(layer_norm_jacobian(states, gamma), 2)
    assert (found.factor >= norms * (1 - 1e-12)).all()
    assert (found.factor / norms).min() < 1.2
    assert torch.equal(found.contracts, found.factor < 1)
    sigma = (states.var(-1, unbiased=False) + 1e-5).sqrt()
    assert torch.allclose(found.factor, gamma.abs().max() / sigma)


def test_a_product_of_contracting_norms_shrinks_geometrically():
    states = 5 * torch.randn(6, 1, 13, dtype=torch.float64)  # six layers, one token
    found = layer_norm_contraction(states)
    assert found.contracts.all()
    product = torch.linalg.multi_dot(list(layer_norm_jacobian(states)[:, 0]))
    assert torch.linalg.matrix_norm(product, 2) <= found.factor.prod() * (1 + 1e-12)
    assert not layer_norm_contraction(0.1 * states).contracts.any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(3, 5), torch.ones(4)), r"weight must be \[E\], got weight \[4\]"),
        ((torch.full((3, 5), torch.nan),), "must be finite"),
        ((torch.randn(3, 5), None, -1.0), "eps must not be negative, got eps=-1.0"),
        ((torch.ones(3, 5), None, 0.0), "eps must be positive where a token is constant"),
    ],
)
def test_bad_layer_norm_input_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        layer_norm_jacobian(*arguments)


def test_contraction_of_a_constant_token_without_eps_is_none():
    found = layer_norm_contraction(torch.ones(3, 5), eps=0.0)
    assert found.factor.isinf().all()
    assert not found.contracts.any()


def block(norm_first, activation=torch.tanh):
    return nn.TransformerEncoderLayer(
        6, 2, 13, dropout=0.0, activation=activation, batch_first=True, norm_first=norm_first
    ).eval()


@pytest.mark.parametrize("norm_first", [True, False])
def test_residual_block_has_the_singular_values_of_autograd(norm_first):
    layer, states = block(norm_first), torch.randn(2, 5, 6)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    found = residual_jacobian(layer, states)
    wide = block(norm_first).double()
    wide.load_state_dict(layer.state_dict())
    dense = torch.autograd.functional.jacobian(wide, states.double()).flatten(3).flatten(0, 2)
    assert found.kappa == pytest.approx(kappa_and_rank(dense)[0], rel=1e-2)
    assert found.sigma_max == pytest.approx(float(torch.linalg.matrix_norm(dense, 2)), rel=1e-9)
    lower = residual_jacobian(layer, states, method="matrix_free")
    assert lower.sigma_max == pytest.approx(found.sigma_max, rel=1e-9)
    assert lower.kappa <= found.kappa * (1 + 1e-6)
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, before[name])
        assert tensor.dtype == torch.float32


def test_pre_norm_keeps_the_identity_and_post_norm_does_not():
    """With a branch that does nothing, pre-LN is the identity and post-LN loses rank."""
    states = torch.randn(1, 5, 6)
    ranks = {}
    for norm_first in (True, False):
        layer = block(norm_first)
        for name, parameter in layer.named_parameters():
            if name in {"self_attn.out_proj.weight", "linear2.weight"}:
                nn.init.zeros_(parameter)
        found = residual_jacobian(layer, states)
        ranks[norm_first] = (found.rank, found.kappa)
    assert ranks[True] == (30, pytest.approx(1, rel=1e-12))
    assert ranks[False][0] < 30
    assert ranks[False][1] > 10


def test_a_random_block_is_refused():
    layer = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5))
    with pytest.raises(ValueError, match="block must be deterministic.*two different outputs"):
        residual_jacobian(layer, torch.randn(7, 5))
    with pytest.raises(ValueError, match="must compute in float64"):
        residual_jacobian(lambda x: x.float(), torch.randn(7, 5))

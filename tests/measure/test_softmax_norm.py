"""Norms of the softmax Jacobian against torch.linalg on the matrix itself."""

import math

import pytest
import torch

from levelhead.measure.softmax_norm import softmax_jacobian_norm


def jacobians(p):
    return torch.diag_embed(p) - p[..., :, None] * p[..., None, :]


@pytest.mark.parametrize("spread", [0, 1e-6, 0.1, 1, 4, 20])
def test_norms_agree_with_the_matrix(spread):
    torch.manual_seed(1)
    p = (spread * torch.randn(13, 7, 23, dtype=torch.float64)).softmax(-1)
    p[:, 0, 5:] = 0
    p = p / p.sum(-1, keepdim=True)
    spectral = torch.linalg.matrix_norm(jacobians(p), 2)
    frobenius = torch.linalg.matrix_norm(jacobians(p), "fro")
    torch.testing.assert_close(softmax_jacobian_norm(p, 2), spectral, rtol=0, atol=1e-14)
    torch.testing.assert_close(softmax_jacobian_norm(p, "fro"), frobenius, rtol=0, atol=1e-14)


def test_norms_keep_relative_accuracy_when_one_key_holds_all():
    small = 1e-25
    p = torch.tensor([1.0, small, small], dtype=torch.float64)
    # To first order in small the matrix is small times this one.
    scaled = torch.tensor([[2.0, -1, -1], [-1, 1, 0], [-1, 0, 1]], dtype=torch.float64)
    for ord_ in (2, "fro"):
        expected = small * torch.linalg.matrix_norm(scaled, ord_).item()
        found = softmax_jacobian_norm(p, ord_).item()
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_spectral_norm_is_at_most_half_of_theta_and_reaches_it():
    torch.manual_seed(2)
    p = (3 * torch.randn(1500, 8, dtype=torch.float64)).softmax(-1)
    theta = softmax_jacobian_norm(p, (math.inf, 1))
    assert (softmax_jacobian_norm(p, 2) <= theta / 2 + 1e-15).all()
    two_keys = torch.tensor([0.3, 0.7, 0.0], dtype=torch.float64)
    assert softmax_jacobian_norm(two_keys, 2).item() == pytest.approx(0.42, rel=1e-14)


def test_special_rows():
    rows = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0], [1 / 3, 1 / 3, 1 / 3], [0, 0, 0]]).double()
    assert softmax_jacobian_norm(rows, 2)[:3].tolist() == pytest.approx([0, 0.5, 1 / 3])
    for ord_ in ((math.inf, 1), 2, "fro"):
        assert softmax_jacobian_norm(rows, ord_).isnan().tolist() == [False, False, False, True]


def test_case_a18_quantiles_tell_saturated_rows_from_healthy_ones():
    """q, k normalised to RMS 1 with head_dim 256: scale 1 against 1/16."""
    torch.manual_seed(18)
    levels = torch.tensor([0.1, 0.5, 0.9, 0.99], dtype=torch.float64)
    scores = torch.randn(1500, 128, dtype=torch.float64)
    healthy = softmax_jacobian_norm(scores.softmax(-1), 2).quantile(levels)
    saturated = softmax_jacobian_norm((16 * scores).softmax(-1), 2).quantile(levels)
    expected = torch.tensor([0.04, 0.06, 0.10, 0.14], dtype=torch.float64)
    torch.testing.assert_close(healthy, expected, rtol=0, atol=0.02)
    expected = torch.tensor([0.00, 0.03, 0.41, 0.49], dtype=torch.float64)
    torch.testing.assert_close(saturated, expected, rtol=0, atol=0.04)
    assert saturated[1] < healthy[1] < healthy[3] < saturated[2]


def test_unknown_norm_is_refused():
    with pytest.raises(ValueError, match=r"unknown ord '3'; known: \(inf, 1\), 2, fro"):
        softmax_jacobian_norm(torch.tensor([1.0]), 3)

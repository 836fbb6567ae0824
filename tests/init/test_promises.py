"""The measures behind the report, against torch's own decompositions."""

import pytest
import torch

from levelhead.init.blocks import merge_heads, split_heads
from levelhead.init.promises import head_facts, product_facts


def test_head_facts_agree_with_singular_values():
    weight = torch.randn(17, 3 * 5)
    facts = head_facts(weight, 3)
    values = torch.linalg.svdvals(split_heads(weight, 3).double())
    kappa = values[:, 0] / values[:, -1]
    assert facts.kappa_max == pytest.approx(float(kappa.max()), rel=1e-9)
    assert facts.kappa_median == pytest.approx(float(kappa.median()), rel=1e-9)
    assert facts.spectral_norm == pytest.approx(float(values.max()), rel=1e-9)
    assert facts.frobenius_norm == pytest.approx(float(weight.double().norm()), rel=1e-9)


def test_the_residual_is_zero_exactly_for_scaled_semi_orthogonal_blocks():
    q, _ = torch.linalg.qr(torch.randn(2, 11, 3, dtype=torch.float64))
    assert head_facts(merge_heads(3.5 * q), 2).orthogonality_residual < 1e-14
    uneven = merge_heads(q * torch.tensor([1.0, 1.1]).view(2, 1, 1))
    assert head_facts(uneven, 2).orthogonality_residual == pytest.approx(0.1, abs=0.02)
    q[0, :, 0] = q[0, :, 1]
    facts = head_facts(merge_heads(q), 2)
    assert facts.orthogonality_residual == pytest.approx(1.0)
    assert facts.kappa_max == float("inf")


def test_wide_blocks_are_measured_on_their_rows():
    rows, _ = torch.linalg.qr(torch.randn(7, 4, dtype=torch.float64))
    facts = head_facts(rows.mT, 1)
    assert facts.orthogonality_residual < 1e-14
    assert facts.kappa_max == pytest.approx(1.0)


def test_matrices_without_numbers_give_nan_and_no_exception():
    facts = head_facts(torch.full((6, 4), torch.nan), 2)
    assert facts.kappa_max != facts.kappa_max
    assert facts.frobenius_norm != facts.frobenius_norm
    assert head_facts(torch.zeros(6, 4), 2).kappa_max == float("inf")


@pytest.mark.parametrize("columns", [13, 9])
def test_product_facts_agree_with_the_products(columns):
    left, right = torch.randn(3, 13, 5), torch.randn(3, 5, columns)
    products = (left @ right).double()
    mask = torch.eye(13, columns, dtype=torch.bool)
    facts = product_facts(left, right)
    assert facts.diagonal_mean == pytest.approx(float(products[:, mask].mean()), abs=1e-5)
    rms = products[:, ~mask].square().mean().sqrt()
    assert facts.off_diagonal_std == pytest.approx(float(rms), rel=1e-5)

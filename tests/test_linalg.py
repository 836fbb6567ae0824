"""Matrix facts hold against numpy and scipy, and survive every bad matrix."""

import numpy as np
import pytest
import torch

from levelhead import linalg
from levelhead.linalg import (
    Status,
    condition_number,
    orthogonal_factor,
    polar_factor,
    singular_values,
    spectral_norm,
    symmetric_eigenvalues,
)

SHAPES = [(1, 1), (7, 3), (3, 11), (5, 5), (2, 13, 7)]


def word(status):
    return Status(int(status)).word


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_and_condition_agree_with_numpy(shape):
    matrix = torch.randn(shape, dtype=torch.float64)
    expected = np.linalg.svd(matrix.numpy(), compute_uv=False)
    spectrum, condition = singular_values(matrix), condition_number(matrix)
    assert spectrum.values.numpy() == pytest.approx(expected, rel=1e-12)
    assert condition.kappa.numpy() == pytest.approx(np.linalg.cond(matrix.numpy()), rel=1e-10)
    assert condition.sigma_max.numpy() == pytest.approx(expected[..., 0], rel=1e-12)
    assert condition.sigma_min.numpy() == pytest.approx(expected[..., -1], rel=1e-10)
    assert (spectrum.status == Status.OK).all()


def test_symmetric_eigenvalues_agree_with_numpy_and_read_the_lower_triangle():
    half = torch.randn(3, 7, 7, dtype=torch.float64)
    symmetric = half + half.mT
    expected = np.linalg.eigvalsh(symmetric.numpy())[..., ::-1]
    garbled = symmetric.tril() + 5 * torch.randn(3, 7, 7, dtype=torch.float64).triu(1)
    assert symmetric_eigenvalues(garbled).values.numpy() == pytest.approx(expected, abs=1e-12)
    with pytest.raises(ValueError, match=r"must be square, got matrix \[3, 7, 6\]"):
        symmetric_eigenvalues(symmetric[..., :6])


# A21: SVD "failed to converge" was really a NaN input.


@pytest.mark.parametrize(
    ("matrix", "status", "kappa", "rank"),
    [
        (torch.zeros(64, 5), "rank-deficient", torch.inf, 0),
        (torch.eye(7) * 1e-30, "ok", 1.0, 7),
        (torch.randn(1, 9).expand(64, 9), "rank-deficient", torch.inf, 1),
        (torch.tensor([[-3.0]]), "ok", 1.0, 1),
        (torch.eye(200)[:3], "ok", 1.0, 3),
        (torch.full((3, 5), torch.nan), "non-finite", torch.nan, 0),
        (torch.tensor([[1.0, torch.inf], [0, 1]]), "non-finite", torch.nan, 0),
        (torch.eye(3, dtype=torch.float64) * 1e300, "ok", 1.0, 3),
    ],
)
def test_case_a21_every_bad_matrix_gets_a_status_and_no_exception(matrix, status, kappa, rank):
    condition = condition_number(matrix)
    assert word(condition.status) == status
    assert float(condition.kappa) == pytest.approx(kappa, nan_ok=True)
    assert int(condition.rank) == rank
    assert torch.isnan(condition.kappa) == (not matrix.isfinite().all())


def test_case_a21_one_bad_member_leaves_the_others_as_they_are():
    batch = torch.randn(4, 5, 3)
    alone = condition_number(batch)
    batch[2, 1, 1] = torch.nan
    together = condition_number(batch)
    good = torch.tensor([0, 1, 3])
    assert torch.equal(together.kappa[good], alone.kappa[good])
    assert torch.equal(together.sigma_min[good], alone.sigma_min[good])
    assert together.kappa[2].isnan()
    assert [word(s) for s in together.status] == ["ok", "ok", "non-finite", "ok"]


def test_case_a21_a_failing_routine_costs_only_the_member_that_fails(monkeypatch):
    batch = torch.randn(2, 3, 7, 5)
    expected = singular_values(batch).values
    usual, culprit = torch.linalg.svdvals, batch[1, 2].double()

    def failing(matrix):
        if any(torch.equal(member, culprit) for member in matrix.reshape(-1, 7, 5)):
            raise torch.linalg.LinAlgError("did not converge")
        return usual(matrix)

    monkeypatch.setattr(linalg.torch.linalg, "svdvals", failing)
    spectrum = singular_values(batch)
    assert (spectrum.status == Status.FALLBACK).nonzero().tolist() == [[1, 2]]
    assert spectrum.values.numpy() == pytest.approx(expected.numpy(), rel=1e-7)


def test_case_a21_a_failing_eigenvalue_routine_falls_back_too(monkeypatch):
    half = torch.randn(7, 7, dtype=torch.float64)
    matrix = half + half.mT
    expected = symmetric_eigenvalues(matrix).values

    def failing(_):
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(linalg.torch.linalg, "eigvalsh", failing)
    spectrum = symmetric_eigenvalues(matrix)
    assert word(spectrum.status) == "fallback"
    assert spectrum.values.numpy() == pytest.approx(expected.numpy(), rel=1e-10)


@pytest.mark.parametrize(
    "matrix",
    [
        torch.zeros(3, 5),
        torch.eye(5),
        torch.ones(64, 3),
        torch.randn(7, 3),
        torch.full((3, 2), torch.nan),
        torch.stack([torch.randn(3, 2), torch.full((3, 2), torch.inf)]),
    ],
)
def test_case_a21_the_gradient_of_the_norm_is_finite(matrix):
    matrix = matrix.clone().requires_grad_()
    spectral_norm(matrix).sum().backward()
    assert matrix.grad.isfinite().all()


def test_no_gradient_flows_through_the_monitor():
    assert not condition_number(torch.randn(3, 3, requires_grad=True)).kappa.requires_grad


def test_spectral_norm_and_its_gradient():
    matrix = torch.randn(2, 7, 5, dtype=torch.float64, requires_grad=True)
    expected = np.linalg.norm(matrix.detach().numpy(), 2, axis=(-2, -1))
    assert spectral_norm(matrix).detach().numpy() == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.gradcheck(spectral_norm, matrix)
    assert spectral_norm(torch.randn(3, 3, dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize("eps_of", [None, torch.float32])
def test_rank_follows_the_precision_of_the_numbers(eps_of):
    matrix = torch.diag(torch.tensor([1.0, 1e-9], dtype=torch.float64))
    condition = condition_number(matrix, eps_of)
    assert int(condition.rank) == (2 if eps_of is None else 1)
    assert float(condition.kappa) == pytest.approx(1e9 if eps_of is None else torch.inf)
    assert float(condition.kappa_nonzero) == pytest.approx(1e9 if eps_of is None else 1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("factor", [polar_factor, orthogonal_factor])
def test_factors_are_semi_orthogonal(shape, factor):
    matrix = torch.randn(shape, dtype=torch.float64) * 1e-200
    result = factor(matrix)
    small = result.mT @ result if shape[-2] >= shape[-1] else result @ result.mT
    assert (small - torch.eye(small.shape[-1], dtype=small.dtype)).abs().max() < 1e-13


def test_polar_factor_is_the_nearest_semi_orthogonal_matrix():
    matrix = torch.randn(7, 3, dtype=torch.float64)
    left, _, right = np.linalg.svd(matrix.numpy(), full_matrices=False)
    factor = polar_factor(matrix)
    assert factor.numpy() == pytest.approx(left @ right, abs=1e-13)
    others = torch.linalg.qr(torch.randn(100, 7, 3, dtype=torch.float64)).Q
    assert (matrix - factor).norm() < (matrix - others).norm(dim=(1, 2)).min()


def test_polar_factor_of_a_rank_deficient_matrix_is_semi_orthogonal_all_the_same():
    factor = polar_factor(torch.ones(7, 3, dtype=torch.float64))
    assert (factor.mT @ factor - torch.eye(3)).abs().max() < 1e-13


def test_orthogonal_factor_has_the_signs_fixed():
    matrix = torch.randn(7, 3, dtype=torch.float64)
    upper = orthogonal_factor(matrix).mT @ matrix
    assert (upper.diagonal() > 0).all()
    assert upper.tril(-1).abs().max() < 1e-13


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_factors_keep_the_dtype_and_are_computed_in_float64(dtype):
    matrix = torch.randn(7, 3).to(dtype)
    wide = polar_factor(matrix.double())
    assert polar_factor(matrix).dtype == dtype
    assert torch.equal(polar_factor(matrix), wide.to(dtype))


@pytest.mark.parametrize("factor", [polar_factor, orthogonal_factor])
def test_factors_refuse_what_is_not_finite(factor):
    with pytest.raises(ValueError, match=r"must be finite, got 2 non-finite entries in matrix"):
        factor(torch.tensor([[1.0, torch.nan], [torch.inf, 1.0]]))


@pytest.mark.parametrize("matrix", [torch.zeros(3), torch.zeros(0, 3)])
def test_what_is_no_matrix_is_refused(matrix):
    with pytest.raises(ValueError, match="must have at least two axes and one entry"):
        condition_number(matrix)
    with pytest.raises(ValueError, match=r"must be a floating-point tensor.*int64"):
        condition_number(torch.ones(3, 3, dtype=torch.int64))

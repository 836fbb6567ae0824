"""Whole-matrix controls: semi-orthogonal and Xavier."""

import numpy as np
import pytest
import scipy.stats
import torch

from levelhead.init.orthogonal import (
    orthogonal,
    orthogonal_,
    orthogonal_from_reflections,
    uniform_orthogonal,
    xavier,
    xavier_,
)


@pytest.mark.parametrize("shape", [(96, 96), (64, 192), (192, 64), (1, 1)])
def test_the_shorter_side_is_orthonormal(shape):
    weight = orthogonal(torch.empty(shape)).double()
    gram = weight @ weight.mT if shape[0] < shape[1] else weight.mT @ weight
    torch.testing.assert_close(gram, torch.eye(min(shape)).double(), atol=1e-6, rtol=0)


def gaussian_behind(drawn):
    """The Gaussian matrix that a factorisation by reflections would turn into the one drawn."""
    whole, turn = np.zeros_like(drawn), np.eye(len(drawn))
    for column, entries in enumerate(drawn.T):
        whole[:, column] = turn @ entries
        mirror = np.where(np.arange(len(drawn)) < column, 0.0, entries)
        mirror[column] += np.copysign(np.linalg.norm(mirror), mirror[column])
        turn = turn @ (np.eye(len(drawn)) - 2 * np.outer(mirror, mirror) / (mirror @ mirror))
    return whole


@pytest.mark.parametrize("shape", [(11, 5), (13, 13), (7, 1)])
def test_the_matrix_is_the_sign_fixed_qr_factor_of_a_gaussian(shape):
    drawn = torch.randn(shape, dtype=torch.float64)
    factor, triangle = np.linalg.qr(gaussian_behind(drawn.numpy()))
    expected = factor * np.sign(np.diag(triangle))
    np.testing.assert_allclose(orthogonal_from_reflections(drawn), expected, atol=1e-13)


def test_a_wide_matrix_is_a_tall_one_transposed():
    tall, wide = (
        uniform_orthogonal(shape, torch.empty(0), torch.Generator().manual_seed(3))
        for shape in ((7, 4), (4, 7))
    )
    assert torch.equal(tall, wide.T)
    assert tall.dtype == torch.float32


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (3, 3)])
def test_even_a_draw_of_zeros_has_a_direction(shape):
    factor = orthogonal_from_reflections(torch.zeros(shape))
    assert torch.equal(factor.abs(), torch.eye(*shape).double())


def test_orthogonal_is_uniform():
    """Against scipy's, in statistics that see the signs, the columns and the eigenvalues."""
    ours = np.stack([orthogonal(torch.empty(4, 4)).numpy() for _ in range(900)])
    theirs = scipy.stats.ortho_group(4, seed=5).rvs(900)
    statistics = {
        "corner": lambda m: m[:, 0, 0],
        "last": lambda m: m[:, 3, 3],
        "above the diagonal": lambda m: m[:, 0, 3],
        "trace": lambda m: np.trace(m, axis1=1, axis2=2),
        "trace of the square": lambda m: np.trace(m @ m, axis1=1, axis2=2),
        "determinant": lambda m: np.linalg.det(m).round(),
    }
    for name, statistic in statistics.items():
        assert scipy.stats.ks_2samp(statistic(ours), statistic(theirs)).pvalue > 1e-3, name
    unsigned, _ = np.linalg.qr(np.random.default_rng(1).standard_normal((900, 4, 4)))
    trace = statistics["trace"]
    assert scipy.stats.ks_2samp(trace(unsigned), trace(theirs)).pvalue < 1e-6


def test_orthogonal_has_the_moments_of_the_uniform_law():
    # Under the uniform law E[tr W] = 0 and Var[tr W] = 1; without the sign rule the mean moves.
    traces = torch.stack([orthogonal(torch.empty(3, 3)).trace() for _ in range(600)])
    assert abs(traces.mean()) < 4 / 600**0.5
    assert float(traces.var()) == pytest.approx(1.0, rel=0.25)


def test_xavier_has_the_variance_of_the_logical_matrix():
    weight = xavier(torch.empty(211, 307), gain=1.5)
    variance = 1.5**2 * 2 / (211 + 307)
    # The standard error of a Gaussian's sample variance is variance * sqrt(2 / n).
    assert abs(weight.var() - variance) < 4 * variance * (2 / weight.numel()) ** 0.5


def test_in_place_forms_fill_what_they_are_given():
    first, second = torch.zeros(7, 5, dtype=torch.bfloat16), torch.zeros(7, 5)
    seed = torch.Generator().manual_seed(1)
    assert orthogonal_(first, generator=seed) is first
    assert xavier_(second, generator=seed) is second
    seed.manual_seed(1)
    assert torch.equal(first, orthogonal(second, generator=seed).bfloat16())
    assert torch.equal(second, xavier(second, generator=seed))


def test_vectors_are_refused():
    with pytest.raises(ValueError, match=r"weight must be a matrix \[E, H D\], got weight \[5\]"):
        orthogonal(torch.zeros(5))

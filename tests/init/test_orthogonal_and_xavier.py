"""Whole-matrix controls: semi-orthogonal and Xavier."""

import pytest
import torch

from levelhead.init.orthogonal import orthogonal, orthogonal_, xavier, xavier_


@pytest.mark.parametrize("shape", [(96, 96), (64, 192), (192, 64), (1, 1)])
def test_the_shorter_side_is_orthonormal(shape):
    weight = orthogonal(torch.empty(shape)).double()
    gram = weight @ weight.mT if shape[0] < shape[1] else weight.mT @ weight
    torch.testing.assert_close(gram, torch.eye(min(shape)).double(), atol=1e-6, rtol=0)


def test_orthogonal_is_uniform():
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

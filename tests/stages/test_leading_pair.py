"""The leading singular vectors are those of the full decomposition, found without it."""

import pytest
import torch

from levelhead.stages import projections
from levelhead.stages.projections import SMALL, leading_pair


def gaussian(rows, columns):
    return torch.randn(rows, columns, dtype=torch.double) * 0.02


MATRICES = {
    "small": gaussian(7, 11),
    "square": gaussian(311, 311),
    "wide": gaussian(137, 401),
    "tall": gaussian(401, 137),
    "two nearly equal": torch.diag(torch.tensor([1.0, 1 - 1e-5, *(0.9 * torch.rand(211))])),
    "rank one": torch.outer(torch.randn(211), torch.randn(223)),
    "all equal": torch.eye(211),
}  # fmt: skip


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e15])
@pytest.mark.parametrize("name", MATRICES)
def test_the_pair_reaches_the_spectral_norm(name, scale):
    weight = MATRICES[name] * scale
    left, right = leading_pair(weight)
    norm = torch.linalg.matrix_norm(weight.double(), 2)
    exact = 1e-9 if weight.dtype == torch.double else 1e-6
    for vector in (left, right):
        assert vector.norm().item() == pytest.approx(1, rel=exact)
    assert (left.double() @ weight.double() @ right.double() / norm).item() == pytest.approx(
        1, rel=exact
    )


@pytest.mark.parametrize("name", ["square", "wide", "tall"])
def test_the_pair_is_that_of_the_full_decomposition(name):
    u, _, vh = torch.linalg.svd(MATRICES[name], full_matrices=False)
    left, right = leading_pair(MATRICES[name])
    assert abs((left @ u[:, 0]).item()) == pytest.approx(1, rel=1e-8)
    assert abs((right @ vh[0]).item()) == pytest.approx(1, rel=1e-8)


def test_a_large_weight_is_never_decomposed_in_full(monkeypatch):
    monkeypatch.setattr(torch.linalg, "svd", None)
    leading_pair(MATRICES["square"])
    with pytest.raises(TypeError):
        leading_pair(MATRICES["small"])
    monkeypatch.undo()
    monkeypatch.setattr(projections, "PAIR_STEPS", 2)  # too few: decomposed after all
    left, right = leading_pair(MATRICES["square"])
    norm = torch.linalg.matrix_norm(MATRICES["square"], 2)
    torch.testing.assert_close(left @ MATRICES["square"] @ right, norm)
    assert max(MATRICES["small"].shape) < SMALL


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_weight_without_a_leading_direction_is_refused(value):
    with pytest.raises(
        ValueError, match=r"must be finite and not zero, got a weight of shape \[5"
    ):
        leading_pair(torch.full((5, 3), value))

"""Row statistics against scipy and plain definitions; gradients that stay finite."""

import numpy as np
import pytest
import scipy.stats
import torch

from levelhead.measure.row_statistics import (
    effective_keys,
    entropy_nats,
    head_similarity,
    negative_mass,
    normalized_entropy,
    p_max,
    row_mass,
    sink_mass,
)


@pytest.fixture
def attn_weights():
    scores = 2 * torch.randn(2, 3, 5, 7, dtype=torch.float64)
    scores[..., 5:] = -torch.inf
    return scores.softmax(-1)


def test_values_agree_with_scipy_and_numpy(attn_weights):
    p = attn_weights.numpy()
    np.testing.assert_allclose(entropy_nats(attn_weights), scipy.stats.entropy(p, axis=-1), 1e-13)
    np.testing.assert_allclose(p_max(attn_weights), p.max(-1))
    np.testing.assert_allclose(row_mass(attn_weights), 1)
    np.testing.assert_allclose(effective_keys(attn_weights), 1 / np.square(p).sum(-1))
    signed = attn_weights - 0.1
    expected = -np.minimum(signed.numpy(), 0).sum(-1)
    np.testing.assert_allclose(negative_mass(signed), expected)
    first = torch.tensor([[True] + [False] * 6, [False, True, False, True] + [False] * 3])
    expected = np.stack([p[0, ..., 0], p[1, ..., 1] + p[1, ..., 3]])
    np.testing.assert_allclose(sink_mass(attn_weights, first), expected)


def test_normalized_entropy_is_one_for_uniform_and_undefined_for_one_key():
    uniform = torch.tensor([[0.25, 0.25, 0.25, 0.25, 0], [1, 0, 0, 0, 0]], dtype=torch.float64)
    share = normalized_entropy(uniform, torch.tensor([4, 1]))
    assert share[0].item() == pytest.approx(1, abs=1e-15)
    assert share[1].isnan()


def test_head_similarity_is_the_mean_cosine_and_skips_empty_rows(attn_weights):
    p = attn_weights.clone()
    p[1, 2, 4] = 0
    cosine = torch.nn.functional.cosine_similarity(p[:, :, None], p[:, None], dim=-1)
    expected = cosine.mean(-1)
    expected[1, 2] = cosine[1, 2, :, :4].mean(-1)
    expected[1, :, 2] = cosine[1, :, 2, :4].mean(-1)
    torch.testing.assert_close(head_similarity(p), expected)
    p[1, 2] = 0
    assert head_similarity(p)[1].isnan().tolist() == [
        [False, False, True],
        [False, False, True],
        [True, True, True],
    ]


@pytest.mark.parametrize("measure", [entropy_nats, effective_keys, p_max, row_mass, negative_mass])
def test_gradients_agree_with_finite_differences(measure):
    scores = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda scores: measure(scores.softmax(-1) - 0.0), (scores,))


@pytest.mark.parametrize("measure", [entropy_nats, effective_keys, head_similarity])
def test_case_a01_a_masked_key_or_an_empty_row_gives_no_nan_gradient(measure):
    scores = torch.randn(2, 2, 6, 8)
    may_attend = torch.rand(2, 2, 6, 8) > 0.4
    may_attend[1, :, 3] = False
    scores.requires_grad_()
    p = torch.where(may_attend, scores, -1e30).softmax(-1) * may_attend
    p.retain_grad()
    measure(p).nansum().backward()
    assert p.grad is not None
    assert p.grad.isfinite().all()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()
    assert (scores.grad[1, :, 3] == 0).all()
    assert scores.grad.abs().sum() > 0


def test_a_naive_entropy_would_fail_the_gradient_test():
    p = torch.tensor([1.0, 0.0], requires_grad=True)
    torch.special.entr(p).sum().backward()
    assert p.grad is not None
    assert not p.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(dtype):
    p = torch.full((1, 4096), 1 / 4096, dtype=dtype)
    assert row_mass(p).dtype == torch.float32
    assert row_mass(p).item() == 1
    assert effective_keys(p).item() == pytest.approx(4096, rel=1e-6)
    assert entropy_nats(p).item() == pytest.approx(np.log(4096), rel=1e-6)


def test_effective_keys_of_tiny_masses_do_not_underflow():
    p = torch.tensor([[1e-25, 1e-25, 0], [0, 0, 0]])
    assert effective_keys(p).tolist() == [pytest.approx(2), 0]

"""Sums and means of the visible values, by whatever route, against plain ones."""

import pytest
import torch

from levelhead.stages.masks import AttentionMask
from levelhead.visible import WINDOW_QUERIES, running_sum, visible_mean

B, HKV, H, S, D = 2, 3, 6, 7, 5


@pytest.mark.parametrize("num_rows", [1, 7, 63, 64, 65, 131])
def test_a_running_sum_and_its_gradient_are_those_of_cumsum(num_rows):
    found, expected = (torch.randn(B, num_rows, H, D, dtype=torch.double) for _ in range(2))
    expected.copy_(found)
    grad = torch.randn(B, H, num_rows, D, dtype=torch.double)
    totals = []
    for rows, total in ((found, running_sum), (expected, lambda rows: rows.cumsum(dim=2))):
        totals.append(total(rows.requires_grad_().transpose(1, 2)))
        totals[-1].backward(grad)
    torch.testing.assert_close(*totals)
    torch.testing.assert_close(found.grad, expected.grad)


def test_no_row_moves_a_running_sum_before_it_by_one_bit():
    rows = torch.randn(B, H, 131, D)
    for changed in (1, 63, 64, 70, 130):
        other = rows.clone()
        other[:, :, changed] *= -1e6
        seen = slice(changed)
        assert running_sum(rows)[:, :, seen].equal(running_sum(other)[:, :, seen])


def test_a_running_sum_keeps_its_precision_under_autocast():
    rows = torch.randn(B, H, 131, D)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(running_sum(rows), rows.cumsum(dim=2), rtol=1e-4, atol=1e-4)


def test_the_gradient_of_a_running_sum_keeps_its_precision_under_autocast():
    rows, grad = torch.randn(B, H, 131, D, requires_grad=True), torch.randn(B, H, 131, D)
    total = running_sum(rows)
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = torch.autograd.grad(total, rows, grad)
    torch.testing.assert_close(found, grad.flip(2).cumsum(2).flip(2), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
def test_first_second_and_forward_derivatives_of_a_running_sum():
    rows = torch.randn(1, 2, 67, 1, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(
        running_sum, (rows,), check_forward_ad=True, check_batched_grad=True
    )
    assert torch.autograd.gradgradcheck(lambda rows: running_sum(rows).square(), (rows,))


@pytest.mark.parametrize("num_queries", [11, WINDOW_QUERIES + 1])
@pytest.mark.parametrize("mask_heads", [1, H])
def test_every_route_gives_the_mean_and_zeros_for_empty_rows(num_queries, mask_heads):
    allowed = torch.rand(B, mask_heads, num_queries, S) < 0.5
    allowed[0, 0, 3] = False
    value = torch.randn(B, HKV, S, D, dtype=torch.double)
    mask = AttentionMask(num_queries, S, value.device, allowed)
    found = visible_mean(mask, value, H)
    seen = allowed.double()
    rows = value if mask_heads == 1 else value.repeat_interleave(2, dim=1)
    expected = seen @ rows / seen.sum(-1, keepdim=True).clamp_min(1)
    torch.testing.assert_close(found, expected)
    assert (found[0, 0, 3] == 0).all()


def test_only_a_bias_that_forbids_nothing_is_left_out():
    bias = torch.randn(1, H, S, S, requires_grad=True)
    mask = AttentionMask(S, S, bias.device, None, bias)
    assert mask.without_finite_bias().bias is None
    forbidding = bias.detach().clone()
    forbidding[0, 0, 0, 1] = -torch.inf
    mask = AttentionMask(S, S, bias.device, None, forbidding)
    assert mask.without_finite_bias() is mask

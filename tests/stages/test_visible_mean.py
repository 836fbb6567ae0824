"""The mean of the visible values, by whatever route, is that of attention with zero scores."""

import pytest
import torch

from levelhead.stages.masks import WINDOW_QUERIES, AttentionMask, visible_mean

B, HKV, H, S, D = 2, 3, 6, 7, 5


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

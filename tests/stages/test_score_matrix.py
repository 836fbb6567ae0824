"""A bias that learns goes the plain way on a CPU: the same numbers, and zeros for empty rows."""

import pytest
import torch
import torch.nn.functional as F

from levelhead.parts.normalisers import OffByOne, Softmax
from levelhead.stages.masks import resolve_mask
from levelhead.stages.score_matrix import (
    attention_by_score_matrix,
    is_smaller_than_queries,
    learns_on_cpu,
)
from levelhead.stages.softmax import sink_attention

B, H, HKV, T, S, D = 2, 6, 3, 5, 7, 11
SCALE = 0.3


def inputs():
    query, key, value = (
        torch.randn(B, heads, length, D, dtype=torch.double, requires_grad=True)
        for heads, length in ((H, T), (HKV, S), (HKV, S))
    )
    bias = torch.randn(1, H, T, S, dtype=torch.double)
    bias[0, 2, 1, 3] = -torch.inf
    allowed = torch.rand(B, 1, T, S) < 0.7
    allowed[0, 0, 4] = False
    allowed[1] = True
    return query, key, value, bias.requires_grad_(), allowed


@pytest.mark.parametrize("is_masked", [True, False])
def test_agrees_with_torch_in_values_and_gradients(is_masked):
    query, key, value, bias, allowed = inputs()
    allowed = allowed if is_masked else None
    found = attention_by_score_matrix(query, key, value, bias, allowed, SCALE)
    merged = bias if allowed is None else bias.masked_fill(~allowed, -torch.inf)
    expected = F.scaled_dot_product_attention(
        query, key, value, merged, scale=SCALE, enable_gqa=True
    )
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(found)
    everything = (query, key, value, bias)
    torch.testing.assert_close(
        torch.autograd.grad(found, everything, grad),
        torch.autograd.grad(expected, everything, grad),
    )
    if is_masked:
        assert (found[0, :, 4] == 0).all()


def test_sink_is_a_key_without_a_value():
    query, key, value, bias, allowed = inputs()
    sink = torch.randn(H, dtype=torch.double, requires_grad=True)
    found = attention_by_score_matrix(query, key, value, bias, allowed, SCALE, sink_score=sink)
    keys, values = (rows.repeat_interleave(2, dim=1) for rows in (key, value))
    mass = (SCALE * query @ keys.mT + bias).exp() * allowed
    expected = mass @ values / (mass.sum(-1) + sink.exp()[:, None]).unsqueeze(-1)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found.square().sum(), sink),
        torch.autograd.grad(expected.square().sum(), sink),
    )


def test_dropout_drops_weights():
    query, key, value, bias, _ = inputs()
    torch.manual_seed(0)
    found = attention_by_score_matrix(query, key, value, bias, None, SCALE, dropout_p=0.5)
    torch.manual_seed(0)
    assert torch.equal(found, attention_by_score_matrix(query, key, value, bias, None, SCALE, 0.5))
    assert not torch.allclose(
        found, attention_by_score_matrix(query, key, value, bias, None, SCALE)
    )


def test_only_a_bias_that_learns_goes_this_way():
    bias = torch.zeros(1, requires_grad=True)
    assert learns_on_cpu(bias)
    assert not learns_on_cpu(bias.detach())


def test_a_sink_over_fewer_keys_than_coordinates_is_a_key_without_a_value():
    query, key, value, _, allowed = inputs()
    sink = torch.randn(H, dtype=torch.double, requires_grad=True)
    assert is_smaller_than_queries(query, key)
    assert not is_smaller_than_queries(query[..., :S], key[..., :S])
    found = attention_by_score_matrix(query, key, value, None, allowed, SCALE, sink_score=sink)
    expected = sink_attention(query, key, value, sink, allowed, False, SCALE)
    torch.testing.assert_close(found, expected)
    everything = (query, key, value, sink)
    grad = torch.randn_like(found)
    torch.testing.assert_close(
        torch.autograd.grad(found, everything, grad),
        torch.autograd.grad(expected, everything, grad),
    )


@pytest.mark.parametrize("normaliser", [Softmax(), OffByOne()])
def test_heads_of_a_token_lie_side_by_side_as_fused_kernels_leave_them(normaliser):
    query, key, value, bias, allowed = inputs()
    mask = resolve_mask(query, key, allowed, bias, False)
    found = normaliser.fused(query, key, value, mask, SCALE, 0.0)
    assert found.transpose(1, 2).is_contiguous()
    sink = normaliser.extra_score(query)
    plain = attention_by_score_matrix(query, key, value, bias, allowed, SCALE, sink_score=sink)
    assert torch.equal(found, plain)

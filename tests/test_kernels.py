"""Kernels that hand back their log-sum-exp take any memory layout."""

import pytest
import torch

from levelhead.kernels import SinkAttention, find_lse_kernel
from levelhead.stages.softmax import extra_key_attention

B, H, T, D = 2, 3, 7, 5


def test_a_scale_of_zero_is_uniform_attention_in_both_forms():
    query, key, value = (torch.randn(B, H, T, D) for _ in range(3))
    sink = torch.randn(H)
    kernel = find_lse_kernel(query, key, value, has_mask=False)
    torch.testing.assert_close(
        extra_key_attention(query, key, value, sink, None, False, 0.0),
        SinkAttention.apply(query, key, value, sink, None, False, 0.0, kernel),
    )


def test_no_query_gives_no_row_under_causality():
    query, key = torch.randn(B, H, 0, D), torch.randn(B, H, 0, D)
    assert extra_key_attention(query, key, key, torch.zeros(H), None, True, 1.0).shape == key.shape


@pytest.mark.parametrize("transposed", range(4))
def test_rows_may_lie_in_memory_in_any_order(transposed):
    """The kernel reads past rows that are not dense; query, key, value and gradient may be so."""
    inputs = [torch.randn(B, H, T, D, dtype=torch.double) for _ in range(4)]
    inputs[transposed] = inputs[transposed].mT.contiguous().mT
    assert inputs[transposed].stride(-1) != 1
    *qkv, grad = inputs
    qkv = [tensor.requires_grad_() for tensor in qkv]
    sink = torch.randn(H, dtype=torch.double, requires_grad=True)
    kernel = find_lse_kernel(*qkv, has_mask=False)
    found = SinkAttention.apply(*qkv, sink, None, False, 0.3, kernel)
    expected = extra_key_attention(*qkv, sink, None, False, 0.3)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, [*qkv, sink], grad),
        torch.autograd.grad(expected, [*qkv, sink], grad),
    )


@pytest.mark.parametrize("height", [-80.0, -50.0, -20.0, 0.0, 20.0, 80.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_keeps_its_digits_however_high_or_low_the_sink(height, dtype):
    """An optimiser that divides by the size of gradients moves a sink by its smallest too."""
    leaves = [torch.randn(B, H, T, D).to(dtype) for _ in range(3)] + [torch.randn(H) + height]
    hidden = torch.rand(B, 1, T, T) < 0.4
    hidden[:, :, 2] = True
    bias = torch.zeros(B, 1, T, T, dtype=dtype).masked_fill(hidden, -torch.inf)
    grad = torch.randn(B, H, T, D).to(dtype)
    exact = [leaf.double().requires_grad_() for leaf in leaves]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    kernel = find_lse_kernel(*leaves[:3], has_mask=True)
    found = torch.autograd.grad(
        SinkAttention.apply(*leaves, bias, False, 0.3, kernel), leaves, grad
    )
    query, key, value, sink = exact
    scores = (0.3 * query @ key.mT).masked_fill(hidden, -torch.inf)
    scores = torch.cat([scores, sink[:, None, None].expand(B, H, T, 1)], dim=-1)
    output = scores.softmax(dim=-1)[..., :-1] @ value
    eps = torch.finfo(dtype).eps
    for one, other in zip(found, torch.autograd.grad(output, exact, grad.double()), strict=True):
        size = other.abs().max()
        torch.testing.assert_close(
            one / size, other / size, check_dtype=False, rtol=0, atol=max(1e-4, 8 * eps)
        )

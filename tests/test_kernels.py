"""Kernels that hand back their log-sum-exp take any memory layout."""

import pytest
import torch

from levelhead.kernels import SinkAttention, find_lse_kernel
from levelhead.stages.softmax import extra_key_attention

B, H, T, D = 2, 3, 7, 5


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

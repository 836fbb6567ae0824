"""Assertions that many tests share."""

import copy

import torch

import levelhead as lh

TOLERANCE = {
    torch.float64: (1e-11, 1e-10),
    torch.float32: (2e-5, 2e-4),
    torch.bfloat16: (3e-2, 2e-1),
    torch.float16: (4e-3, 4e-2),
}
"""Absolute tolerance of values and of gradients, for inputs of unit scale."""


def gradients(module, output, inputs):
    """Return the gradients of a fixed random functional of the output."""
    generator = torch.Generator().manual_seed(5)
    direction = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    wanted = [*inputs, *module.parameters()]
    return torch.autograd.grad(
        (output * direction.to(output.dtype)).sum(), wanted, allow_unused=True
    )


def assert_fused_equals_reference(inner, inputs, **call):
    """Assert that the fused form and the plain form agree, forward and gradient."""
    inputs = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    plain = copy.deepcopy(inner)
    fused_output = inner(*inputs, **call)
    reference = lh.reference_attention(plain, *inputs, **call)
    dtype = fused_output.dtype
    atol, grad_atol = TOLERANCE[dtype]
    torch.testing.assert_close(fused_output, reference.attn_output, atol=atol, rtol=atol)
    fused_grads = gradients(inner, fused_output, inputs)
    plain_grads = gradients(plain, reference.attn_output, inputs)
    for fused, expected in zip(fused_grads, plain_grads, strict=True):
        assert (fused is None) == (expected is None)
        if fused is not None:
            assert fused.isfinite().all()
            torch.testing.assert_close(fused, expected, atol=grad_atol, rtol=grad_atol)

"""Low precision, autocast and extreme magnitudes: what is wide stays wide, nothing overflows."""

import pytest
import torch

import levelhead as lh
from cases import OPTIONS, all_terms, full_house
from levelhead.kernels import SinkAttention, find_lse_kernel

E, H, D, T = 16, 2, 8, 11


def large_inputs(dtype, factor):
    query, key = (factor * torch.randn(2, H, T, D) for _ in range(2))
    return [t.to(dtype) for t in (query, key, torch.randn(2, H, T, D))]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", ["plain", "capped", "learned bias"])
def test_scores_are_not_taken_in_low_precision_under_autocast(form, dtype):
    """Every path that multiplies queries and keys itself, against the same without autocast."""
    inner = lh.InnerAttention(
        "soft_cap(cap=2.0)" if form == "capped" else "softmax", embed_dim=E, num_heads=H
    )
    bias = torch.zeros(1, H, T, T, requires_grad=form == "learned bias")
    inputs = large_inputs(dtype, 3.0)

    def attend(*inputs):
        if form == "plain":
            return lh.reference_attention(inner, *inputs, attn_bias=bias).attn_weights
        return inner(*inputs, attn_bias=bias)

    with torch.autocast("cpu", dtype=dtype):
        low = attend(*inputs)
    assert torch.equal(low, attend(*inputs))


def test_scores_beyond_half_precision_stay_finite_in_both_forms():
    """Products beyond 65,504 before the scale, where float16 ends."""
    layer = lh.Attention(E, H)
    with torch.no_grad():
        for linear in (layer.q_proj, layer.k_proj):
            linear.weight.mul_(300)
    hidden_states = torch.randn(2, T, E)
    with torch.autocast("cpu", dtype=torch.float16):
        raw = layer.q_proj(hidden_states) @ layer.k_proj(hidden_states).mT
        assert raw.isinf().any()
        fused = layer(hidden_states)
        plain, weights = layer(hidden_states, need_weights=True)
    torch.testing.assert_close(plain, fused, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(weights.float().sum(-1), torch.ones(2, H, T), atol=2e-3, rtol=0)
    plain.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_spectral_norms_are_exact_under_autocast():
    """At the start sigma is the norm, so the ratio is one; bfloat16 would be .4 % off."""
    layer = lh.track_steps(lh.Attention(64, 2, variant="sigma_reparam"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ratio = layer.projections.ratio("q", layer.q_proj.weight)
    torch.testing.assert_close(ratio, torch.ones(1), atol=1e-5, rtol=0)
    left = layer.projections.q_left
    torch.testing.assert_close(left.norm(), torch.tensor(1.0), atol=1e-5, rtol=0)


def test_a_bias_that_half_precision_cannot_hold_forbids_in_both_forms_alike():
    inner = lh.InnerAttention("affine", embed_dim=E, num_heads=H).eval()
    inner.weights.set_state("alpha_mean", 0.5)
    inputs = [*large_inputs(torch.float16, 1.0), torch.randn(2, T, E)]
    bias = torch.zeros(1, 1, T, T)
    bias[..., 3, :] = -1e9
    fused = inner(*inputs, attn_bias=bias)
    plain = lh.reference_attention(inner, *inputs, attn_bias=bias).attn_output
    torch.testing.assert_close(fused, plain, atol=4e-3, rtol=4e-3)
    assert (fused[:, :, 3] == 0).all()
    bias[..., 3, 2] = 1e5
    with pytest.raises(ValueError, match=r"got a maximum of 100000\.0; valid: at most 65504\.0"):
        inner(*inputs, attn_bias=bias)


@pytest.mark.parametrize("size", [1e-36, 1e-40, 1e30])
def test_the_sinks_gradient_is_linear_down_to_denormal_numbers(size):
    inner = lh.InnerAttention("sink", embed_dim=E, num_heads=H)
    leaves = [t.requires_grad_() for t in large_inputs(torch.float32, 1.0)]
    leaves.append(inner.normaliser.score)
    assert find_lse_kernel(*leaves[:3], has_mask=False) is not None
    ones, scaled = (
        torch.autograd.grad(inner(*leaves[:3]), leaves, torch.full((2, H, T, D), factor))
        for factor in (1.0, size)
    )
    for found, unit in zip(scaled, ones, strict=True):
        tolerance = 1e-3 * unit.abs().max().item()  # denormal numbers have few digits
        torch.testing.assert_close(found.double() / size, unit.double(), atol=tolerance, rtol=0)


@pytest.mark.parametrize("variant", [*all_terms(), *OPTIONS, full_house()])
def test_autocast_with_wide_masks_gives_the_narrow_result(variant):
    """Float32 masks beside low-precision queries, as every training loop has them."""
    layer = lh.track_steps(lh.Attention(E, H, variant=variant)).eval()
    hidden_states = torch.randn(2, T, E)
    bias = torch.randn(1, H, T, T).masked_fill(torch.rand(1, H, T, T) > 0.7, -1e4)
    full = layer(hidden_states, attn_bias=bias, is_causal=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = layer(hidden_states, attn_bias=bias, is_causal=True)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), full, atol=0.08 * full.abs().max().item(), rtol=0)


def test_the_refused_second_derivative_names_the_way():
    inner = lh.InnerAttention("sink", embed_dim=E, num_heads=H)
    output = inner(*large_inputs(torch.float32, 1.0))
    assert type(output.grad_fn).__name__ == f"{SinkAttention.__name__}Backward"
    with pytest.raises(RuntimeError, match=r"sdpa_kernel\(SDPBackend\.MATH\)"):
        torch.autograd.grad(output.sum(), inner.normaliser.score, create_graph=True)

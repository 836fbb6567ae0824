"""Attention that keeps a map's result in place of its own output: same numbers, less memory."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from levelhead import kernels_mapped
from levelhead.fused import leave_fused
from levelhead.inner import InnerAttention
from levelhead.kernels_mapped import Mapped, find_mapped_kernel
from levelhead.parts.outputs import Precondition
from levelhead.reference import reference_attention
from levelhead.stages.outputs import EquilibrateRows
from levelhead.stages.softmax import softmax_attention
from levelhead.stages.weights import LEAST_ALPHA, AffineOutput

B, H, T, D = 2, 4, 7, 5


@pytest.fixture(autouse=True)
def _no_size_is_too_small(monkeypatch):
    monkeypatch.setattr(kernels_mapped, "LEAST_BYTES", 0)


SCALE = 0.3


def affine(dtype, num_kv_heads=H):
    alpha = torch.rand(B, H, T, 1, dtype=dtype)
    alpha[0, 1, :4, 0] = torch.tensor([0.0, 1e-9, 1e-3, 0.9 * LEAST_ALPHA])
    shift = torch.randn(B, H, T, 1, dtype=dtype)
    return AffineOutput(), (alpha, shift, torch.randn(B, num_kv_heads, 1, D, dtype=dtype))


MAPS = {
    "precondition": lambda dtype: (EquilibrateRows(1e-6, False), ()),
    "precondition of short rows": lambda dtype: (EquilibrateRows(0.5, False), ()),
    "precondition, detached": lambda dtype: (EquilibrateRows(1e-6, True), ()),
    "affine": affine,
    "affine of key/value heads": lambda dtype: affine(dtype, 2),
}


def some_masks(dtype):
    """Nothing, causality, padding with a query that sees nothing, and a bias."""
    hidden = torch.rand(B, 1, T, T) < 0.4
    hidden[:, :, 2] = True
    bias = torch.randn(B, 1, T, T, dtype=dtype).masked_fill(hidden, -torch.inf)
    return {
        "all": (None, False), "causal": (None, True), "bool": (~hidden, False),
        "bias": (bias, False),
    }  # fmt: skip


def leaves_of(tensors):
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("mask", ["all", "causal", "bool", "bias"])
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_result_and_gradients_are_those_of_the_map_after_the_attention(name, mask, dtype):
    torch.manual_seed(0)
    output_map, tensors = MAPS[name](dtype)
    qkv = [torch.randn(B, n, T, D, dtype=dtype) for n in (H, 2, 2)]
    attn_mask, is_causal = some_masks(dtype)[mask]
    grad = torch.randn(B, H, T, D, dtype=dtype)

    ours, theirs = leaves_of([*qkv, *tensors]), leaves_of([*qkv, *tensors])
    assert find_mapped_kernel(*ours[:3], attn_mask, 0.0) is not None
    then = Mapped(output_map, tuple(ours[3:]))
    found = softmax_attention(*ours[:3], attn_mask, is_causal, SCALE, 0.0, then)
    plain = F.scaled_dot_product_attention(
        *theirs[:3], attn_mask, is_causal=is_causal, scale=SCALE, enable_gqa=True
    )
    expected = output_map.apply(plain, *theirs[3:])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, ours, grad), torch.autograd.grad(expected, theirs, grad)
    )


@pytest.mark.parametrize("name", MAPS)
def test_undoing_gives_the_output_back(name):
    output_map, tensors = MAPS[name](torch.float64)
    attn_output = torch.randn(B, H, T, D, dtype=torch.float64)
    attn_output[0, 2, 3] = 0
    result = output_map.apply(attn_output, *tensors)
    undone = output_map.undo(result, output_map.remember(attn_output, *tensors), *tensors)
    torch.testing.assert_close(undone, attn_output)


def saved_numbers(call):
    """Count the numbers the backward pass of a call keeps, each storage once."""
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = call()
    assert result.requires_grad
    return sum(storages.values())


@pytest.mark.parametrize(
    "variant", ["quest", "qnorm", "qknorm", "qknorm_hs", "qknorm_ds", "affine", "precondition",
                "quest+affine", "qknorm_hs+precondition", "sink", "quest+sink"],
)  # fmt: skip
def test_a_variant_keeps_as_much_of_a_fused_projection_as_plain_attention(variant):
    """Then one layer follows, which keeps the result, as the output projection of a host does."""
    width, num_tokens = 128, 67

    def kept(variant):
        torch.manual_seed(0)
        inner = InnerAttention(variant, embed_dim=width, num_heads=2).eval()
        fused = torch.nn.Linear(width, 3 * width)
        hidden_states = torch.randn(2, num_tokens, width)

        def call():
            rows = fused(hidden_states).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            attn_output = inner(*rows.unbind(0), hidden_states)
            del rows
            return attn_output.transpose(1, 2).flatten(2) @ torch.eye(width)

        return saved_numbers(call)

    one_tensor = 2 * num_tokens * width
    assert kept(variant) - kept("softmax") < 0.25 * one_tensor  # of each row its norm is kept


def test_a_second_derivative_is_refused_and_there_by_the_plain_kernel():
    inner = InnerAttention("precondition", embed_dim=H * D, num_heads=H).double()
    qkv = leaves_of(torch.randn(3, 1, H, T, D, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="with a map of its output has no second derivative"):
        torch.autograd.grad(inner(*qkv).sin().sum(), qkv, create_graph=True)
    with sdpa_kernel(SDPBackend.MATH):
        found = torch.autograd.grad(inner(*qkv).sin().sum(), qkv, create_graph=True)
        torch.autograd.grad(found[0].sum(), qkv)
    expected = reference_attention(inner, *qkv).attn_output.sin().sum()
    torch.testing.assert_close(found, torch.autograd.grad(expected, qkv))


def test_many_gradients_at_once_are_those_one_by_one():
    inner = InnerAttention("precondition", embed_dim=H * D, num_heads=H).double()
    qkv = leaves_of(torch.randn(3, 1, H, T, D, dtype=torch.float64))
    result, grads = inner(*qkv), torch.randn(3, 1, H, T, D, dtype=torch.float64)
    found = torch.autograd.grad(result, qkv, grads, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(result, qkv, grad, retain_graph=True) for grad in grads]
    torch.testing.assert_close(
        found, tuple(torch.stack(parts) for parts in zip(*each, strict=True))
    )


def test_a_backward_pass_under_autocast_keeps_its_digits():
    inner = InnerAttention("affine", embed_dim=H * D, num_heads=H).eval()
    inner.weights.alpha_mean.fill_(0.5)
    qkv, hidden_states = leaves_of(torch.randn(3, 2, H, T, D)), torch.randn(2, T, H * D)
    result = inner(*qkv, hidden_states)
    grad = torch.randn_like(result)
    expected = torch.autograd.grad(result, qkv, grad, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(result, qkv, grad)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("variant", ["precondition", "gate"])
def test_a_hook_on_a_part_of_the_output_is_called(variant):
    """By somebody who wants to see or change what it gives."""
    inner = InnerAttention(variant, embed_dim=H * D, num_heads=H)
    qkv, hidden_states = leaves_of(torch.randn(3, 2, H, T, D)), torch.randn(2, T, H * D)
    expected = inner(*qkv, hidden_states)
    (part,) = inner.outputs()
    part.register_forward_hook(lambda module, args, output: 2 * output)
    torch.testing.assert_close(inner(*qkv, hidden_states), 2 * expected)


@pytest.mark.parametrize("size", [1e2, 1e4, 1e8])
def test_values_nobody_attends_to_cost_affine_no_digits(size):
    """Their mean is taken off the result again."""
    torch.manual_seed(0)
    qkv = torch.randn(3, 1, 2, 9, 8)
    qkv[1, :, :, 4] = 0
    qkv[0, ..., 0] = 30.0  # all queries
    qkv[1, :, :, [0, 1, 2, 3, 5, 6, 7, 8], 0] = 3.0  # all other keys
    qkv[2, :, :, 4] = size
    alpha, shift = torch.rand(1, 2, 9, 1) + 0.1, torch.randn(1, 2, 9, 1)
    grad = torch.randn(1, 2, 9, 8)

    def gradients(dtype, fused):
        leaves = leaves_of([*qkv.to(dtype), alpha.to(dtype)])
        output_map, tensors = AffineOutput(), (leaves[3], shift.to(dtype))
        visible = leaves[2].detach().mean(2, keepdim=True)
        then = Mapped(output_map, (*tensors, visible))
        if fused:
            result = softmax_attention(*leaves[:3], None, False, 1.0, 0.0, then)
        else:
            result = then((leaves[0] @ leaves[1].mT).softmax(-1) @ leaves[2])
        return torch.autograd.grad(result, leaves, grad.to(dtype))

    exact = gradients(torch.float64, fused=False)
    found, plain = gradients(torch.float32, fused=True), gradients(torch.float32, fused=False)
    for ours, theirs, wanted in zip(found, plain, exact, strict=True):
        error, plain_error = (float((t - wanted).norm()) for t in (ours, theirs))
        assert error <= 16 * plain_error + 1e-6 * float(wanted.norm())


def test_rows_whose_norm_overflows_get_no_gradient():
    inner = InnerAttention("precondition", embed_dim=H * D, num_heads=H)
    qkv = torch.randn(3, 1, H, T, D)
    qkv[2, :, 1] = 3e19
    qkv = leaves_of(qkv)
    found = torch.autograd.grad(inner(*qkv).sum(), qkv)
    assert all(part.isfinite().all() for part in found)
    assert found[2][:, 1].eq(0).all()


def test_what_replaces_a_part_of_the_output_is_called():
    class Doubled(Precondition):
        def forward(self, attn_output, hidden_states):
            return 2 * super().forward(attn_output, hidden_states)

    class Wrapped(torch.nn.Module):
        def __init__(self, part):
            super().__init__()
            self.part = part

        def forward(self, *args):
            return 2 * self.part(*args)

    inner = InnerAttention("precondition", embed_dim=H * D, num_heads=H)
    qkv = leaves_of(torch.randn(3, 1, H, T, D))
    expected = 2 * inner(*qkv)
    for part in (Doubled(), Wrapped(Precondition())):
        inner.precondition = part
        torch.testing.assert_close(inner(*qkv), expected)


@pytest.mark.parametrize("variant", ["qknorm_ds", "affine", "precondition", "off_by_one", "sink"])
def test_fake_tensors_pass_in_training(variant):
    with FakeTensorMode():
        inner = InnerAttention(variant, embed_dim=64, num_heads=2).eval()
        qkv = [torch.randn(1, 2, 5, 32, requires_grad=True) for _ in range(3)]
        assert inner(*qkv, torch.randn(1, 5, 64)).shape == (1, 2, 5, 32)


def test_a_result_for_grouped_heads_may_be_changed_in_place():
    output_map, tensors = affine(torch.float32, 2)
    qkv = leaves_of([torch.randn(B, n, T, D) for n in (H, 2, 2)])
    then = Mapped(output_map, tensors)
    result = softmax_attention(*qkv, None, False, SCALE, 0.0, then)
    assert result.mul_(3.0) is result


def test_expanded_values_of_a_fused_projection_are_not_copied():
    fused = torch.randn(1, 5, 3, 8, requires_grad=True) * 1
    query, key, value = (part[:, None].expand(1, 4, 5, 8) for part in fused.unbind(2))
    left = leave_fused((query, key, value), (query * 1, key * 1, value))
    assert left[2] is value
    half = [rows.half() for rows in fused.transpose(1, 2).unbind(1)]
    assert leave_fused(half, [half[0] * 1, *half[1:]])[1] is half[1]


def test_little_is_not_worth_a_kernel(monkeypatch):
    monkeypatch.setattr(kernels_mapped, "LEAST_BYTES", B * H * T * D * 4 + 1)
    qkv = leaves_of(torch.randn(3, B, H, T, D))
    assert find_mapped_kernel(*qkv, None, 0.0) is None
    monkeypatch.setattr(kernels_mapped, "LEAST_BYTES", B * H * T * D * 4)
    assert find_mapped_kernel(*qkv, None, 0.0) is not None

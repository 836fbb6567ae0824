"""Derivatives beyond one backward pass: torch.func, second derivatives, inference mode."""

import copy

import pytest
import torch
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import levelhead as lh
from cases import OPTIONS, all_terms, full_house
from levelhead.stages.chunks import BLOCK

EVERY = [*all_terms(), *OPTIONS, full_house()]
B, T, E, H = 3, 7, 30, 6
MATH = [SDPBackend.MATH]


def layer_of(variant):
    layer = lh.Attention(E, H, variant=variant, num_kv_heads=2, dtype=torch.float64).eval()
    if layer.inner.weights is not None:
        layer.inner.weights.set_state("alpha_mean", 0.4)
    return layer


def sample():
    return torch.randn(B, T, E, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:.*performance drop.*:UserWarning")
@pytest.mark.parametrize("variant", EVERY)
def test_gradients_of_each_sample_add_up_to_that_of_the_batch(variant):
    layer, hidden_states = layer_of(variant), sample()
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(parameters, one):
        output = functional_call(layer, parameters, (one[None],), {"is_causal": True})
        return output.square().sum()

    with sdpa_kernel(MATH):
        per_sample = vmap(grad(loss), (None, 0))(parameters, hidden_states)
    layer(hidden_states, is_causal=True).square().sum().backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(per_sample[name].sum(0), parameter.grad)


@pytest.mark.parametrize("variant", ["soft_cap(cap=1.3)", "affine", "soft_cap(cap=1.3) + sink"])
def test_transforms_take_more_tokens_than_a_block_or_a_run(variant):
    layer = lh.Attention(6, 2, variant=variant, dtype=torch.float64).eval()
    hidden_states = torch.randn(1, BLOCK + 3, 6, dtype=torch.float64)

    def loss(rows, plain):
        output = layer(rows, is_causal=True, need_weights=plain)
        return (output[0] if plain else output).square().sum()

    found, expected = (grad(loss)(hidden_states, plain) for plain in (False, True))
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:.*performance drop.*:UserWarning")
@pytest.mark.parametrize("variant", EVERY)
def test_many_gradients_at_once_are_those_of_one_after_the_other(variant):
    layer, hidden_states = layer_of(variant), sample()[:1, :5].requires_grad_()
    leaves = [hidden_states, *layer.parameters()]
    output = layer(hidden_states, is_causal=True)
    grads = torch.randn(2, *output.shape, dtype=torch.float64)
    keep = {"retain_graph": True, "allow_unused": True}
    found = torch.autograd.grad(output, leaves, grads, is_grads_batched=True, **keep)
    for index, grad_output in enumerate(grads):
        expected = torch.autograd.grad(output, leaves, grad_output, **keep)
        torch.testing.assert_close(
            [part[index] for part in found if part is not None],
            [part for part in expected if part is not None],
        )


@pytest.mark.parametrize("variant", EVERY)
def test_second_derivatives_are_those_of_the_plain_form(variant):
    layer, hidden_states = layer_of(variant), sample()
    direction = [torch.randn_like(p) for p in layer.parameters()]

    def hessian_times_direction(plain):
        twin = copy.deepcopy(layer)
        parameters = list(twin.parameters())
        output = twin(hidden_states, is_causal=True, need_weights=plain)
        loss = (output[0] if plain else output).square().sum()
        first = torch.autograd.grad(loss, parameters, create_graph=True)
        along = sum((g * d).sum() for g, d in zip(first, direction, strict=True))
        return torch.autograd.grad(along, parameters)

    with sdpa_kernel(MATH):
        found = hessian_times_direction(plain=False)
    torch.testing.assert_close(found, hessian_times_direction(plain=True))


@pytest.mark.parametrize("variant", EVERY)
def test_second_derivatives_are_right_or_refused_without_the_plain_kernel(variant):
    """Never a silent wrong one: gradient of the gradient of the parts' own parameters."""
    layer, hidden_states = layer_of(variant), sample()
    own = [p for n, p in layer.named_parameters() if not n.startswith(("q_", "k_", "v_", "o_"))]
    own = own or [layer.q_proj.weight]

    def mixed(plain):
        output = layer(hidden_states, is_causal=True, need_weights=plain)
        loss = (output[0] if plain else output).square().sum()
        first = torch.autograd.grad(loss, own, create_graph=True)
        return torch.autograd.grad(sum(g.sum() for g in first), layer.q_proj.weight)[0]

    try:
        found, refusal = mixed(plain=False), None
    except RuntimeError as refused:
        found, refusal = None, str(refused)
    if refusal is None:
        torch.testing.assert_close(found, mixed(plain=True))
    else:
        assert "second derivative" in refusal or "is not implemented" in refusal


@pytest.mark.parametrize("variant", EVERY)
def test_inference_mode_leaves_a_layer_that_can_go_on_training(variant):
    layer = lh.track_steps(lh.Attention(E, H, variant=variant))
    hidden_states = torch.randn(B, T, E)
    with torch.inference_mode():
        inferred = layer.eval()(hidden_states, is_causal=True)
    torch.testing.assert_close(inferred.clone(), layer(hidden_states, is_causal=True))
    layer.train()(hidden_states, is_causal=True).sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())

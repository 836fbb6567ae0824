"""The structured Jacobian against autograd, finite differences and the library's own attention."""

import pytest
import torch
from heads import (
    autograd_input_jacobian,
    autograd_weight_jacobian,
    forms,
    random_head,
    rms_norm_with_gain,
)

from levelhead.inner import InnerAttention
from levelhead.measure.gram import input_gram, input_jacobian, weight_gram, weight_jacobian
from levelhead.measure.head import HeadForm, attention_head
from levelhead.measure.linearise import linearise
from levelhead.measure.operators import FunctionJacobian, InputJacobian, WeightJacobian
from levelhead.reference import reference_attention
from levelhead.rows import unit_rows
from levelhead.variants import VARIANTS

MASK = torch.rand(7, 7, generator=torch.Generator().manual_seed(2)) > 0.4
MASK[3] = False
BIAS = torch.randn(7, 7, generator=torch.Generator().manual_seed(3))
BIAS[:, 5] = torch.finfo(torch.float32).min


def head_of(name, masked, biased):
    states, *weights = random_head()
    q_bias, v_bias = torch.randn(5), torch.randn(5)
    return attention_head(
        states,
        *weights,
        scale=0.7,
        form=forms()[name],
        **({"attn_mask": MASK, "attn_bias": BIAS} if masked else {"is_causal": True}),
        **({"q_bias": q_bias, "v_bias": v_bias} if biased else {}),
    )


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", forms())
def test_every_form_has_the_jacobian_of_autograd(name, masked, biased):
    head = head_of(name, masked, biased)
    linear = linearise(head)
    expected = autograd_weight_jacobian(head)
    size = expected.abs().max()
    assert (weight_jacobian(linear) - expected).abs().max() < 1e-13 * size
    gram, square = weight_gram(linear).tril(), (expected @ expected.mT).tril()
    assert (gram - square).abs().max() < 1e-13 * square.abs().max()
    compressed = weight_jacobian(linear, compress=True)
    assert compressed.shape[1] < expected.shape[1]
    assert (compressed @ compressed.mT - expected @ expected.mT).abs().max() < 1e-12 * size**2


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", forms())
def test_every_form_has_the_input_jacobian_of_autograd(name, masked):
    head = head_of(name, masked, biased=True)
    linear = linearise(head)
    expected = autograd_input_jacobian(head)
    size = expected.abs().max()
    assert (input_jacobian(linear) - expected).abs().max() < 1e-13 * size
    gram, square = input_gram(linear).tril(), (expected @ expected.mT).tril()
    assert (gram - square).abs().max() < 1e-13 * square.abs().max()


@pytest.mark.parametrize("name", forms())
def test_products_with_the_jacobian_and_its_transpose(name):
    head = head_of(name, masked=True, biased=True)
    linear = linearise(head)
    pairs = [
        (WeightJacobian(linear), autograd_weight_jacobian(head)),
        (InputJacobian(linear), autograd_input_jacobian(head)),
    ]
    for operator, dense in pairs:
        right, left = (torch.randn(size, dtype=torch.float64) for size in dense.shape[::-1])
        assert operator.shape == tuple(dense.shape)
        assert (operator.apply(right) - dense @ right).abs().max() < 1e-12
        assert (operator.adjoint(left) - dense.mT @ left).abs().max() < 1e-12


def test_the_jacobian_agrees_with_finite_differences():
    head = head_of("all", masked=False, biased=True)
    weights = (head.q_weight, head.k_weight, head.v_weight)
    tangents = [torch.randn_like(weight) for weight in weights]
    step = 1e-6
    ahead = head.output(*(w + step * t for w, t in zip(weights, tangents, strict=True)))
    behind = head.output(*(w - step * t for w, t in zip(weights, tangents, strict=True)))
    flat = torch.cat([tangent.flatten() for tangent in tangents])
    found = weight_jacobian(linearise(head)) @ flat
    expected = ((ahead - behind) / (2 * step)).flatten()
    assert (found - expected).abs().max() < 1e-8 * expected.abs().max()


def test_cross_attention_with_values_of_another_width():
    states, q_weight, _, _ = random_head(tokens=5, embed_dim=7, head_dim=3)
    other, _, k_weight, v_weight = random_head(tokens=11, embed_dim=13, head_dim=3, value_dim=2)
    head = attention_head(states, q_weight, k_weight, v_weight, scale=0.5, key_value_states=other)
    expected = autograd_weight_jacobian(head)
    assert expected.shape == (5 * 2, 7 * 3 + 13 * 3 + 13 * 2)
    assert (weight_jacobian(linearise(head)) - expected).abs().max() < 1e-13
    scores = 0.5 * (states @ q_weight) @ (other @ k_weight).mT
    output = scores.softmax(-1) @ (other @ v_weight)
    assert (head.output(q_weight, k_weight, v_weight) - output).abs().max() < 1e-14


def test_function_jacobian_multiplies_exactly():
    head = head_of("all", masked=True, biased=True)
    dense = autograd_weight_jacobian(head)
    operator = FunctionJacobian(head.output, [head.q_weight, head.k_weight, head.v_weight])
    right, left = (torch.randn(size, dtype=torch.float64) for size in dense.shape[::-1])
    assert (operator.apply(right) - dense @ right).abs().max() < 1e-13
    assert (operator.adjoint(left) - dense.mT @ left).abs().max() < 1e-13


def library_form(inner, states):
    """The table of `HeadForm`, read off a one-head `InnerAttention`; and the scale of its norm."""
    name = type(inner.norm).__name__
    unit = {"Quest": (None, unit_rows), "QueryNorm": (unit_rows, None)}
    unit |= {"QueryKeyNorm": (unit_rows, unit_rows), "QueryKeyNormHeadScale": (unit_rows,) * 2}
    query_map, key_map = unit.get(name, (None, None))
    scale = inner.scale if name == "DotProduct" else 1.0
    if name == "QueryKeyNormHeadScale":
        scale = float(inner.norm.head_scale.detach())
    if name == "QueryKeyNormDimensionScale":
        query_map = lambda rows: inner.norm.q_scale.detach() * unit_rows(rows)  # noqa: E731
        key_map = lambda rows: inner.norm.k_scale.detach() * unit_rows(rows)  # noqa: E731
    slots = {"query_map": query_map, "key_map": key_map}
    if inner.cap is not None:
        slots["soft_cap"] = inner.cap.soft_cap
    if hasattr(inner.normaliser, "score"):
        slots["sink_score"] = float(inner.normaliser.score.detach())
    elif type(inner.normaliser).__name__ == "OffByOne":
        slots["sink_score"] = 0.0
    if inner.weights is not None:
        alpha, mean = inner.weights.coefficients(states[None], None)
        alpha = alpha.detach()
        slots["row_scale"] = alpha[0, 0, :, 0]
        slots["row_shift"] = (mean - alpha)[0, 0, :, 0] / torch.arange(1, len(states) + 1)
    if inner.precondition is not None:
        slots["output_map"] = unit_rows
    if inner.gate is not None:
        slots["output_gate"] = torch.sigmoid(inner.gate.gate_proj(states)).detach()
    return HeadForm(**slots), scale


@pytest.mark.parametrize(
    "variant",
    [
        *(n for n, i in VARIANTS.items() if i.stage != "projections" and n != "soft_cap"),
        "soft_cap(cap=1.5)",
        "quest + affine + precondition + gate",
        "soft_cap(cap=2.5) + sink + gate(granularity='headwise')",
    ],
)
def test_the_form_of_every_variant_is_the_attention_the_library_computes(variant):
    states, *weights = random_head()
    inner = InnerAttention(variant, embed_dim=11, num_heads=1, head_dim=5, dtype=torch.float64)
    inner.eval()
    with torch.no_grad():
        for parameter in inner.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        if inner.weights is not None:
            inner.weights.alpha_mean.fill_(0.4)
    form, scale = library_form(inner, states)
    head = attention_head(states, *weights, scale=scale, form=form, is_causal=True)

    def library(*weights):
        query, key, value = ((states @ weight)[None, None] for weight in weights)
        result = reference_attention(inner, query, key, value, states[None], is_causal=True)
        return result.attn_output[0, 0]

    assert (head.output(*weights) - library(*weights)).abs().max() < 1e-13
    parts = torch.autograd.functional.jacobian(library, tuple(weights))
    expected = torch.cat([part.flatten(2) for part in parts], dim=2).flatten(0, 1)
    assert (weight_jacobian(linearise(head)) - expected).abs().max() < 1e-12


def test_a_map_that_mixes_rows_is_refused():
    states, *weights = random_head()
    form = HeadForm(key_map=lambda rows: rows - rows.mean(0))
    with pytest.raises(ValueError, match="key_map must act on each row by itself.*mixes rows"):
        linearise(attention_head(states, *weights, scale=1.0, form=form))


def test_a_map_without_a_derivative_is_refused():
    states, *weights = random_head()
    form = HeadForm(output_map=lambda rows: rows / rows.square().sum(1, keepdim=True).sqrt())
    mask = torch.ones(7, 7, dtype=torch.bool)
    mask[2] = False
    with pytest.raises(ValueError, match="output_map must stay finite"):
        linearise(attention_head(states, *weights, scale=1.0, form=form, attn_mask=mask))
    form = HeadForm(query_map=lambda rows: rows[:, :3])
    with pytest.raises(
        ValueError, match=r"query_map must keep the shape, got \[7, 5\] to \[7, 3\]"
    ):
        linearise(attention_head(states, *weights, scale=1.0, form=form))


def test_a_zero_row_of_precondition_has_a_zero_jacobian():
    states, *weights = random_head()
    head = attention_head(
        states, *weights, scale=1.0, attn_mask=MASK, form=HeadForm(output_map=unit_rows)
    )
    jacobian = weight_jacobian(linearise(head)).view(7, 5, -1)
    assert jacobian[3].abs().max() == 0
    assert jacobian.isfinite().all()


def test_norm_gains_change_the_jacobian():
    states, *weights = random_head()
    plain = linearise(attention_head(states, *weights, scale=1.0))
    form = HeadForm(query_map=rms_norm_with_gain)
    gained = linearise(attention_head(states, *weights, scale=1.0, form=form))
    assert (weight_jacobian(plain) - weight_jacobian(gained)).abs().max() > 0.01

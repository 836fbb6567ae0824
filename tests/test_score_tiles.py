"""Attention by tiles of scores, where a bias learns: output and every gradient, in every mode."""

import pytest
import torch

import levelhead as lh
from levelhead import score_tiles
from levelhead.stages.masks import resolve_mask

B, H, HKV, T, S, D, DV = 3, 6, 3, 5, 7, 11, 4
VARIANTS = [
    "softmax", "quest", "off_by_one", "sink(start=0.7)", "affine", "affine(count='keys')",
    "affine + sink",
]  # fmt: skip


@pytest.fixture(params=["one tile", "some samples", "some heads"])
def _tile_size(request, monkeypatch):
    matrices = {"one tile": B * H, "some samples": 2 * H, "some heads": 4}[request.param]
    room = matrices * T * (S + 1) * torch.double.itemsize
    monkeypatch.setattr(score_tiles, "_TILE_BYTES", room // torch.get_num_threads())


def draw(*shape, dtype=torch.double):
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def visible(*shape):
    """A mask in which one query may attend to nothing."""
    mask = torch.rand(shape) < 0.6
    mask[..., 2, :] = False
    return mask


def forbidding_bias():
    return torch.randn(1, H, T, S).double().masked_fill(~visible(T, S), -torch.inf)


MASKS = {
    "bias": lambda: {"attn_bias": draw(1, H, T, S)},
    "bias that forbids": lambda: {"attn_bias": forbidding_bias().requires_grad_()},
    "bias of a sample": lambda: {"attn_bias": draw(B, 1, T, 1)},
    "windows": lambda: {"attn_bias": draw(1, H, T, S), "attn_mask": visible(B, 1, T, S)},
    "padding": lambda: {
        "attn_bias": draw(T, S),
        "attn_mask": torch.arange(S) < torch.tensor([5, 7, 0])[:, None, None, None],
    },
    "all": lambda: {
        "attn_bias": draw(B, H, 1, S), "attn_mask": visible(1, H, T, S), "is_causal": True
    },
}  # fmt: skip


def build(variant, dtype=torch.double):
    inner = lh.InnerAttention(
        variant, embed_dim=13, num_heads=H, num_kv_heads=HKV, head_dim=D, dtype=dtype
    ).eval()
    if inner.weights is not None:
        inner.weights.set_state("alpha_mean", 0.4)
    return inner


def rows(dtype=torch.double):
    return [draw(*shape, dtype=dtype) for shape in ((B, H, T, D), (B, HKV, S, D), (B, HKV, S, DV))]


def names_of_functions(output):
    """Names of all functions that made a tensor."""
    found, waiting = set(), [output.grad_fn]
    while waiting:
        function = waiting.pop()
        if function is not None and function not in found:
            found.add(function)
            waiting += [following for following, _ in function.next_functions]
    return {type(function).__name__ for function in found}


@pytest.mark.usefixtures("_tile_size")
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_output_and_gradients_are_those_of_the_reference(variant, masks):
    inner, masks, hidden_states = build(variant), masks(), draw(B, T, 13)
    query, key, value = rows()
    learning = [query, key, value, masks["attn_bias"], *inner.parameters()]
    output = inner(query, key, value, hidden_states, **masks)
    assert "TiledAttentionBackward" in names_of_functions(output)
    expected = lh.reference_attention(inner, query, key, value, hidden_states, **masks).attn_output
    torch.testing.assert_close(output, expected, atol=1e-12, rtol=1e-12)
    grad = torch.randn_like(output)
    found = torch.autograd.grad(output, learning, grad)
    wanted = torch.autograd.grad(expected, learning, grad)
    torch.testing.assert_close(found, wanted, atol=1e-11, rtol=1e-11)


def call(variant, dtype=torch.double):
    """A call with a bias that learns, windows and an empty row, and all that has a gradient."""
    inner, masks = build(variant, dtype), MASKS["windows"]()
    masks["attn_bias"] = masks["attn_bias"].detach().to(dtype).requires_grad_()
    inputs = [*rows(dtype), draw(B, T, 13, dtype=dtype)]
    output = inner(*inputs, **masks)
    assert "TiledAttentionBackward" in names_of_functions(output)
    return inner, inputs, masks, output, [*inputs[:3], masks["attn_bias"], *inner.parameters()]


def test_a_query_that_sees_nothing_gets_zeros_and_no_gradient():
    _, (query, *_), _, output, learning = call("affine + sink")
    assert (output[:, :, 2] == 0).all()
    found = torch.autograd.grad(output.square().sum() + output.sum(), learning)
    assert (found[0][:, :, 2] == 0).all()
    assert (found[0][:, :, 1] != 0).any()
    assert all(t.isfinite().all() for t in found)


@pytest.mark.parametrize("variant", ["softmax", "sink", "affine"])
def test_second_derivatives_are_those_of_the_reference(variant):
    inner, inputs, masks, output, learning = call(variant)
    expected = lh.reference_attention(inner, *inputs, **masks).attn_output
    both = []
    for result in (output, expected):
        first = torch.autograd.grad(result.square().sum(), learning, create_graph=True)
        both.append(torch.autograd.grad(sum(t.square().sum() for t in first), learning))
    torch.testing.assert_close(*both, atol=1e-9, rtol=1e-9)


@pytest.mark.filterwarnings("ignore:.*performance drop.*:UserWarning")
@pytest.mark.parametrize("variant", ["softmax", "sink", "affine"])
def test_many_gradients_at_once_are_those_of_one_after_the_other(variant):
    *_, output, learning = call(variant)
    grads = torch.randn(2, *output.shape, dtype=torch.double)
    keep = {"retain_graph": True}
    many = torch.autograd.grad(output, learning, grads, is_grads_batched=True, **keep)
    for index, grad in enumerate(grads):
        one = torch.autograd.grad(output, learning, grad, **keep)
        torch.testing.assert_close([t[index] for t in many], list(one))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", ["softmax", "sink", "affine"])
def test_half_precision_rounds_what_goes_in_and_out_only(variant, dtype):
    inner, inputs, masks, output, learning = call(variant, dtype)
    assert output.dtype == dtype
    wide = [t.detach().double().requires_grad_() for t in inputs]
    bias = masks["attn_bias"].detach().double().requires_grad_()
    plain = build(variant)
    plain.load_state_dict(inner.state_dict())
    expected = lh.reference_attention(
        plain, *wide, attn_bias=bias, attn_mask=masks["attn_mask"]
    ).attn_output
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), expected, atol=2 * eps, rtol=2 * eps)
    found = torch.autograd.grad(output.square().sum(), learning[:4])
    wanted = torch.autograd.grad(expected.square().sum(), [*wide[:3], bias])
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, atol=20 * eps, rtol=8 * eps)


def test_only_what_is_asked_for_gets_a_gradient():
    inner, (query, key, value) = build("softmax"), rows()
    bias = draw(1, H, T, S)
    output = inner(query.detach(), key.detach(), value.detach(), attn_bias=bias)
    grad = torch.randn_like(output)
    expected = inner(query, key, value, attn_bias=bias)
    (found,) = torch.autograd.grad(output, bias, grad)
    torch.testing.assert_close(found, torch.autograd.grad(expected, bias, grad)[0])


def test_one_matrix_of_weights_is_all_that_is_kept():
    inner, kept = build("affine + sink"), []
    query, key, value = (draw(B, heads, 67, D) for heads in (H, HKV, HKV))
    hidden_states, bias = draw(B, 67, 13), draw(1, H, 67, 67)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        inner(query, key, value, hidden_states, attn_bias=bias)
    assert len({t.data_ptr() for t in kept if t.numel() >= B * H * 67 * 67}) == 1


@pytest.mark.parametrize("options", [{"dropout_p": 0.3}, {"attn_bias": torch.zeros(T, S)}])
def test_what_it_cannot_take_goes_another_way(options):
    inner, masks = build("softmax"), {"attn_bias": draw(1, H, T, S), **options}
    assert "TiledAttentionBackward" not in names_of_functions(inner(*rows(), **masks))


def test_a_compiler_gets_public_operators():
    inner, inputs, masks, output, _ = call("affine + sink")
    compiled = torch.compile(inner, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs, **masks), output)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
def test_transforms_and_tangents_pass_through():
    inner, inputs, masks, output, learning = call("affine + sink")
    tangents = [torch.randn_like(t) for t in inputs]
    moved, along = torch.func.jvp(
        lambda *rows: inner(*rows, **masks), tuple(inputs), tuple(tangents)
    )
    torch.testing.assert_close(moved, output)
    grad = torch.randn_like(output)
    back = torch.autograd.grad(output, inputs, grad)
    towards = sum((t * b).sum() for t, b in zip(tangents, back, strict=True))
    torch.testing.assert_close((along * grad).sum(), towards)


@pytest.mark.usefixtures("_tile_size")
@pytest.mark.parametrize("variant", ["softmax", "sink"])
def test_channels_lie_as_they_came_in_outputs_and_gradients(variant):
    """Rows that are columns in memory, as where channels attend: no copy turns them over."""
    normaliser = build(variant).normaliser
    tokens = [draw(B, H, S, T) for _ in range(3)]
    call = (resolve_mask(tokens[0].mT, tokens[1].mT), 0.3, 0.0)
    output = normaliser.fused(*(rows.mT for rows in tokens), *call)
    assert "TiledAttentionBackward" in names_of_functions(output)
    assert output.permute(0, 3, 1, 2).is_contiguous()
    dense = [rows.detach().mT.contiguous().requires_grad_() for rows in tokens]
    scores = 0.3 * dense[0] @ dense[1].mT
    expected = normaliser.plain(scores, normaliser.extra_score(output)) @ dense[2]
    torch.testing.assert_close(output, expected)
    grad = torch.randn_like(output)
    found = torch.autograd.grad(output, tokens, grad)
    wanted = torch.autograd.grad(expected, dense, grad)
    torch.testing.assert_close([rows.mT for rows in found], list(wanted))


def test_vmap_over_scores_smaller_than_queries():
    inner = lh.InnerAttention("off_by_one", embed_dim=2 * D, num_heads=2, head_dim=D)
    qkv = torch.randn(3, 4, 1, 2, D - 2, D)
    expected = torch.stack([inner(*parts) for parts in qkv.unbind(1)])
    torch.testing.assert_close(torch.vmap(inner)(*qkv), expected)


def test_a_sink_keeps_no_copy_of_the_bias_for_every_head():
    """Beside the weights of keys and sink, the bias itself with what is forbidden in it."""
    num_tokens, kept = 32, {}
    inner = lh.InnerAttention("sink", embed_dim=H * D, num_heads=H)
    leaves = [torch.randn(B, H, num_tokens, D, requires_grad=True) for _ in range(3)]
    bias = torch.randn(B, 1, num_tokens, num_tokens, requires_grad=True)
    given = {tensor.data_ptr() for tensor in (*leaves, bias)}

    def pack(tensor):
        if tensor.data_ptr() not in given:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        inner(*leaves, attn_bias=bias)
    one_matrix = 4 * B * H * num_tokens * num_tokens
    assert sum(kept.values()) < 1.5 * one_matrix

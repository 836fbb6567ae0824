"""Construction, copying, saving, meta device, export, compile: what engineers do with modules."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import levelhead as lh
from cases import OPTIONS, all_terms, full_house

EVERY = [*all_terms(), *OPTIONS, full_house()]
E, H = 30, 6


def layer_of(variant, **options):
    return lh.track_steps(lh.Attention(E, H, variant=variant, num_kv_heads=2, **options))


def sample(num_tokens=7):
    return torch.randn(2, num_tokens, E)


@pytest.mark.parametrize("variant", EVERY)
def test_state_dict_copy_and_pickle_give_the_same_function(variant):
    layer = layer_of(variant)
    layer(sample())
    layer.eval()
    expected = layer(sample_ := sample(), is_causal=True)
    twin = layer_of(variant).eval()
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    twin.load_state_dict(torch.load(buffer, weights_only=True))
    for other in (twin, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(sample_, is_causal=True), expected)


@pytest.mark.parametrize("variant", EVERY)
def test_no_parameter_is_a_scalar_and_stock_keys_are_kept(variant):
    layer = lh.Attention(E, H, variant=variant)
    assert all(parameter.ndim >= 1 for parameter in layer.parameters())
    stock = set(lh.Attention(E, H).state_dict())
    assert stock <= set(layer.state_dict())


@pytest.mark.parametrize("order", ["forward", "backward"])
@pytest.mark.parametrize("variant", EVERY)
def test_case_a24_meta_then_reset_in_any_order(variant, order):
    """Built on meta, filled with NaN, every module reset once: nothing is left unset."""
    with torch.device("meta"):
        layer = lh.Attention(E, H, variant=variant, num_kv_heads=2)
    layer.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*layer.parameters(), *layer.buffers()]:
            tensor.fill_(torch.nan if tensor.is_floating_point() else -(2**40))
    modules = list(layer.modules())
    for module in modules if order == "forward" else reversed(modules):
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    normal = lh.Attention(E, H, variant=variant, num_kv_heads=2)
    layer.eval()(sample())
    for (name, reset), built in zip(
        layer.state_dict().items(), normal.state_dict().values(), strict=True
    ):
        assert reset.shape == built.shape
        assert reset.dtype == built.dtype
        assert reset.isfinite().all(), name
        if built.numel() > 1 and built.unique().numel() == 1:
            assert torch.equal(reset, built), name
        elif built.numel() > 60:
            assert 0.5 < reset.float().std() / built.float().std() < 2, name


def test_resetting_a_part_touches_only_that_part():
    layer = layer_of("affine + gate + sink")
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    layer.inner.gate.reset_parameters()
    changed = {n for n, value in layer.state_dict().items() if not torch.equal(value, before[n])}
    assert changed == {"inner.gate.gate_proj.weight"}


@pytest.mark.parametrize("variant", EVERY)
def test_export_with_dynamic_sizes(variant):
    layer = lh.Attention(E, H, variant=variant, num_kv_heads=2).eval()
    batch, tokens = (
        torch.export.Dim("batch", min=2, max=9),
        torch.export.Dim("tokens", min=2, max=99),
    )
    program = torch.export.export(
        layer,
        (sample(),),
        {"is_causal": True},
        dynamic_shapes={"hidden_states": {0: batch, 1: tokens}, "is_causal": None},
    )
    longer = torch.randn(3, 11, E)
    torch.testing.assert_close(
        program.module()(longer, is_causal=True), layer(longer, is_causal=True)
    )


class Stock(nn.Module):
    """The same layer without levelhead, to count graphs against."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(E, 3 * E), nn.Linear(E, E)

    def forward(self, hidden_states, is_causal):
        qkv = self.qkv(hidden_states).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        attn_output = nn.functional.scaled_dot_product_attention(*qkv, is_causal=is_causal)
        return self.proj(attn_output.transpose(1, 2).flatten(2))


def count_graphs(module, lengths):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    for length in lengths:
        compiled(sample(length), is_causal=True).sum().backward()
    return counter.frame_count


LENGTHS = (5, 7, 11, 13)


@pytest.fixture(scope="module")
def stock_graphs():
    return count_graphs(Stock(), LENGTHS)


@pytest.mark.compile
@pytest.mark.parametrize(
    "variant", [*all_terms(), "affine(warm_start=True)", "spectral(form='svd')", full_house()]
)
def test_compile_fullgraph_gives_the_same_and_does_not_recompile_per_length(variant, stock_graphs):
    """No more graphs than stock: one for the first length, one for all others.

    The forward hook of ``track_steps`` on the compiled root is one more small graph of its own.
    """
    layer = layer_of(variant)
    plain = copy.deepcopy(layer)
    has_state = any(hasattr(module, "advance") for module in layer.modules())
    torch.manual_seed(1)
    assert count_graphs(layer, LENGTHS) <= stock_graphs + has_state
    torch.compiler.reset()
    torch.manual_seed(1)
    for length in LENGTHS:
        plain(sample(length), is_causal=True).sum().backward()
    for found, expected in zip(layer.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, atol=1e-4, rtol=1e-4)
    for found, expected in zip(layer.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.compile
@pytest.mark.parametrize("variant", ["sink", "off_by_one", "quest + sink", "soft_cap(cap=2.0)"])
def test_compile_fullgraph_takes_one_tensor_as_query_key_and_value(variant):
    inner = lh.InnerAttention(variant, embed_dim=E, num_heads=H)
    plain, compiled = (torch.randn(2, H, 7, E // H, requires_grad=True) for _ in range(2))
    compiled.data.copy_(plain.data)
    inner(plain, plain, plain, is_causal=True).sum().backward()
    call = torch.compile(lambda x: inner(x, x, x, is_causal=True), backend="aot_eager",
                         fullgraph=True)  # fmt: skip
    call(compiled).sum().backward()
    torch.testing.assert_close(compiled.grad, plain.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.compile
def test_compile_with_masks_and_a_cache_stays_one_graph():
    layer = layer_of("affine + sink + gate").eval()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    context = torch.randn(2, 11, E)
    mask = torch.rand(2, 1, 7, 11) > 0.3
    for call in ({"attn_mask": mask}, {"is_causal": True}, {"attn_bias": torch.randn(7, 11)}):
        hidden_states = sample()
        torch.testing.assert_close(
            compiled(hidden_states, context, **call), layer(hidden_states, context, **call)
        )


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize(
    "variant", ["affine + sink + quest + gate", "precondition + sigma_reparam"]
)
def test_inductor_gives_the_same(variant):
    torch.compiler.reset()
    layer = layer_of(variant)
    plain = copy.deepcopy(layer)
    compiled = torch.compile(layer, fullgraph=True)
    for length in (5, 7, 11):
        hidden_states = sample(length)
        found, expected = (
            compiled(hidden_states, is_causal=True),
            plain(hidden_states, is_causal=True),
        )
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
        found.sum().backward()
        expected.sum().backward()
    for one, other in zip(layer.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-4, rtol=1e-3)

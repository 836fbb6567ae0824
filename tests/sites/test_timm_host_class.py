"""Class attention mixes tokens before it projects values: the same numbers for half the work."""

import copy

import pytest
import torch
from converting import assert_same_gradients, gradients, install, randomise
from timm.models.cait import ClassAttn
from torch import nn
from torch.profiler import ProfilerActivity, profile

import levelhead as lh
from levelhead.convert_kernels import kernel_in_words
from levelhead.sites.find import find_attention
from levelhead.sites.host import installed_in
from levelhead.sites.timm_host_class import mixes_tokens_first
from levelhead.sites.timm_host_projections import split_heads
from levelhead.variants import VARIANTS

E, H, B, S = 35, 5, 2, 11
EXACT = 1e-10
CAP = "soft_cap(cap=2.0)"
INNER = [
    {"soft_cap": CAP}.get(name, name)
    for name, info in VARIANTS.items()
    if info.stage != "projections"
]
MIXED = ["quest + sink + affine + gate", "qknorm_ds + off_by_one + affine", "quest + precondition"]


def converted(variant, qkv_bias=True, dtype=torch.double, **options):
    torch.manual_seed(0)
    module = ClassAttn(E, H, qkv_bias=qkv_bias, **options).to(dtype)
    install(module, variant)
    return randomise(module)


def tokens(dtype=torch.double, length=S):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(B, length, E, dtype=dtype, generator=generator).requires_grad_()


def with_values(module):
    """A copy that projects a value for every token, since somebody waits for them."""
    twin = copy.deepcopy(module)
    twin.v.register_forward_hook(lambda *args: None)
    return twin


@pytest.mark.parametrize("variant", [*INNER, *MIXED])
@pytest.mark.parametrize("qkv_bias", [True, False])
@pytest.mark.parametrize("is_training", [True, False])
def test_values_and_gradients_are_those_of_projected_values(variant, qkv_bias, is_training):
    module = converted(variant, qkv_bias).train(is_training)
    twin, inputs = with_values(module), tokens()
    assert mixes_tokens_first(module, installed_in(module))
    assert not mixes_tokens_first(twin, installed_in(twin))
    expected, found = twin(inputs), module(inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=EXACT)
    assert_same_gradients(
        gradients(twin, expected, inputs), gradients(module, found, inputs), EXACT
    )
    for name, buffer in twin.named_buffers():  # affine's running mean
        torch.testing.assert_close(module.get_buffer(name), buffer)


def test_second_derivatives():
    module = converted("quest + gate")
    inputs, names = tokens(length=3), [name for name, _ in module.named_parameters()]

    def call(inputs, *parameters):
        given = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(module, given, (inputs,))

    assert torch.autograd.gradgradcheck(call, (inputs, *module.parameters()), fast_mode=True)


def projections_of_all_tokens(module, inputs):
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        module(inputs)
    rows = [inputs.shape[0] * inputs.shape[1], E]
    return sum(e.name == "aten::addmm" and rows in e.input_shapes for e in profiler.events())


def test_keys_alone_are_projected_for_every_token():
    module, inputs = converted("sink"), tokens(length=400)
    assert projections_of_all_tokens(module, inputs) == 1
    assert projections_of_all_tokens(with_values(module), inputs) == 2


def hooked(module):
    module.v.register_forward_hook(lambda layer, args, output: 2 * output)


def replaced(module):
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    twice = Doubled(E, E).double()
    twice.load_state_dict(module.v.state_dict())
    module.v = twice


def overridden(module):
    plain = module.v.forward
    module.v.forward = lambda x: 2 * plain(x)


@pytest.mark.parametrize("change", [hooked, replaced, overridden])
def test_whatever_changes_the_values_is_heeded(change):
    module, inputs = converted("softmax"), tokens()
    doubled = copy.deepcopy(module)
    with torch.no_grad():
        doubled.v.weight.mul_(2)
        doubled.v.bias.mul_(2)
    change(module)
    assert not mixes_tokens_first(module, installed_in(module))
    torch.testing.assert_close(module(inputs), doubled(inputs), rtol=0, atol=EXACT)


@pytest.mark.parametrize("find", [installed_in, lambda module: installed_in(module).inner])
def test_hooks_on_the_attention_itself_are_called(find):
    module, inputs, seen = converted("sink"), tokens(), []
    expected = module(inputs)
    find(module).register_forward_hook(lambda layer, args, output: seen.append(args[2]))
    torch.testing.assert_close(module(inputs), expected, rtol=0, atol=EXACT)
    torch.testing.assert_close(seen, [split_heads(module.v(inputs), E // H)])


@pytest.mark.parametrize("variant", ["softmax", "quest + affine"])
def test_a_capture_hears_values_and_changes_no_bit(variant):
    module, inputs = converted(variant).eval(), tokens()
    expected, calls = module(inputs), []
    with lh.capture(module, calls.append):
        found = module(inputs)
    assert torch.equal(found, expected)
    torch.testing.assert_close(calls[0].value, split_heads(module.v(inputs), E // H))
    assert calls[0].query.shape == (B, H, 1, E // H)
    assert torch.equal(module(inputs), expected)


def test_low_precision_under_autocast_stays_close():
    module, inputs = converted("sink + gate", dtype=torch.float32), tokens(torch.float32)
    expected = module(inputs)
    with torch.autocast("cpu", torch.bfloat16):
        found = module(inputs)
    assert found.dtype == torch.bfloat16
    scale = expected.abs().max().item()
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=0.03 * scale)


def test_dropout_drops_weights_in_training_alone():
    module, inputs = converted("softmax", attn_drop=0.4), tokens()
    assert not torch.equal(module.train()(inputs), module(inputs))
    module.eval()
    assert torch.equal(module(inputs), module(inputs))
    torch.testing.assert_close(module(inputs), with_values(module)(inputs), rtol=0, atol=EXACT)


def test_the_report_says_how_it_runs():
    one_query = "plain, for one query, before the value projection"
    assert lh.convert(ClassAttn(E, H), "quest").layers[0].kernel == one_query
    assert lh.convert(ClassAttn(E, H), "sigma_reparam").layers[0].kernel == "flash"
    module = converted("quest")
    (site,) = find_attention(module)
    hooked(module)
    assert kernel_in_words(site, installed_in(module)) == "flash"


@pytest.mark.compile
def test_one_graph_and_the_same_numbers():
    torch.compiler.reset()
    module, inputs = converted("quest + affine"), tokens()
    compiled = torch.compile(module.eval(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(inputs), module(inputs))

"""After a conversion: autocast, padding, copies, wrapping for several ranks, a compiler."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import levelhead as lh
from hosts import HOSTS, run
from matrix import output_of, outputs, randomise, worst
from ranks import joined, on_ranks

AUTOCAST_BOUND = 0.03
"""bfloat16 keeps 8 bits; two layers of a tiny model stay within this of the largest output."""


def built(architecture, variant):
    """A converted model away from its start, without dropout, and a batch."""
    model = HOSTS[architecture].build()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    lh.convert(model, variant)
    randomise(model)
    return model, HOSTS[architecture].batch()


def gradients(model, batch, run_as=None):
    """Every gradient of one training step; ``run_as`` is what wraps the model."""
    wrapped = model if run_as is None else run_as
    loss = output_of(run(wrapped.train(), batch)).float().square().mean()
    loss.backward()
    return loss.detach(), {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("architecture", ["timm_vit", "llama", "torch_encoder"])
def test_autocast_at_the_neutral_setting_is_autocast_of_stock(architecture):
    model, batch = HOSTS[architecture].build(), HOSTS[architecture].batch()
    stock = copy.deepcopy(model)
    lh.convert(model, "softmax")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = outputs(model, batch), outputs(stock, batch)
    assert found.dtype == expected.dtype
    scale = expected.abs().max().item()
    assert worst(found.float(), expected.float()) < AUTOCAST_BOUND * scale
    assert worst(outputs(model, batch), outputs(stock, batch)) < 1e-6 * max(scale, 1)


@pytest.mark.parametrize(
    "variant",
    ["affine + gate", "quest + sink", "sigma_reparam + precondition", "spectral(strength=0.5)"],
)
@pytest.mark.parametrize("architecture", ["timm_vit", "llama", "gpt2"])
def test_autocast_of_a_variant_is_near_its_float32(architecture, variant):
    model, batch = built(architecture, variant)
    expected, exact = gradients(copy.deepcopy(model), batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, rounded = gradients(model, batch)
    assert abs(found / expected - 1) < AUTOCAST_BOUND
    assert rounded.keys() == exact.keys()
    for name in (name for name in exact if ".levelhead." in name):
        assert rounded[name].dtype == exact[name].dtype
        assert rounded[name].isfinite().all()
    whole, near = (torch.cat([g.flatten() for g in grads.values()]) for grads in (exact, rounded))
    assert torch.nn.functional.cosine_similarity(whole, near, dim=0) > 0.99


@pytest.mark.parametrize("variant", ["quest", "affine + gate", "sink", "spectral(strength=0.5)"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bert"])
def test_right_padding_moves_nothing(architecture, variant):
    model, batch = built(architecture, variant)
    ids = batch["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, -4:] = 0
    padded = outputs(model, {"input_ids": ids, "attention_mask": mask})
    alone = outputs(model, {"input_ids": ids[:1, :-4], "attention_mask": mask[:1, :-4]})
    assert worst(padded[0, :-4], alone[0]) < 1e-5
    other = torch.where(mask.bool(), ids, 5)
    changed = outputs(model, {"input_ids": other, "attention_mask": mask})
    assert worst(changed[mask.bool()], padded[mask.bool()]) < 1e-6
    assert worst(outputs(model, {"input_ids": other}), padded) > 1e-6


@pytest.mark.parametrize(
    "architecture", ["llama", "gpt2", "gpt_neox", "phi3", "timm_vit", "torch_encoder"]
)
def test_models_with_projection_terms_are_pickled_and_copied(architecture):
    model, batch = built(architecture, "sigma_reparam + gate")
    expected = outputs(model, batch)
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert worst(outputs(twin, batch), expected) == 0
        randomise(twin, seed=5)
        assert worst(outputs(twin, batch), expected) > 1e-6
        assert worst(outputs(model, batch), expected) == 0
        lh.restore(twin)


WRAPPED = ("affine + gate", "sigma_reparam + quest", "spectral(strength=0.3) + sink")


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_wrapped_is_unwrapped(architecture, variant, mesh):
    """Every rank gets the same batch, so averaged gradients are those of one process."""
    model, batch = built(architecture, variant)
    twins = [copy.deepcopy(model) for _ in range(3)]
    loss, expected = gradients(model, batch)
    parallel = nn.parallel.DistributedDataParallel(twins[0], find_unused_parameters=False)
    sharded = twins[1]
    for site in lh.find_attention(sharded):
        fully_shard(site.module, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    at_once = fully_shard(twins[2], mesh=mesh)
    for found_loss, found in (
        gradients(twins[0], batch, parallel), gradients(sharded, batch), gradients(at_once, batch),
    ):  # fmt: skip
        torch.testing.assert_close(found_loss, loss, atol=1e-6, rtol=1e-5)
        assert found.keys() == expected.keys()
        for name, grad in expected.items():
            torch.testing.assert_close(whole(found[name]), grad, atol=1e-6, rtol=1e-4, msg=name)


def wrap_each(rank, world_size, architectures):
    mesh = dist.init_device_mesh("cpu", (world_size,))
    for architecture in architectures:
        for variant in WRAPPED:
            assert_wrapped_is_unwrapped(architecture, variant, mesh)


def test_wrapped_after_conversion_on_one_rank_is_unwrapped(free_port):
    with joined(0, 1, free_port):
        wrap_each(0, 1, ["llama"])


@pytest.mark.slow
def test_wrapped_after_conversion_on_two_ranks_is_unwrapped(free_port):
    on_ranks(2, free_port, wrap_each, 2, ["llama", "gpt2", "timm_vit"])


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("variant", ["quest", "affine + gate", "sigma_reparam + sink"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_compiled_decoding_over_a_static_cache(architecture, variant):
    torch.compiler.reset()
    model, batch = built(architecture, variant)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0,
               "output_logits": True, "return_dict_in_generate": True}  # fmt: skip
    expected = model.generate(**batch, use_cache=False, **options)
    model.forward = torch.compile(model.forward, backend="aot_eager")
    found = model.generate(**batch, cache_implementation="static", disable_compile=True, **options)
    assert torch.equal(found.sequences, expected.sequences)
    for one, other in zip(found.logits, expected.logits, strict=True):
        assert worst(one, other) < 1e-5


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("architecture", ["llama", "bert", "vit"])
def test_a_variant_by_name_compiles(architecture):
    torch.compiler.reset()
    lh.register("quest")
    model, batch = HOSTS[architecture].build(), HOSTS[architecture].batch()
    model.set_attn_implementation("levelhead:quest")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert worst(outputs(compiled, batch), outputs(model, batch)) < 1e-6

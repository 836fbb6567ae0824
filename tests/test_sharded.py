"""Two ranks, DDP and FSDP2, every variant: the same training as one process on the whole batch."""

import pytest
import torch
from torch import nn

import levelhead as lh
from cases import OPTIONS, all_terms, full_house
from levelhead.harness.models.gpt import GPT, GPTConfig
from ranks import on_ranks

pytestmark = pytest.mark.slow

WORLD, VOCAB, STEPS = 2, 17, 3
EVERY = [*all_terms(), *OPTIONS, full_house()]


def model(variant, device="cpu"):
    torch.manual_seed(0)
    config = GPTConfig(
        vocab_size=VOCAB, context_length=16, embed_dim=24, num_layers=2, num_heads=4,
        variant=variant,
    )  # fmt: skip
    with torch.device(device):
        return GPT(config)


def train(network, rows):
    """Take steps of SGD on some rows of each batch."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(VOCAB, (2 * WORLD, 9), generator=generator)
        optimizer.zero_grad()
        network(tokens[rows]).square().mean().backward()
        without = [name for name, p in network.named_parameters() if p.grad is None]
        assert without == []
        optimizer.step()


def state(network):
    whole = {
        k: getattr(v, "full_tensor", lambda v=v: v)() for k, v in network.state_dict().items()
    }
    return {name: value.detach().clone() for name, value in whole.items()}


def shard(network, each_block=True):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    for block in network.blocks if each_block else ():
        fully_shard(block, mesh=mesh)
    return fully_shard(network, mesh=mesh)


def assert_same(found, expected, where):
    for name, value in found.items():
        torch.testing.assert_close(
            value,
            expected[name],
            atol=1e-5,
            rtol=1e-4,
            msg=lambda m, name=name: f"{where} {name}: {m}",
        )


def train_wrapped(rank, path):
    expected = torch.load(path)
    rows = slice(2 * rank, 2 * rank + 2)
    for variant in EVERY:
        copied, sharded = model(variant), model(variant)
        train(nn.parallel.DistributedDataParallel(copied), rows)
        train(shard(sharded), rows)
        assert_same(state(sharded), state(copied), f"{variant} sharded")
        if "affine" not in variant:  # which uses its own rank's mean within a step
            assert_same(state(copied), expected[variant], variant)


def test_case_a12_a28_every_variant_trains_on_two_ranks_as_on_one(free_port, tmp_path):
    """Without find_unused_parameters; every parameter has a gradient on every rank and step."""
    expected = {}
    for variant in EVERY:
        network = model(variant)
        train(network, slice(None))
        expected[variant] = state(network)
    torch.save(expected, tmp_path / "expected.pt")
    on_ranks(WORLD, free_port, train_wrapped, str(tmp_path / "expected.pt"))


def start_on_meta(rank):
    for variant in ("sigma_reparam", "spectral(form='svd')"):
        network = shard(model(variant, "meta"))
        network.to_empty(device="cpu")
        for module in network.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        network(torch.zeros(1, 2, dtype=torch.long))
        found = state(network)
        for which in "qkv":
            weight = found[f"blocks.1.attn.{which}_proj.weight"]
            if variant == "sigma_reparam":
                sigma = found[f"blocks.1.attn.projections.sigma.{which}"]
                torch.testing.assert_close(sigma[0], torch.linalg.matrix_norm(weight, 2))
            else:
                correction = found[f"blocks.1.attn.projections.{which}_correction"]
                assert torch.linalg.cond(weight + correction) <= 2 + 1e-4


def test_what_is_taken_from_the_weights_survives_sharding_before_the_first_forward(free_port):
    on_ranks(WORLD, free_port, start_on_meta)


def derive_in_one_group(rank):
    network = shard(model("sigma_reparam"), each_block=False)
    tokens = torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(ValueError, match=r"call its derive\(\) on every rank, or fully_shard its"):
        network(tokens)
    network = shard(model("sigma_reparam"), each_block=False)
    for module in network.modules():
        if isinstance(module, lh.Attention):
            module.derive()
    network(tokens)
    found = state(network)
    sigma = found["blocks.0.attn.projections.sigma.v"][0]
    norm = torch.linalg.matrix_norm(found["blocks.0.attn.v_proj.weight"], 2)
    torch.testing.assert_close(sigma, norm)


def test_a_start_that_would_be_lost_is_refused_with_the_remedy(free_port):
    on_ranks(WORLD, free_port, derive_in_one_group)

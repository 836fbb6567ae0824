"""Sharded parameters: every rank ends up with its part of one whole matrix."""

import pytest
import torch

from levelhead.attention import Attention
from levelhead.initialize import initialize_
from levelhead.sharding import distribute_like, whole_parameters
from ranks import on_ranks

pytestmark = pytest.mark.slow

WORLD = 2


def model():
    """Widths that two ranks cannot share evenly: 15 outputs fall into 8 and 7."""
    torch.manual_seed(0)
    return torch.nn.Sequential(Attention(15, 3), Attention(15, 3), Attention(15, 3))


def sharded():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    whole = model()
    mesh = init_device_mesh("cpu", (WORLD,))
    for attention in whole:
        fully_shard(attention, mesh=mesh)
    return fully_shard(whole, mesh=mesh)


def assert_equal_to_one_process(rank, initializer):
    generator = torch.Generator().manual_seed(3)
    shards, whole = sharded(), model()
    before = {id(parameter) for parameter in shards.parameters()}
    report = initialize_(shards, initializer, generator=generator)
    assert {id(parameter) for parameter in shards.parameters()} == before
    expected = initialize_(whole, initializer, generator=generator.manual_seed(3))
    assert report.matrices == expected.matrices
    state = whole.state_dict()
    for name, parameter in shards.named_parameters():
        assert parameter.to_local().shape != state[name].shape, name
        assert torch.equal(parameter.full_tensor(), state[name]), name
    hidden_states = torch.randn(2, 7, 15)
    torch.testing.assert_close(shards(hidden_states), whole(hidden_states))


def bert():
    from hosts import HOSTS

    return HOSTS["bert"].build(num_hidden_layers=1)


def assert_an_output_outside_the_attention_is_gathered_too(rank, initializer):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shards, whole = bert(), bert()
    mesh = init_device_mesh("cpu", (WORLD,))
    layer = shards.encoder.layer[0]
    for module in (layer.attention.self, layer.attention.output, layer):
        fully_shard(module, mesh=mesh)
    fully_shard(shards, mesh=mesh)
    reports = [
        initialize_(model, initializer, generator=torch.Generator().manual_seed(3))
        for model in (shards, whole)
    ]
    assert reports[0].matrices == reports[1].matrices
    assert reports[0].products == reports[1].products
    assert "o" in {row.matrix for row in reports[0].initialised}
    state = whole.state_dict()
    for name, parameter in shards.named_parameters():
        assert torch.equal(parameter.full_tensor(), state[name]), name


def assert_rank_0_decides(rank):
    shards = sharded()
    initialize_(shards, "xavier", generator=torch.Generator().manual_seed(rank))
    whole = model()
    initialize_(whole, "xavier", generator=torch.Generator().manual_seed(0))
    for name, parameter in shards.named_parameters():
        assert torch.equal(parameter.full_tensor(), whole.get_parameter(name)), name


def assert_selected_like_one_process(rank):
    torch.manual_seed(1)
    teacher = torch.nn.Sequential(*(Attention(24, 4) for _ in range(3)))
    shards, whole = sharded(), model()
    for student in (shards, whole):
        initialize_(student, "weight_selection", teacher=teacher)
    for name, parameter in shards.named_parameters():
        assert torch.equal(parameter.full_tensor(), whole.get_parameter(name)), name


def spoil(shards):
    with whole_parameters(shards.modules()):
        for parameter in shards.parameters():
            parameter.data.zero_()
        raise RuntimeError("stop")


def assert_errors_leave_the_shards(rank):
    shards = sharded()
    before = {name: p.full_tensor() for name, p in shards.named_parameters()}
    with pytest.raises(RuntimeError, match="stop"):
        spoil(shards)
    for name, parameter in shards.named_parameters():
        assert torch.equal(parameter.full_tensor(), before[name])
    plain = torch.ones(3)
    assert distribute_like(plain, torch.zeros(3)) is plain


@pytest.mark.parametrize(
    "initializer", ["conditioned", "conditioned(gain='match')", "mimetic", "orthogonal"]
)
def test_shards_hold_the_matrices_of_one_process(initializer, free_port):
    on_ranks(WORLD, free_port, assert_equal_to_one_process, initializer)


@pytest.mark.parametrize("initializer", ["mimetic", "orthogonal"])
def test_outputs_outside_the_attention_are_gathered_too(initializer, free_port):
    pytest.importorskip("transformers")
    on_ranks(WORLD, free_port, assert_an_output_outside_the_attention_is_gathered_too, initializer)


def test_rank_0_decides_where_seeds_differ(free_port):
    on_ranks(WORLD, free_port, assert_rank_0_decides)


def test_weight_selection_reaches_shards(free_port):
    on_ranks(WORLD, free_port, assert_selected_like_one_process)


def test_an_exception_leaves_the_shards_as_they_were(free_port):
    on_ranks(WORLD, free_port, assert_errors_leave_the_shards)

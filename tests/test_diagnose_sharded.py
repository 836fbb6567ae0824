"""FSDP2: every rank diagnoses the whole model, to the same numbers as one process."""

import math

import pytest
import torch

from levelhead.diagnose import diagnose
from ranks import on_ranks
from test_initialize_sharded import WORLD, model, sharded

pytestmark = pytest.mark.slow


def numbers(diagnosis):
    return {(r.layer, r.head, r.metric): r.value for r in diagnosis.records}


def assert_equal_numbers(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        same = found[key] == value or (math.isnan(found[key]) and math.isnan(value))
        assert same or found[key] == pytest.approx(value, rel=1e-5), key


@torch.no_grad()
def assert_same_as_one_process(rank):
    states = torch.randn(2, 7, 15, generator=torch.Generator().manual_seed(5))
    shards, whole = sharded(), model()
    before = {name: id(parameter) for name, parameter in shards.named_parameters()}
    found = diagnose(shards, states, jacobian_tokens=4)
    expected = diagnose(whole, states, jacobian_tokens=4)
    assert_equal_numbers(numbers(found), numbers(expected))
    assert found.verdict == expected.verdict
    assert found.meta["not_measured"] == expected.meta["not_measured"]
    assert {name: id(parameter) for name, parameter in shards.named_parameters()} == before
    if rank == 0:  # the comparison can fail
        changed = numbers(expected) | {("0", 0, "kappa_q"): 1.0}
        with pytest.raises(AssertionError):
            assert_equal_numbers(numbers(found), changed)


def test_a_sharded_model_is_diagnosed_as_the_whole_one(free_port):
    on_ranks(WORLD, free_port, assert_same_as_one_process)

"""The attention benchmark: every term is timed beside plain SDPA, and its memory counted."""

import importlib.metadata
import importlib.util
import json

import pytest
import torch

from levelhead.bench import attention, attention_peers
from levelhead.variants import VARIANTS

# x-transformers scripts a function when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
HAS_PEERS = importlib.util.find_spec("x_transformers") is not None


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench") / "attention.json"
    arguments = ["--tokens", "24", "--repeats", "2", "--memory-tokens", "32", "--device", "cpu"]
    assert attention.main([*arguments, "--out", str(out)]) == 0
    return json.loads(out.read_text())


def test_every_term_of_an_inner_attention_is_measured(record):
    (times,) = record["times"]
    terms = {name for name, info in VARIANTS.items() if info.stage != "projections"}
    for rows in (times["forward"], times["forward_backward"], record["memory"]):
        assert terms <= {name.split("(")[0] for name in rows}
    for row in times["forward_backward"].values():
        low, high = row["interval"]
        assert row["ratio_min"] <= low <= row["ratio"] <= high <= row["ratio_max"]
        assert row["rounds"] == 2


def test_the_table_has_a_line_for_each(record):
    text = attention.table(record)
    assert "24 tokens: time over plain SDPA" in text
    for name in attention.inner_variants():
        assert f"  {name} " in text


@pytest.mark.skipif(not HAS_PEERS, reason="x-transformers is not installed")
def test_peers_are_timed_beside_the_same_variant(record):
    (times,) = record["times"]
    rows = times["forward_backward_over_x_transformers"]
    assert set(rows) == set(attention_peers.peer_options(attention.HEAD_DIM))
    assert record["x_transformers"] == importlib.metadata.version("x-transformers")
    assert all(row["rounds"] >= 2 for row in rows.values())


@pytest.mark.skipif(not HAS_PEERS, reason="x-transformers is not installed")
@pytest.mark.parametrize("variant", attention_peers.peer_options(attention.HEAD_DIM))
def test_a_peer_computes_the_same_numbers(variant):
    case = attention.Case(num_tokens=13, batch=2, device="cpu", dtype=torch.float32)
    found = []
    for attend in (attention.attend_with(variant, case), attention_peers.peers(case)[variant]):
        case.step(attend, backward=True)()
        learning = [*case.qkv, *case.projected.values()]
        found.append([attend(*case.qkv), *(t.grad for t in learning if t.grad is not None)])
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)

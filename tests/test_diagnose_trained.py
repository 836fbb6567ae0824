"""What is known of two trained models shows in their diagnosis; records/ has all of it."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from levelhead.diagnose import diagnose
from levelhead.diagnose_command_models import trained
from levelhead.harness.config import Cell
from levelhead.harness.tasks import make_task, resolve_task
from levelhead.modes import one_thread
from levelhead.monitor import Monitor
from levelhead.sites.find import find_attention
from trained_models import (
    PROSE,
    SENTENCES,
    minilm,
    minilm_batch,
    needs_minilm,
    needs_whisper,
    repeated_tokens,
    whisper,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def byte_gpt():
    """The small GPT of a comparison, as the embedded demo trains it; its batch and its alerts."""
    task = resolve_task("topics", {"gpt": {}})
    cell = Cell(task=task.name, variant="softmax", init="default", seed=2)
    with one_thread():
        model = trained(make_task(task), cell)
    batch = next(make_task(task).batches(0))[0]
    return model.eval(), batch


COLLAPSES = {"saturated_softmax", "entropy_collapse"}


def test_a_healthy_trained_byte_gpt_is_called_healthy(byte_gpt):
    """Its scores spread as far as those of frozen Gaussian rows do, but its rows still learn."""
    model, batch = byte_gpt
    found = diagnose(model, batch, jacobian_tokens=0)
    spread = [r.value for r in found.records if r.metric == "score_std_q50"]
    assert max(spread) > math.sqrt(2 * math.log(batch.shape[1]))  # random energy model
    assert found.findings == []
    assert found.verdict.startswith("Healthy")


@torch.no_grad()
def test_its_collapsed_twin_is_called_ill_by_diagnosis_and_monitor(byte_gpt, tmp_path):
    model, batch = copy.deepcopy(byte_gpt[0]), byte_gpt[1]
    attn = find_attention(model)[1]
    weights = attn.read()
    attn.write(replace(weights, q_weight=12 * weights.q_weight))
    found = diagnose(model, batch, jacobian_tokens=0)
    assert {f.kind for f in found.findings if f.layer == attn.name} >= COLLAPSES
    told = {}
    for name, watched in (("healthy", byte_gpt[0]), ("ill", model)):
        with Monitor(watched, every=1, jsonl=tmp_path / name, auto_step=False) as monitor:
            with torch.enable_grad():
                watched(batch)
            monitor.end_step()
        told[name] = {(alert.kind, alert.layer) for alert in monitor.alerts}
    assert told["healthy"] == set()
    assert ("entropy_collapse", attn.name) in told["ill"]


INDUCTION_HEADS = {
    ("model.decoder.layers.1.self_attn", 5),
    ("model.decoder.layers.3.self_attn", 2),
}
"""Known from another program's plain forward pass; see tests/measure/test_trained_models.py."""


def heads_above(diagnosis, metric, threshold):
    return {
        (record.layer, record.head)
        for record in diagnosis.records
        if record.metric == metric and record.value > threshold
    }


@needs_whisper
def test_the_decoders_induction_heads_and_sinks_show():
    ids = repeated_tokens()[:2]
    features = torch.full((len(ids), 80, 3000), -1.5)
    batch = {"input_features": features, "decoder_input_ids": ids, "use_cache": False}
    found = diagnose(whisper(), batch, jacobian_tokens=0)
    told = {(f.layer, f.head) for f in found.findings if f.kind == "induction_head"}
    assert told == INDUCTION_HEADS
    assert heads_above(found, "induction_mean", 0.1) == INDUCTION_HEADS
    sinks = {f.layer: f.num_heads for f in found.findings if f.kind == "sink"}
    later = [f"model.decoder.layers.{layer}.self_attn" for layer in (1, 2, 3)]
    assert set(sinks) == set(later)  # neither the first layer, nor the encoder, nor cross
    assert min(sinks.values()) >= 3
    assert not found.is_severe


@needs_minilm
def test_minilm_is_healthy_and_rests_on_its_first_token():
    batch = minilm_batch((*SENTENCES, PROSE))
    found = diagnose(minilm(), batch, num_queries=None, jacobian_tokens=0)
    assert found.verdict.startswith("Healthy")
    assert {finding.kind for finding in found.findings} == {"sink"}
    first = "encoder.layer.0.attention.self"
    assert first not in {finding.layer for finding in found.findings}
    assert found.meta["num_padding"] == int((1 - batch["attention_mask"]).sum())
    assert found.meta["num_tokens"] == int(batch["attention_mask"].sum())


@needs_minilm
def test_each_row_of_a_padded_batch_counts_as_if_it_were_alone():
    """Entropy of the padded batch is that of its rows, each without any padding."""
    rows = (*SENTENCES, PROSE)
    metrics = ("entropy_nats_mean", "sink_mass_mean", "p_max_mean")
    options = {"num_queries": None, "jacobian_tokens": 0}
    padded = diagnose(minilm(), minilm_batch(rows), **options)
    alone = [diagnose(minilm(), minilm_batch((row,)), **options) for row in rows]
    lengths = [found.meta["num_tokens"] for found in alone]
    for layer in range(6):
        for head in range(12):
            for metric in metrics:
                values = [found.value(metric, layer, head) for found in alone]
                mean = sum(n * v for n, v in zip(lengths, values, strict=True)) / sum(lengths)
                assert padded.value(metric, layer, head) == pytest.approx(mean, abs=1e-4)

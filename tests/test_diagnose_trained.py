"""What is known of two trained models shows in their diagnosis; records/ has all of it."""

import pytest
import torch

from levelhead.diagnose import diagnose
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

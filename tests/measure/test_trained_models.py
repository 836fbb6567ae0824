"""What the measures find on trained models: facts that were known before, and promises."""

import copy

import pytest
import torch

from levelhead.capture import capture
from levelhead.measure.attention_rows import attention_sensitivity
from levelhead.measure.concentration import concentration
from levelhead.measure.jacobian import jacobian_condition
from levelhead.measure.layernorm import residual_jacobian
from levelhead.measure.surrogate import jacobian_bound
from trained_models import (
    induction_scores,
    minilm,
    minilm_batch,
    needs_minilm,
    needs_whisper,
    prose_tokens,
    repeated_tokens,
    shuffled,
    silence,
    surprise_nats,
    whisper,
    whisper_logits,
)

pytestmark = pytest.mark.slow

MINILM_ENTROPY_NATS = (1.42, 0.92, 0.88, 1.00, 0.96, 1.39)
"""Mean over all rows, padding queries too; from another program's plain forward pass."""
INDUCTION_HEADS = {(1, 5): 0.64, (3, 2): 0.31}
"""Likewise, on the first of the sequences of ``repeated_tokens``."""


@pytest.fixture(scope="module")
def minilm_calls():
    calls = []
    with torch.no_grad(), capture(minilm(), calls.append):
        minilm()(**minilm_batch())
    return calls


@pytest.fixture(scope="module")
def decoder_calls():
    calls = []
    with capture(whisper(), calls.append):
        whisper_logits(repeated_tokens())
    return [call for call in calls if call.site.is_causal]


@needs_minilm
def test_minilm_has_the_entropy_known_of_it(minilm_calls):
    found = [
        float(concentration(call.scores(), ["entropy_nats"], num_queries=None).mean("entropy_nats")
              .mean())
        for call in minilm_calls
    ]  # fmt: skip
    assert found == pytest.approx(MINILM_ENTROPY_NATS, abs=0.006)  # known to two digits


@needs_minilm
def test_minilm_places_guitars_near_instruments():
    batch = minilm_batch()
    mask = batch["attention_mask"][..., None]
    with torch.no_grad():
        states = minilm()(**batch).last_hidden_state
    mean = (states * mask).sum(1) / mask.sum(1)
    cosines = torch.nn.functional.cosine_similarity(mean[0], mean[1:])
    assert cosines.tolist() == pytest.approx([0.667, -0.064], abs=1e-3)


@needs_minilm
def test_streamed_values_equal_the_attention_weights_that_the_host_returns():
    model, found = copy.deepcopy(minilm()).double(), []

    def on_attention(call):
        found.append(concentration(call.scores(), ["entropy_nats", "p_max"], num_queries=None))

    with torch.no_grad():
        with capture(model, on_attention):
            model(**minilm_batch())
        model.set_attn_implementation("eager")
        shown = model(**minilm_batch(), output_attentions=True).attentions
    for streamed, attn_weights in zip(found, shown, strict=True):
        entropy = -torch.special.xlogy(attn_weights, attn_weights).sum(-1)
        torch.testing.assert_close(streamed.rows["entropy_nats"], entropy, atol=1e-12, rtol=0)
        torch.testing.assert_close(streamed.rows["p_max"], attn_weights.amax(-1))


@needs_whisper
def test_whisper_knows_english_and_repetition():
    prose = prose_tokens()
    assert surprise_nats(prose).mean() < 5.5
    assert surprise_nats(shuffled(prose)).mean() > 7
    once, twice = surprise_nats(repeated_tokens()[:1]).chunk(2, dim=1)
    assert (float(once.mean()), float(twice.mean())) == pytest.approx((12.39, 5.88), abs=0.01)
    assert silence().shape == (1, 1500, 384)


@needs_whisper
def test_whisper_has_the_two_induction_heads_known_of_it(decoder_calls):
    scores = {layer: found[0] for layer, found in induction_scores(decoder_calls).items()}
    for (layer, head), known in INDUCTION_HEADS.items():
        assert float(scores[layer][head]) == pytest.approx(known, abs=0.006)
        scores[layer][head] = 0
    assert max(float(found.max()) for found in scores.values()) < 0.1


@pytest.mark.parametrize(
    "calls",
    [
        pytest.param("minilm_calls", marks=needs_minilm),
        pytest.param("decoder_calls", marks=needs_whisper),
    ],
)
def test_theta_is_certified_and_exact_where_one_key_dominates(calls, request):
    for call in request.getfixturevalue(calls):
        bounds, _ = attention_sensitivity(call.scores())
        p_max = concentration(call.scores(), ["p_max"], num_queries=None).rows["p_max"].double()
        assert (bounds.upper - bounds.lower).max() <= 1e-6
        dominated = p_max >= 0.5
        exact = 4 * p_max * (1 - p_max)
        assert (bounds.midpoint - exact)[dominated].abs().max() < 2e-6  # p_max is float32
        assert (bounds.upper >= 1 - p_max.square() - 1e-6)[~dominated].all()


@needs_minilm
def test_the_bound_on_kappa_holds_for_every_head(minilm_calls):
    for call in minilm_calls:
        weights, num_heads = call.site.read(), call.site.num_heads
        names = ("q_weight", "k_weight", "v_weight", "q_bias", "k_bias", "v_bias")
        parts = {name: getattr(weights, name).chunk(num_heads, dim=-1) for name in names}
        for head in range(num_heads):
            own = {name: part[head] for name, part in parts.items()} | {"scale": call.scale}
            kappa = jacobian_condition(call.hidden_states[0], **own)
            assert kappa.kind == "exact"
            assert kappa.kappa <= jacobian_bound(call.hidden_states[0], **own).kappa * (1 + 1e-9)


@needs_minilm
@needs_whisper
def test_only_the_pre_ln_block_keeps_every_direction(minilm_calls, decoder_calls):
    post_ln = residual_jacobian(minilm().encoder.layer[0], minilm_calls[0].hidden_states[:1, :2])
    decoder_layer = whisper().model.decoder.layers[0]
    pre_ln = residual_jacobian(decoder_layer, decoder_calls[0].hidden_states[:1, :2])
    assert post_ln.literal_kappa_is_infinite
    assert not pre_ln.literal_kappa_is_infinite
    assert pre_ln.rank == 2 * 384

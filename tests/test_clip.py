"""QK-clip: nothing below the threshold, exactly the threshold above it."""

import math

import pytest
import torch
from torch import nn

from hosts import HOSTS, tokens
from levelhead.attention import Attention
from levelhead.capture import capture
from levelhead.clip import clip_qk_
from levelhead.measure.concentration import concentration
from levelhead.measure.streaming import AttentionScores


class ConvBetween(nn.Module):
    """Attention, convolution, attention; two query heads share a key head."""

    def __init__(self, sign=1.0):
        super().__init__()
        self.first, self.second = (
            Attention(28, 4, num_kv_heads=2, qkv_bias=True) for _ in range(2)
        )
        self.conv = nn.Conv1d(28, 28, 3, padding=1)
        for layer in (self.first, self.second):
            layer.q_proj.bias.data.normal_()
            layer.k_proj.bias.data.normal_()
        if sign < 0:  # queries near a vector, keys near its negative: every score is negative
            self.first.q_proj.bias.data.fill_(5.0)
            self.first.k_proj.bias.data.fill_(-5.0)

    def forward(self, hidden_states):
        return self.second(self.conv(self.first(hidden_states).mT).mT)


def largest_scores(model, batch):
    found = {}

    def look(call):
        scores = AttentionScores(call.query, call.key, call.scale, is_causal=call.is_causal)
        measured = concentration(scores, ["score_max"], num_queries=None)
        found[call.site.name] = measured.maximum("score_max").tolist()

    with torch.no_grad(), capture(model, look):
        model(batch)
    return found


def states():
    return torch.randn(2, 7, 28, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_case_a20_clipped_heads_reach_the_threshold_and_no_other_moves(sign):
    torch.manual_seed(0)
    model = ConvBetween(sign)
    before = largest_scores(model, states())
    gammas = clip_qk_(model, {"first": before["first"]}, threshold=1.0)["first"]
    after = largest_scores(model, states())
    assert any(gamma < 1 for gamma in gammas) or sign < 0
    for gamma, old, new in zip(gammas, before["first"], after["first"], strict=True):
        if old > 1:
            assert gamma == pytest.approx(1 / old)
            assert new == pytest.approx(1.0, abs=1e-3)
        else:
            assert gamma == 1.0
            assert new == pytest.approx(old, abs=1e-5)
    if sign < 0:
        assert max(before["first"]) < 0
        assert after["first"] == before["first"]


def test_case_a20_below_the_threshold_no_bit_changes():
    model = ConvBetween()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gammas = clip_qk_(model, largest_scores(model, states()), threshold=100.0)
    assert {gamma for by_head in gammas.values() for gamma in by_head} == {1.0}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_shared_key_head_is_clipped_once_by_the_worst_of_its_group():
    model = ConvBetween()
    k_before = model.first.k_proj.weight.detach().clone()
    gammas = clip_qk_(model, {"first": [4.0, 16.0, 0.5, -3.0]}, threshold=1.0)["first"]
    assert gammas == [0.25, 0.0625, 1.0, 1.0]
    k_after = model.first.k_proj.weight
    torch.testing.assert_close(k_after[:7], 0.25 * k_before[:7])
    assert torch.equal(k_after[7:], k_before[7:])


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_hosts_of_transformers_reach_the_threshold(name):
    model, ids = HOSTS[name].build(), tokens()["input_ids"]
    before = largest_scores(model, ids)
    first = next(iter(before))
    threshold = sorted(before[first])[1]
    clip_qk_(model, {first: before[first]}, threshold)
    after = largest_scores(model, ids)[first]
    for old, new in zip(before[first], after, strict=True):
        assert new == pytest.approx(min(old, threshold), abs=1e-4)


@pytest.mark.parametrize(("score_max", "threshold", "words"), [
    ({"first": [1.0] * 3}, 1.0, "one number a head"),
    ({"conv": [1.0] * 4}, 1.0, "score_max must name sites of the model"),
    ({"first": [math.nan] * 4}, 1.0, "score_max must not be NaN"),
    ({"first": [1.0] * 4}, 0.0, "threshold must be positive"),
])  # fmt: skip
def test_bad_input_is_refused(score_max, threshold, words):
    with pytest.raises(ValueError, match=words):
        clip_qk_(ConvBetween(), score_max, threshold)


def test_norms_that_undo_the_scaling_are_refused():
    model = HOSTS["qwen3"].build()
    with pytest.raises(ValueError, match="bilinear in W_Q and W_K"):
        clip_qk_(model, {"model.layers.0.self_attn": [1.0] * 4})

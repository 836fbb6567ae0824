"""Padding says nothing: a padded batch gives the numbers of the same rows without padding."""

import math

import pytest
import torch
from torch import nn

from hosts import HOSTS, VOCAB
from levelhead.attention import Attention
from levelhead.capture_tokens import TokenFinder, document_starts
from levelhead.diagnose import diagnose
from levelhead.monitor import Monitor
from levelhead.sites.calls import AttentionCall
from levelhead.sites.find import find_attention

LENGTH, PADDING = 13, 8
IDS = torch.randint(3, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(4))


def padded_ids(side, mask_name="attention_mask", ids_name="input_ids"):
    """The same ids with what must not count beside them, and the mask that says so."""
    junk = torch.randint(3, VOCAB, (2, PADDING), generator=torch.Generator().manual_seed(5))
    parts = [(IDS, 1), (junk, 0)] if side == "right" else [(junk, 0), (IDS, 1)]
    masks = [torch.full_like(ids, number) for ids, number in parts]
    return {ids_name: torch.cat([ids for ids, _ in parts], 1), mask_name: torch.cat(masks, 1)}


def positions(side):
    start = PADDING if side == "left" else 0
    return (torch.arange(LENGTH + PADDING) - start).clamp(min=0).expand(2, -1)


def decoder(batch):
    return {"input_ids": IDS, **batch}


def encoder_states(is_padded):
    states = torch.randn(2, LENGTH + PADDING, 60, generator=torch.Generator().manual_seed(6))
    if not is_padded:
        return {"src": states[:, :LENGTH]}
    is_padding = torch.arange(LENGTH + PADDING).expand(2, -1) >= LENGTH
    return {"src": states, "src_key_padding_mask": is_padding}


BATCHES = {
    "bert": ("bert", {"input_ids": IDS}, padded_ids("right")),
    "gpt2 right": ("gpt2", {"input_ids": IDS}, padded_ids("right")),
    "gpt2 left": (
        "gpt2", {"input_ids": IDS}, padded_ids("left") | {"position_ids": positions("left")},
    ),
    "t5 decoder": (
        "t5", decoder({"decoder_input_ids": IDS}),
        decoder(padded_ids("right", "decoder_attention_mask", "decoder_input_ids")),
    ),
    "t5 both": ("t5", decoder({"decoder_input_ids": IDS}),
                padded_ids("right") | {"decoder_input_ids": IDS}),
    "torch": ("torch_encoder", encoder_states(False), encoder_states(True)),
}  # fmt: skip


def build(name):
    if name != "torch_encoder":
        return HOSTS[name].build()
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(60, 4, 44, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


@pytest.mark.parametrize("case", BATCHES)
def test_every_number_is_that_of_the_batch_without_padding(case):
    name, plain, padded = BATCHES[case]
    model = build(name)
    diagnoses = [
        diagnose(model, batch, num_queries=None, jacobian_tokens=5) for batch in (plain, padded)
    ]
    without, within = (
        {(r.layer, r.head, r.metric): r.value for r in found.records} for found in diagnoses
    )
    assert without.keys() == within.keys()
    assert any(metric == "entropy_nats_q50" for *_, metric in within)
    for key, value in without.items():
        assert within[key] == pytest.approx(value, rel=2e-3, abs=2e-5, nan_ok=True), key
    assert [f.kind for f in diagnoses[0].findings] == [f.kind for f in diagnoses[1].findings]
    assert diagnoses[0].meta["num_padding"] == 0
    assert diagnoses[1].meta["num_padding"] == 2 * PADDING


@pytest.mark.parametrize("case", ["bert", "gpt2 left", "t5 decoder", "torch"])
def test_the_monitor_leaves_padding_out(case, tmp_path):
    name, plain, padded = BATCHES[case]
    model, latest = build(name), []
    for batch in (plain, padded):
        with (
            torch.no_grad(),
            Monitor(
                model, every=1, jsonl=tmp_path / "m.jsonl", num_queries=None, auto_step=False
            ) as monitor,
        ):
            model(**batch)
            monitor.end_step()
        latest.append(monitor.latest)
    assert latest[0].keys() == latest[1].keys()
    assert latest[1] == pytest.approx(latest[0], rel=2e-3, abs=2e-5)


def test_it_can_fail_junk_in_the_padding_is_not_harmless():
    """Without its mask the same batch gives other numbers."""
    model = build("bert")
    plain, padded = BATCHES["bert"][1:]
    found = [
        diagnose(model, batch, num_queries=None, jacobian_tokens=0).value("score_std_q50", 0, 0)
        for batch in (plain, {"input_ids": padded["input_ids"]})
    ]
    assert abs(found[0] - found[1]) > 1e-4


def call_with(mask, is_causal=False, kind_of=Attention):
    site = find_attention(nn.Sequential(kind_of(6, 2)))[0]
    num = mask.shape[-1]
    query = torch.randn(len(mask), 2, num, 3)
    return AttentionCall(site, 0, query, query, query, 1.0, attn_mask=mask, is_causal=is_causal)


def test_case_a06_the_sink_is_the_first_token_of_each_document(tmp_path):
    """A row of two documents, five and seven tokens, kept apart by the mask."""
    document = torch.tensor([0] * 5 + [1] * 7)
    mask = (document[:, None] == document) & torch.ones(12, 12).tril().bool()
    call = call_with(mask[None, None])
    assert TokenFinder().tokens_of(call) is None
    starts = document_starts(call, None)
    assert starts is not None
    assert starts[0].nonzero()[:, 0].tolist() == [0, 5]
    model = HOSTS["llama"].build()
    ids = torch.randint(3, VOCAB, (1, 12), generator=torch.Generator().manual_seed(2))
    restart = torch.cat([torch.arange(5), torch.arange(7)])[None]
    both = {"input_ids": ids, "position_ids": restart, "use_cache": False}
    packed = diagnose(model, both, num_queries=None)
    mass = []
    for part in (ids[:, :5], ids[:, 5:]):
        rows = part.shape[1] - 1  # the first row has one key and no choice
        found = diagnose(model, {"input_ids": part}, num_queries=None)
        mass.append((rows, found.value("sink_mass_mean", 0, 1)))
    mean = sum(rows * value for rows, value in mass) / sum(rows for rows, _ in mass)
    assert packed.value("sink_mass_mean", 0, 1) == pytest.approx(mean, rel=1e-4)
    with (
        torch.no_grad(),
        Monitor(
            model, every=1, jsonl=tmp_path / "m.jsonl", num_queries=None, auto_step=False
        ) as monitor,
    ):
        model(**both)
        monitor.end_step()
    name = find_attention(model)[0].name
    # The monitor counts the first row of each document as well; all its weight is on its sink.
    live = (sum(rows * value for rows, value in mass) + len(mass)) / 12
    assert monitor.latest[f"attn/{name}/1/sink_mass"] == pytest.approx(live, rel=1e-4)


def test_left_padding_moves_the_first_token():
    mask = torch.ones(9, 9).tril().bool()
    mask[:, :4] = False
    call = call_with(mask[None, None])
    tokens = TokenFinder().tokens_of(call)
    assert tokens is not None
    assert tokens[0].tolist() == [False] * 4 + [True] * 5
    starts = document_starts(call, tokens)
    assert starts is not None
    assert starts[0].nonzero()[:, 0].tolist() == [4]


def test_numbers_that_are_broken_in_the_padding_only_are_no_alarm():
    model = build("torch_encoder")
    batch = encoder_states(True)
    batch["src"][:, LENGTH:] = 1e4  # an outlier in the padding is none of the model's
    found = diagnose(model, batch, jacobian_tokens=0)
    plain = diagnose(model, encoder_states(False), jacobian_tokens=0)
    assert found.meta["outlier_channels"] == plain.meta["outlier_channels"] == []
    assert found.value("hidden_abs_max", 0) == pytest.approx(plain.value("hidden_abs_max", 0))
    assert math.isfinite(found.value("raw_score_max", 0, 0))

"""Trained weights: converted, checked, fine-tuned on real text, saved, loaded, taken back out."""

import copy
from pydoc_data.topics import topics

import pytest
import torch
from torch import nn

import levelhead as lh
from levelhead.sites.host import installed_in
from levelhead.store_checksum import checksum
from trained_models import (
    WHISPER_PROMPT,
    minilm,
    minilm_batch,
    minilm_tokenizer,
    needs_minilm,
    needs_whisper,
    silence,
    whisper,
    whisper_tokenizer,
    with_prompt,
)

pytestmark = pytest.mark.slow

VARIANTS = ("quest", "sink", "affine + gate", "sigma_reparam")
PRESERVED = ("affine + gate", "sigma_reparam")
STEPS, PAIRS, WORDS = 8, 8, 16
TEMPERATURE = 0.05


def passages() -> list[list[str]]:
    """The words of the language reference that ships with Python, one list a topic."""
    return [text.split() for _, text in sorted(topics.items()) if len(text.split()) > 4 * WORDS]


class Sentences:
    """MiniLM's own task: the two halves of a passage belong together."""

    def __init__(self):
        self.model, chosen = copy.deepcopy(minilm()), passages()[:PAIRS]
        halves = [" ".join(words[:WORDS]) for words in chosen]
        halves += [" ".join(words[WORDS : 2 * WORDS]) for words in chosen]
        encoded = minilm_tokenizer()(halves, padding=True, return_tensors="pt")
        self.batch = {name: encoded[name] for name in ("input_ids", "attention_mask")}

    def small_batch(self):
        return minilm_batch()

    def output(self, model, batch):
        return model(**batch).last_hidden_state

    def loss(self, model):
        states = self.output(model, self.batch)
        mask = self.batch["attention_mask"].unsqueeze(-1)
        means = nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
        similarity = means[:PAIRS] @ means[PAIRS:].mT / TEMPERATURE
        return nn.functional.cross_entropy(similarity, torch.arange(PAIRS))


class Decoder:
    """Whisper's decoder as a language model: it hears silence and reads on."""

    def __init__(self):
        self.model = copy.deepcopy(whisper())
        self.model.model.encoder.requires_grad_(False)
        texts = [" ".join(words[: 4 * WORDS]) for words in passages()[:4]]
        rows = [whisper_tokenizer().encode(" " + text).ids[:WORDS] for text in texts]
        self.tokens = with_prompt(torch.tensor(rows))

    def small_batch(self):
        return self.inputs(self.tokens[:2, :9])

    def inputs(self, tokens):
        from transformers.modeling_outputs import BaseModelOutput

        heard = BaseModelOutput(last_hidden_state=silence()[:, :50].expand(len(tokens), -1, -1))
        return {"encoder_outputs": heard, "decoder_input_ids": tokens}

    def output(self, model, batch):
        return model(**batch, use_cache=False).logits

    def loss(self, model):
        start = len(WHISPER_PROMPT)
        logits = self.output(model, self.inputs(self.tokens))[:, start - 1 : -1]
        return nn.functional.cross_entropy(logits.mT, self.tokens[:, start:])


TASKS = [
    pytest.param(Sentences, marks=needs_minilm, id="minilm"),
    pytest.param(Decoder, marks=needs_whisper, id="whisper"),
]


def fine_tune(task):
    """Some steps of AdamW; returns the loss, without dropout, before and after."""
    model = task.model
    optimiser = torch.optim.AdamW(lh.parameter_groups(model, 0.01), lr=3e-4)
    first = evaluated(task)
    model.train()
    for _ in range(STEPS):
        optimiser.zero_grad()
        task.loss(model).backward()
        optimiser.step()
    return first, evaluated(task)


@torch.no_grad()
def evaluated(task):
    task.model.eval()
    return task.loss(task.model).item()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("task", TASKS)
def test_a_trained_model_is_converted_checked_and_fine_tuned(task, variant, tmp_path):
    task = task()
    model, batch = task.model, task.small_batch()
    before = checksum(model.state_dict())
    with torch.no_grad():
        stock = task.output(model, batch)
    conversion = lh.convert(model, variant)
    with torch.no_grad():
        moved = (task.output(model, batch) - stock).norm() / stock.norm()
    assert (moved < 1e-5) == (variant in PRESERVED)
    assert {layer.function == "preserved" for layer in conversion.layers} == {variant in PRESERVED}
    verification = lh.verify(model, batch)
    assert not verification.failed

    restored = copy.deepcopy(model)
    lh.restore(restored)
    assert checksum(restored.state_dict()) == before
    with torch.no_grad():
        assert torch.equal(task.output(restored, batch), stock)

    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    first, last = fine_tune(task)
    assert last < 0.9 * first, (first, last)
    # Whisper's encoder is frozen, and what was added to it is not asked.
    ours = {
        n: p for n, p in model.named_parameters() if ".levelhead." in n and "encoder.l" not in n
    }
    assert all(not torch.equal(parameter, start[name]) for name, parameter in ours.items())

    lh.save(model, tmp_path)
    loaded = lh.load(tmp_path)
    assert checksum(loaded.state_dict()) == checksum(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(
            task.output(loaded, batch), task.output(model, batch), atol=1e-4, rtol=0
        )
    lh.restore(model)
    assert all(installed_in(module) is None for module in model.modules())
    assert set(model.state_dict()) == set(restored.state_dict())

"""Runs pair: same start, same batches, the same numbers every time; and training trains."""

import json
import math

import pytest
import torch
from torch import nn

from levelhead.harness.config import Cell
from levelhead.harness.seeding import named_seed, paired_init_
from levelhead.harness.tasks import make_task, resolve_task
from levelhead.harness.train import (
    concentration,
    make_optimizer,
    start_model,
    train_cell,
    training_step,
    warmup_cosine,
)
from levelhead.modes import one_thread
from levelhead.variants import VARIANTS

EVERY_VARIANT = ["soft_cap(cap=9.0)" if name == "soft_cap" else name for name in VARIANTS]
TINY = {
    "vit": {"embed_dim": 12, "num_heads": 2, "num_layers": 1},
    "gpt": {"embed_dim": 12, "num_heads": 2, "num_layers": 1, "context_length": 13},
}


def tiny_task(data="digits", **overrides):
    return make_task(resolve_task(data, TINY, **{"steps": 6, "batch_size": 8, **overrides}))


def cell(variant="softmax", seed=0, init="default", task="digits"):
    return Cell(task=task, variant=variant, init=init, seed=seed)


@pytest.mark.parametrize("data", ["digits", "topics"])
@pytest.mark.parametrize("variant", [*EVERY_VARIANT, "quest + affine + gate"])
def test_variants_share_the_start_of_what_they_share(variant, data):
    task = tiny_task(data)
    base = dict(start_model(task, cell(seed=3)).named_parameters())
    own = dict(start_model(task, cell(variant, seed=3)).named_parameters())
    assert set(base) <= set(own)
    for name, parameter in base.items():
        assert torch.equal(own[name], parameter), name


def test_another_seed_is_another_start_and_another_order():
    task = tiny_task()
    first, second = (start_model(task, cell(seed=seed)) for seed in (0, 1))
    for (name, one), two in zip(first.named_parameters(), second.parameters(), strict=True):
        if one.unique().numel() > 2:  # neither all zero nor all one
            assert not torch.equal(one, two), name
    batches = [next(task.batches(named_seed(seed, "batches")))[1] for seed in (0, 0, 1)]
    assert torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])


@pytest.mark.parametrize("data", ["digits", "topics"])
def test_batches_from_a_later_step_are_those_that_would_have_come(data):
    task = tiny_task(data, batch_size=601)  # two batches of digits in an epoch
    whole, later = task.batches(5), task.batches(5, start_step=3)
    for _ in range(3):
        next(whole)
    for _ in range(2):
        for one, two in zip(next(whole), next(later), strict=True):
            assert torch.equal(one, two)


def test_layers_of_equal_shape_start_differently():
    settings = resolve_task("digits", {"vit": {**TINY["vit"], "num_layers": 2}})
    blocks = start_model(make_task(settings), cell()).blocks
    assert not torch.equal(blocks[0].attn.q_proj.weight, blocks[1].attn.q_proj.weight)
    assert not torch.equal(blocks[0].attn.q_proj.weight, blocks[0].attn.k_proj.weight)


def test_starting_leaves_torchs_own_random_numbers_alone():
    model = tiny_task().build("gate")
    before = torch.get_rng_state()
    paired_init_(model, 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_epochs_show_every_image_once():
    task = tiny_task(batch_size=1297)
    batches = task.batches(0)
    for _ in range(2):
        images, _ = next(batches)
        assert torch.equal(images.sum(0), images.sum(0))
        assert torch.equal(
            images.flatten(1).sort(0).values, task.data.train_images.flatten(1).sort(0).values
        )


def test_targets_of_text_are_the_next_bytes():
    task = tiny_task("topics")
    tokens, following = next(task.batches(5))
    assert tokens.shape == following.shape == (8, 13)
    assert torch.equal(tokens[:, 1:], following[:, :-1])
    assert bytes(tokens[0].tolist()) in bytes(task.data.train_bytes.tolist())


@pytest.mark.parametrize("data", ["digits", "topics"])
@pytest.mark.parametrize("variant", ["softmax", "affine"])
def test_the_same_cell_gives_the_same_record(data, variant):
    records = [train_cell(tiny_task(data), cell(variant, task=data)) for _ in range(2)]
    for record in records:
        assert record.pop("seconds") > 0
    assert records[0] == records[1]
    assert records[0]["curve"]["step"] == [1, 2, 3, 4, 5, 6]
    assert [e["step"] for e in records[0]["evaluations"]] == [2, 4]


def test_the_default_vit_reads_digits():
    """At over 90 % the demo's comparison means something."""
    record = train_cell(make_task(resolve_task("digits")), cell())
    assert record["final"]["accuracy_pct"] > 90
    first, last = record["curve"]["train_loss_nats"][0], record["curve"]["train_loss_nats"][-1]
    assert first == pytest.approx(math.log(10), abs=0.15)
    assert last < 0.2


def test_an_untrained_language_model_knows_nothing_about_bytes():
    task = tiny_task("topics")
    final = task.evaluate(start_model(task, cell(task="topics")))
    assert final["bits_per_byte"] == pytest.approx(8, abs=0.1)
    assert final["bits_per_byte"] * math.log(2) == pytest.approx(final["loss_nats"])


def test_divergence_ends_the_training_and_is_recorded_not_hidden():
    record = train_cell(tiny_task(learning_rate=1e30, clip_norm=1e30), cell())
    assert record["final"] is None
    assert 1 < record["diverged_step"] <= 6
    assert all(math.isfinite(loss) for loss in record["curve"]["train_loss_nats"])


@pytest.mark.parametrize(("broken_call", "step"), [(1, 2), (3, 6)])
def test_an_evaluation_that_is_not_finite_is_a_divergence(broken_call, step, monkeypatch):
    """Evaluations of six steps: after 2 and 4, and the last one."""
    task = tiny_task()
    results = iter(range(1, 9))
    evaluate = task.evaluate

    def breaks(model):
        found = evaluate(model)
        return found | {"loss_nats": math.nan} if next(results) == broken_call else found

    monkeypatch.setattr(task, "evaluate", breaks)
    record = train_cell(task, cell())
    assert record["final"] is None
    assert record["diverged_step"] == step
    assert [each["step"] for each in record["evaluations"]] == [2, 4][: broken_call - 1]
    json.dumps(record, allow_nan=False)


def test_a_loss_that_is_not_finite_moves_nothing():
    task = tiny_task()
    model = start_model(task, cell())
    optimizer = make_optimizer(model, task.settings)
    before = [parameter.clone() for parameter in model.parameters()]
    images, labels = next(task.batches(0))
    assert math.isnan(training_step(task, model, optimizer, (images * math.nan, labels)))
    for old, parameter in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, parameter)


def test_only_matrices_decay():
    model = start_model(tiny_task(), cell("sink"))
    groups = make_optimizer(model, tiny_task(weight_decay=0.3).settings).param_groups
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    assert all(p.ndim >= 2 for p in groups[0]["params"])
    assert all(p.ndim < 2 for p in groups[1]["params"])
    num_params = sum(p.numel() for group in groups for p in group["params"])
    assert num_params == sum(p.numel() for p in model.parameters())


def test_the_learning_rate_rises_in_a_line_and_falls_to_zero():
    factors = [warmup_cosine(step, 50, 0.2) for step in range(50)]
    assert factors[:10] == pytest.approx([(k + 1) / 11 for k in range(10)])
    assert factors[10] == 1.0
    assert all(late < early for early, late in zip(factors[10:], factors[11:], strict=False))
    assert warmup_cosine(50, 50, 0.2) == pytest.approx(0)
    assert warmup_cosine(0, 50, 0.0) == 1.0


def test_an_init_changes_attention_and_nothing_else():
    task = tiny_task()
    base = dict(start_model(task, cell()).named_parameters())
    own = dict(start_model(task, cell(init="conditioned")).named_parameters())
    changed = {name for name in base if not torch.equal(base[name], own[name])}
    assert changed == {f"blocks.0.attn.{x}_proj.weight" for x in "qkv"}
    again = dict(start_model(task, cell(init="conditioned")).named_parameters())
    assert all(torch.equal(own[name], again[name]) for name in own)


def test_concentration_is_one_over_the_keys_for_flat_attention_and_one_for_one_hot():
    task = tiny_task()
    model = start_model(task, cell())
    images = next(task.batches(0))[0]
    flat, sharp = (start_model(task, cell()) for _ in range(2))
    flat.blocks[0].attn.q_proj.weight.data.zero_()
    assert concentration(flat, images) == pytest.approx(1 / 16, abs=1e-4)
    for which in "qk":
        getattr(sharp.blocks[0].attn, f"{which}_proj").weight.data.mul_(1e4)
    assert concentration(sharp, images) > 0.95
    assert model.training
    assert concentration(nn.Linear(8, 1), images) is None


def test_spectral_at_the_papers_strength_is_seen_to_be_saturated():
    task = tiny_task("topics")
    tokens = next(task.batches(0))[0]
    starts = {
        v: concentration(start_model(task, cell(v)), tokens) for v in ("softmax", "spectral")
    }
    assert starts["spectral"] > 0.8
    assert starts["softmax"] < 0.35


def test_threads_are_given_back():
    before = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_options_decided_by_the_data_and_unknown_ones_are_refused():
    with pytest.raises(ValueError, match="decided elsewhere, got num_classes"):
        resolve_task("digits", {"vit": {"num_classes": 3}})
    with pytest.raises(ValueError, match="embed_dimm"):
        resolve_task("digits", {"vit": {"embed_dimm": 3}})
    with pytest.raises(ValueError, match="num_heads must divide embed_dim"):
        resolve_task("topics", {"gpt": {"num_heads": 7}})
    with pytest.raises(ValueError, match="steps"):
        resolve_task("digits", steps=0)


def test_a_text_shorter_than_the_context_is_refused(tmp_path):
    (tmp_path / "short.txt").write_bytes(b"x" * 100)
    settings = resolve_task(str(tmp_path / "short.txt"), TINY)
    with pytest.raises(ValueError, match="test part of a text must be longer than context_length"):
        make_task(settings)


def test_settings_refuse_other_data(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"abc" * 500)
    settings = resolve_task(str(path), TINY)
    path.write_bytes(b"abd" * 500)
    with pytest.raises(ValueError, match="must be the data these settings were made for"):
        make_task(settings)

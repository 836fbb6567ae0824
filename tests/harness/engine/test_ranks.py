"""Several gloo processes, with and without accumulation and sharding: the numbers of one."""

import json
import shutil
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from levelhead.harness.engine import checkpoint as checkpoints
from levelhead.harness.engine import engine, training
from levelhead.harness.engine.average import local_part
from levelhead.harness.engine.engine import train
from levelhead.harness.engine.log import read_events
from levelhead.harness.engine.options import EngineOptions
from levelhead.harness.engine.prepare import block_names
from levelhead.harness.engine.split import split_batch
from tiny_training import TinyText, run_ranks, tiny_cell

PLAIN, STATEFUL = "quest + gate", "affine"
STEPS = 8


def task(micro_batch_size=None, **overrides):
    return TinyText(ema_decay=0.8, micro_batch_size=micro_batch_size, **overrides)


def train_once(folder, variant, micro_batch_size=None, **options):
    chosen = EngineOptions(save_every=3, log_every=1, **options)
    train(task(micro_batch_size), tiny_cell(variant), folder, chosen)


def losses(folder):
    events = list(read_events(folder / "metrics.jsonl"))
    found = {e["step"]: e["train_loss_nats"] for e in events if e["event"] == "step"}
    assert sorted(found) == list(range(1, STEPS + 1))
    return torch.tensor(list(found.values()), dtype=torch.float64)


def newest(folder):
    return checkpoints.read_checkpoint(checkpoints.checkpoints(folder / "checkpoints")[0])


def assert_same_numbers(folder, whole):
    torch.testing.assert_close(losses(folder), losses(whole), atol=2e-5, rtol=1e-5)
    for group in ("model", "average", "optimizer"):
        found, expected = newest(folder).tensors[group], newest(whole).tensors[group]
        assert set(found) == set(expected)
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name], value, atol=2e-4, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
            )
    records = [json.loads((f / "cells.jsonl").read_text()) for f in (folder, whole)]
    assert records[0]["num_params"] == records[1]["num_params"]
    assert records[0]["final"]["loss_nats"] == pytest.approx(
        records[1]["final"]["loss_nats"], abs=1e-4
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One process that takes each batch at once."""
    folder = tmp_path_factory.mktemp("one") / "run"
    train_once(folder, PLAIN)
    return folder


@pytest.fixture(scope="module")
def in_parts(tmp_path_factory):
    """One process that takes each batch in parts, with running means."""
    made = {}

    def of_size(micro):
        if micro not in made:
            made[micro] = tmp_path_factory.mktemp(f"parts-{micro}") / "run"
            train_once(made[micro], STATEFUL, micro_batch_size=micro)
        return made[micro]

    return of_size


def test_micro_batches_give_the_numbers_of_the_whole_batch(whole, tmp_path):
    train_once(tmp_path / "run", PLAIN, micro_batch_size=3)
    assert_same_numbers(tmp_path / "run", whole)


def test_two_processes_with_two_micro_batches_give_the_numbers_of_one(whole, tmp_path, free_port):
    run_ranks(2, free_port, train_once, tmp_path / "run", PLAIN, 3)
    assert_same_numbers(tmp_path / "run", whole)
    environment = (tmp_path / "run" / "config.yaml").read_text()
    assert "processes: 2" in environment


def watch(folder, num, micro, shard):
    """Train and write down what each rank holds of the running means and of the weights."""
    seen = []

    class Watched(engine.ModelInTraining):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            seen.append(self.module)

    engine.ModelInTraining = Watched
    train_once(folder, STATEFUL, micro, shard=shard)
    (module,) = seen
    means = {n: b for n, b in module.named_buffers() if "alpha_mean" in n or "num_steps" in n}
    local = sum(local_part(parameter).numel() for parameter in module.parameters())
    save_file(means | {"local": torch.tensor([local])}, folder.parent / f"{dist.get_rank()}.st")


RANKS = [(2, 6, False), (4, 3, False), (2, 3, False), (2, 3, True), (4, 3, True)]


@pytest.mark.slow
@pytest.mark.parametrize(("num", "micro", "shard"), RANKS)
def test_running_means_are_those_of_all_ranks_and_micro_batches(
    num, micro, shard, in_parts, tmp_path, free_port
):
    """Within a step each part has its own mean, so the same parts are the same training."""
    run_ranks(num, free_port, watch, tmp_path / "run", num, micro, shard)
    assert_same_numbers(tmp_path / "run", in_parts(micro))
    held = [load_file(tmp_path / f"{rank}.st") for rank in range(num)]
    num_params = json.loads((tmp_path / "run" / "cells.jsonl").read_text())["num_params"]
    local = [rank.pop("local").item() for rank in held]
    assert sum(local) == (num_params if shard else num * num_params)
    assert max(local) < num_params or not shard
    saved = newest(tmp_path / "run").tensors["model"]
    assert len(held[0]) == 8
    for rank in held:
        for name, mean in rank.items():
            assert torch.equal(mean, held[0][name]), name
            assert torch.equal(mean, saved[name]), name
    assert all(v.item() == STEPS for n, v in saved.items() if n.endswith("num_steps"))


def test_without_counting_micro_batches_as_one_step_the_means_would_differ(
    in_parts, tmp_path, monkeypatch
):
    """The comparison above can fail."""
    whole_steps = in_parts(3)
    monkeypatch.setattr(training, "one_step", lambda model: nullcontext())
    train_once(tmp_path / "run", STATEFUL, micro_batch_size=3)
    found, expected = (newest(f).tensors["model"] for f in (tmp_path / "run", whole_steps))
    counts = {v.item() for name, v in found.items() if name.endswith("num_steps")}
    assert counts == {4 * STEPS}
    means = [name for name in found if name.endswith("alpha_mean")]
    assert len(means) == 2
    assert all((found[name] - expected[name]).abs().max() > 0.1 for name in means)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [((2, True), (1, False)), ((2, True), (4, True)), ((4, True), (2, False)),
     ((1, False), (2, True))],
)  # fmt: skip
def test_a_training_goes_on_on_another_number_of_processes(
    before, after, in_parts, tmp_path, free_port
):
    """Weights, average and optimiser state are gathered whole and spread anew."""
    folder = tmp_path / "run"
    run_anywhere(*before, free_port, folder, False)
    shutil.rmtree(folder / "checkpoints" / "step-00000008")
    (folder / "cells.jsonl").unlink()
    run_anywhere(*after, free_port, folder, True)
    notes = [e["text"] for e in read_events(folder / "metrics.jsonl") if e["event"] == "note"]
    assert notes == [f"going on after step 6, from {folder}/checkpoints/step-00000006"]
    assert_same_numbers(folder, in_parts(3))


def run_anywhere(num, shard, port, folder, resume):
    if num == 1:
        train_once(folder, STATEFUL, 3, resume=resume)
    else:
        run_ranks(num, port, train_resumed, folder, shard, resume)


def train_resumed(folder, shard, resume):
    train_once(folder, STATEFUL, 3, shard=shard, resume=resume)


def test_a_batch_that_cannot_be_shared_is_refused_with_what_would_do():
    words = "must divide the global batch.*batch_size=12 on 5 processes; valid: 1, 2, 3, 4, 6, 12"
    with pytest.raises(ValueError, match=words):
        split_batch(12, None, 5, 0)
    with pytest.raises(ValueError, match=r"must hold batch_size=12 samples along axis 0, got \[7"):
        split_batch(12, 3, 1, 0).parts((torch.zeros(7, 2),))


@pytest.mark.parametrize("num", [1, 2, 3, 6])
@pytest.mark.parametrize("largest", [None, 1, 2, 5, 30, 31])
def test_every_sample_is_used_once_whatever_the_split(num, largest):
    seen = []
    for rank in range(num):
        split = split_batch(30, largest, num, rank)
        assert split.micro_size <= (largest or 30)
        for part in split.parts({"pair": (torch.arange(30), torch.arange(30)[:, None])}):
            assert part["pair"][0].shape == (split.micro_size,)
            assert torch.equal(part["pair"][0], part["pair"][1].flatten())
            seen += part["pair"][0].tolist()
    assert sorted(seen) == list(range(30))


def test_a_device_takes_as_much_as_it_may_at_a_time():
    assert split_batch(48, 10, 2, 0).micro_size == 8
    assert split_batch(48, 10, 2, 0).num_micro == 3
    assert split_batch(48, None, 2, 0).num_micro == 1


def test_sharding_needs_several_processes(tmp_path):
    with pytest.raises(ValueError, match="sharding needs several processes, got 1; valid: torchr"):
        train_once(tmp_path / "run", PLAIN, shard=True)


def test_blocks_are_found_by_the_attention_in_them():
    import timm

    assert block_names(task().build("quest")) == (type(task().build("quest").blocks[0]).__name__,)
    swin = timm.create_model(
        "swin_tiny_patch4_window7_224", depths=(1, 1, 1, 1), embed_dim=12, num_heads=(1, 2, 3, 4)
    )
    assert block_names(swin) == ("SwinTransformerBlock",)
    with pytest.raises(ValueError, match="needs blocks in an nn.ModuleList or nn.Sequential"):
        block_names(nn.TransformerEncoderLayer(12, 2))

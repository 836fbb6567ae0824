"""The engine is the comparison's training, made resumable; what it logs, watches and averages."""

import io
import json
import math
import re

import pytest
import torch
from accelerate.state import AcceleratorState
from rich.console import Console
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, SequentialLR

from levelhead.harness.config import Cell
from levelhead.harness.engine import loading, trackers
from levelhead.harness.engine.average import WeightAverage
from levelhead.harness.engine.engine import train
from levelhead.harness.engine.loading import load_trained
from levelhead.harness.engine.log import read_events
from levelhead.harness.engine.options import EngineOptions
from levelhead.harness.engine.progress import training_bar
from levelhead.harness.engine.schedule import make_schedule
from levelhead.harness.engine.training import make_optimizer
from levelhead.harness.tasks import make_task, resolve_task
from levelhead.harness.train import train_cell
from levelhead.modes import one_thread
from tiny_training import TinyText, tiny_cell


@pytest.fixture(autouse=True)
def _tiny_can_be_made_again(monkeypatch):
    """The tiny task stands in no recipe."""
    monkeypatch.setattr(loading, "task_of", lambda settings: TinyText())


def quick(folder, task=None, variant="softmax", **options):
    said = []
    record = train(
        task or TinyText(), tiny_cell(variant), folder, EngineOptions(**options),
        lambda kind, values: said.append((kind, dict(values))),
    )  # fmt: skip
    return record, said


def events(folder, kind):
    return [e for e in read_events(folder / "metrics.jsonl") if e["event"] == kind]


@pytest.mark.parametrize(("data", "variant"), [("digits", "affine"), ("topics", "quest + gate")])
def test_one_process_trains_exactly_as_a_comparison_does(data, variant, tmp_path):
    task = make_task(resolve_task(data, steps=7, batch_size=8))
    cell = Cell(task=data, variant=variant, init="conditioned", seed=2)
    with one_thread():
        expected, found = train_cell(task, cell), train(task, cell, tmp_path / "run")
    del expected["seconds"]
    assert {name: found[name] for name in expected} == expected
    assert len(found["evaluations"]) == 3
    assert (found["num_processes"], len(found["hash"])) == (1, 16)
    assert 0 <= found["data_wait_frac"] < 1


def test_everything_stands_beside_the_result(tmp_path):
    record, said = quick(tmp_path / "run", log_every=1)
    text = (tmp_path / "run" / "config.yaml").read_text()
    for word in ("learning_rate: 0.01", f"hash: {record['hash']}", "commit:", "torch:",
                 "accelerate:", "processes: 1", "devices:", "processor:"):  # fmt: skip
        assert word in text
    steps = events(tmp_path / "run", "step")
    assert [step["step"] for step in steps] == list(range(1, 9))
    assert all(math.isfinite(step["grad_norm"]) and step["samples_per_s"] > 0 for step in steps)
    assert all(0 <= step["data_wait_frac"] <= 1 for step in steps)
    kinds = [kind for kind, _ in said]
    assert kinds.count("step") == 8
    assert kinds.count("checkpoint") == 8
    last = json.loads((tmp_path / "run" / "cells.jsonl").read_text())
    assert last["final"] == record["final"]


def test_waiting_for_data_is_measured(tmp_path):
    class Slow(TinyText):
        def batches(self, seed, start_step=0):
            import time

            for batch in super().batches(seed, start_step):
                time.sleep(0.05)
                yield batch

    record, _ = quick(tmp_path / "run", Slow(steps=3))
    assert record["seconds"] * record["data_wait_frac"] > 3 * 0.05 * 0.99


def test_a_loss_that_is_not_finite_ends_the_training_and_moves_nothing(tmp_path):
    class Broken(TinyText):
        def loss(self, model, batch):
            loss = super().loss(model, batch)
            calls.append(loss)
            return loss * math.nan if len(calls) == 5 else loss

    calls = []
    record, said = quick(tmp_path / "run", Broken(), save_every=1, monitor_every=2)
    assert record["diverged_step"] == 4  # one of the five calls was an evaluation
    assert record["final"] is None
    assert ("note", {"text": "the loss was nan at step 4: the training ends here"}) in said
    assert load_trained(tmp_path / "run").step == 3
    alerts = list(read_events(tmp_path / "run" / "monitor.jsonl"))
    assert any(event.get("kind") == "nonfinite_loss" for event in alerts)


@pytest.mark.parametrize("step", [2, 8])
def test_an_evaluation_that_is_not_finite_ends_it_as_well(tmp_path, step):
    class Broken(TinyText):
        def evaluate(self, model):
            found = super().evaluate(model)
            done = len(calls) + 1
            calls.append(done)
            return found | {"loss_nats": math.nan} if done == (1 if step == 2 else 4) else found

    calls = []
    record, said = quick(tmp_path / "run", Broken())
    assert record["diverged_step"] == step
    assert record["final"] is None
    which = "the last" if step == 8 else "an"
    words = f"{which} evaluation gave loss_nats nan at step {step}: the training ends here"
    assert ("note", {"text": words}) in said
    assert [each["step"] for each in record["evaluations"]] == ([2, 4, 6] if step == 8 else [])


def test_bfloat16_computes_in_it_and_keeps_float32_weights(tmp_path):
    seen = set()

    class Watched(TinyText):
        def loss(self, model, batch):
            hidden = model.blocks[0].mlp[0]
            hook = hidden.register_forward_hook(lambda m, a, output: seen.add(output.dtype))
            try:
                return super().loss(model, batch)
            finally:
                hook.remove()

    quick(tmp_path / "run", Watched(mixed_precision="bf16"))
    assert seen == {torch.bfloat16}
    model = load_trained(tmp_path / "run").model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    quick(tmp_path / "again")  # another precision in the same process
    assert AcceleratorState().mixed_precision == "no"


def test_the_average_is_torchs_and_is_what_is_evaluated(tmp_path):
    model = TinyText().start("softmax", 0)
    average = WeightAverage(model, 0.75)
    theirs = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.75)
    )
    theirs.update_parameters(model)  # the first call copies
    for _ in range(3):
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter))
        average.update()
        theirs.update_parameters(model)
    own = [parameter.clone() for parameter in model.parameters()]
    with average.in_place():
        for parameter, other in zip(model.parameters(), theirs.module.parameters(), strict=True):
            assert torch.equal(parameter, other)
    assert all(torch.equal(a, b) for a, b in zip(own, model.parameters(), strict=True))
    plain, _ = quick(tmp_path / "plain")
    frozen, _ = quick(tmp_path / "frozen", TinyText(ema_decay=1.0))
    untrained = TinyText().evaluate(TinyText().start("softmax", 0))
    assert frozen["final"]["loss_nats"] == pytest.approx(untrained["loss_nats"], abs=1e-6)
    assert abs(plain["final"]["loss_nats"] - untrained["loss_nats"]) > 0.01


def test_groups_learn_at_their_own_multiple_of_the_schedule():
    class Layered(TinyText):
        def parameter_groups(self, model):
            first, *rest = super().parameter_groups(model)
            return [first | {"lr_scale": 0.25}, *rest]

    task = Layered(steps=10, warmup_steps=0)
    optimizer = make_optimizer(task, task.build("softmax"))
    schedule = make_schedule(optimizer, task.settings)
    for _ in range(4):
        optimizer.step()
        schedule.step()
    slow, fast = (group["lr"] for group in optimizer.param_groups)
    assert slow == pytest.approx(0.25 * fast)
    assert fast == pytest.approx(0.01 * 0.5 * (1 + math.cos(0.4 * math.pi)))


WARM, STEPS, DECAY = 3, 20, 5


def rates(make, **settings):
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.01)
    schedule = make(optimizer)
    found = []
    for _ in range(STEPS):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def torchs(optimizer, *after, at):
    warm = LinearLR(optimizer, 1 / (WARM + 1), total_iters=WARM)
    return SequentialLR(optimizer, [warm, *after], milestones=at)


ORACLES = {
    "cosine": lambda o: torchs(o, CosineAnnealingLR(o, STEPS - WARM, 0.001), at=[WARM]),
    "warmup_stable_decay": lambda o: torchs(
        o, ConstantLR(o, 1.0), LinearLR(o, 1.0, 0.1, DECAY), at=[WARM, STEPS - DECAY]
    ),
    "constant": lambda o: torchs(o, ConstantLR(o, 1.0), at=[WARM]),
}


@pytest.mark.parametrize("name", ORACLES)
def test_schedules_are_those_of_torchs_own_parts(name):
    decay = DECAY if name == "warmup_stable_decay" else 0
    settings = TinyText(
        schedule=name, steps=STEPS, warmup_steps=WARM, decay_steps=decay, min_learning_rate=0.001
    ).settings
    found = rates(lambda optimizer: make_schedule(optimizer, settings))
    assert found == pytest.approx(rates(ORACLES[name]), rel=1e-9)
    assert found[0] == pytest.approx(0.01 / (WARM + 1))
    assert max(found) == pytest.approx(0.01)


def test_a_schedule_that_does_not_fit_is_refused():
    settings = TinyText(steps=5, warmup_steps=4, decay_steps=2).settings
    with pytest.raises(ValueError, match="must fit into steps, got 4 and 2 of 5"):
        make_schedule(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), settings)


def test_the_monitor_writes_into_the_run(tmp_path):
    record, _ = quick(tmp_path / "run", variant="affine", monitor_every=4)
    found = events(tmp_path / "run", "scalars")
    assert [event["step"] for event in found] == [1, 5]
    assert any(name.startswith("attn/") for name in found[0]["values"])
    lines = list(read_events(tmp_path / "run" / "monitor.jsonl"))
    assert [line["step"] for line in lines if line["event"] == "scalars"] == [0, 4]
    assert record["diverged_step"] is None


def test_tensorboard_gets_what_the_log_gets(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    quick(tmp_path / "run", trackers=("tensorboard",), log_every=2)
    (folder,) = {path.parent for path in (tmp_path / "run").rglob("events.out*") if path.is_file()
                 and "hparams" not in path.name and path.parent.name == "levelhead"}  # fmt: skip
    board = EventAccumulator(str(folder)).Reload()
    shown = {event.step: event.value for event in board.Scalars("train/train_loss_nats")}
    logged = {e["step"]: e["train_loss_nats"] for e in events(tmp_path / "run", "step")}
    assert shown == pytest.approx(logged)
    assert board.Scalars("test/loss_nats")


@pytest.mark.slow
def test_weights_and_biases_gets_what_the_log_gets(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    shown = []
    log = wandb.sdk.wandb_run.Run.log
    monkeypatch.setattr(
        wandb.sdk.wandb_run.Run, "log",
        lambda self, data, *given, **named: (shown.append((named, dict(data))),
                                             log(self, data, *given, **named)),
    )  # fmt: skip
    quick(tmp_path / "run", trackers=("wandb",), log_every=2)
    assert list(tmp_path.rglob("offline-run-*/*.wandb"))
    assert_as_logged(tmp_path / "run", shown)


@pytest.mark.slow
def test_trackio_gets_what_the_log_gets(tmp_path, monkeypatch):
    trackio = pytest.importorskip("trackio", reason="needs trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    shown = []
    log = trackio.Run.log
    monkeypatch.setattr(
        trackio.Run, "log",
        lambda self, metrics, *given, **named: (shown.append((named, dict(metrics))),
                                                log(self, metrics, *given, **named)),
    )  # fmt: skip
    quick(tmp_path / "run", trackers=("trackio",), log_every=2)
    assert_as_logged(tmp_path / "run", shown)


def assert_as_logged(folder, shown):
    """A tracker was told each logged step's numbers, at that step."""
    told = {
        named["step"]: data["train/train_loss_nats"]
        for named, data in shown
        if "train/train_loss_nats" in data
    }
    assert told == {e["step"]: e["train_loss_nats"] for e in events(folder, "step")}
    assert any("test/loss_nats" in data for _, data in shown)


def test_the_bar_shows_loss_speed_the_datas_share_and_the_time_left():
    console = Console(file=io.StringIO(), force_terminal=True, width=160)
    with training_bar(console, 40) as on_event:
        on_event("note", {"text": "going on after step 3"})
        on_event("step", {"step": 7, "loss": 1.5, "samples_per_s": 1234.4, "data_wait_frac": 0.25})
        on_event("step", {"step": 8, "loss": 0.125})
    printed = console.file.getvalue()
    assert "going on after step 3" in printed
    assert "8/40" in printed
    assert "loss 0.1250  1,234 samples/s  data 25.0 %" in printed
    assert re.search(r"\d:\d\d:\d\d.*(\d|-):[\d-]+:[\d-]+", printed)  # passed, and left


def test_a_tracker_that_is_missing_is_told_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    for name in ("wandb", "trackio", "tensorboard"):
        with pytest.raises(ImportError, match=f"{name} is not installed: pip install {name}"):
            quick(tmp_path / "run", trackers=(name,))
    with pytest.raises(
        ValueError, match="unknown tracker 'mlfow'; known: tensorboard, wandb, tra"
    ):
        quick(tmp_path / "run", trackers=("mlfow",))
    assert not (tmp_path / "run").exists()


def test_options_out_of_range_are_refused():
    with pytest.raises(ValueError, match="save_every must be at least 1, got 0"):
        EngineOptions(save_every=0)


def test_a_trained_model_comes_back_with_its_curve(tmp_path):
    record, _ = quick(tmp_path / "run", variant="affine", log_every=1)
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-00000008"):
        found = load_trained(folder)
        assert TinyText().evaluate(found.model) == record["final"]
        assert [step for step, _ in found.curves["train_loss_nats"]] == list(range(1, 9))
        assert found.step == 8

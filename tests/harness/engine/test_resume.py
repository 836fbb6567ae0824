"""Killed anywhere and resumed: the same curve to the last digit. A bad checkpoint is survived."""

import errno
import json
import os
import random
import re
import resource
import shutil
import signal
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from levelhead.harness.engine import checkpoint as checkpoints
from levelhead.harness.engine import training as stepping
from levelhead.harness.engine.engine import train
from levelhead.harness.engine.log import read_events
from levelhead.harness.engine.options import EngineOptions
from levelhead.harness.engine.random_state import random_state, set_random_state
from levelhead.harness.engine.stop import Stopped, listening
from tiny_training import SECONDS, TinyText, at_call, hang, kill_at, start_process, tiny_cell

CELL = tiny_cell("sigma_reparam + quest + affine + gate")
SAVE_EVERY = 3
TIMES = {"samples_per_s", "data_wait_frac"}


def task():
    """Everything that has a state: dropout, an average, two micro-batches, running means."""
    return TinyText(dropout_p=0.2, ema_decay=0.8, micro_batch_size=6)


def run(folder, resume=False, **options):
    notes = []
    chosen = EngineOptions(save_every=SAVE_EVERY, log_every=1, resume=resume, **options)
    train(task(), CELL, folder, chosen, lambda kind, v: kind == "note" and notes.append(v["text"]))
    return notes


def curve(folder):
    """All that was logged, but for times and notes."""
    return [
        {name: value for name, value in event.items() if name not in TIMES}
        for event in read_events(folder / "metrics.jsonl")
        if event["event"] != "note"
    ]


def final_tensors(folder):
    newest = checkpoints.checkpoints(folder / "checkpoints")[0]
    return checkpoints.read_checkpoint(newest).tensors


def assert_same_training(folder, whole):
    assert curve(folder) == curve(whole)
    for group, tensors in final_tensors(whole).items():
        found = final_tensors(folder)[group]
        assert set(found) == set(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(found[name], tensor), f"{group} {name}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A training that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert run(folder) == []
    return folder


def in_loss(marker):
    """The first micro-batch of step 5 is done, the second about to begin."""
    TinyText.loss = at_call(10 + 2, partial(hang, marker), TinyText.loss)


def between_backward_and_update(marker):
    model = stepping.ModelInTraining
    model._update = at_call(5, partial(hang, marker), model._update)


def between_update_and_schedule(marker):
    average = stepping.WeightAverage
    average.update = at_call(5, partial(hang, marker), average.update)


def on_sync(place, number, marker):
    """The second checkpoint is being written; ``place`` says how far it has got."""
    sync, seen = checkpoints.sync, []

    def watched(path):
        seen.append(path.name)
        if path.name == place and seen.count(place) == number:
            hang(marker)
        sync(path)

    checkpoints.sync = watched


def half_a_line(marker):
    from levelhead.harness.engine import engine

    def torn(writer, event):
        if event.get("step") == 5:
            writer._file.write('{"event": "step", "st')
            writer._file.flush()
            hang(marker)
        write(writer, event)

    write, engine.JsonlWriter.write = engine.JsonlWriter.write, torn


SPOTS = {
    "in the loss": in_loss,
    "before the update": between_backward_and_update,
    "after the update": between_update_and_schedule,
    "writing weights": partial(on_sync, "model.safetensors", 2),
    "writing numbers": partial(on_sync, "state.json", 2),
    "before the rename": partial(on_sync, ".step-00000006.tmp", 1),
    "after the rename": partial(on_sync, "checkpoints", 2),
    "writing the log": half_a_line,
}
FAST = ("in the loss", "writing numbers", "after the rename")


def run_until(spot, marker, folder):
    SPOTS[spot](marker)
    run(folder)


@pytest.mark.parametrize(
    "spot", [s if s in FAST else pytest.param(s, marks=pytest.mark.slow) for s in SPOTS]
)
def test_a_training_that_was_killed_goes_on_to_the_last_digit(spot, whole, tmp_path):
    marker, folder = tmp_path / "here", tmp_path / "run"
    kill_at(marker, run_until, spot, marker, folder)
    reached = 6 if spot == "after the rename" else 3
    notes = run(folder, resume=True)
    assert notes == [
        f"going on after step {reached}, from {folder}/checkpoints/step-{reached:08d}"
    ]
    assert_same_training(folder, whole)
    left = {path.name for path in (folder / "checkpoints").iterdir()}
    assert left == {"step-00000006", "step-00000008"}


@pytest.fixture
def copied(whole, tmp_path):
    """A training that ended before its result was written, to be damaged."""
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "cells.jsonl").unlink()
    return tmp_path / "run"


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-7])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def another_value(path):
    tensors = load_file(path)
    next(iter(tensors.values())).add_(1)
    save_file(tensors, path)


DAMAGES = {
    "cut": (cut_short, "model.safetensors", r"model.safetensors holds \d+ of \d+ bytes"),
    "bit": (flip_a_bit, "optimizer.safetensors", "has other bytes than were written"),
    "value": (another_value, "average.safetensors", "average.safetensors has other bytes"),
    "gone": (lambda path: path.unlink(), "random.safetensors", "no random.safetensors"),
    "numbers": (cut_short, "state.json", r"state.json holds \d+ of \d+ bytes"),
    "manifest": (cut_short, "manifest.json", "no readable manifest.json"),
    "unsigned": (lambda path: path.unlink(), "manifest.json", "no readable manifest.json"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_is_used(kind, copied, whole):
    damage, name, words = DAMAGES[kind]
    place = copied / "checkpoints"
    damage(place / "step-00000008" / name)
    notes = run(copied, resume=True)
    assert notes[0].startswith(f"{place}/step-00000008 is damaged (")
    assert re.search(words, notes[0])
    assert notes[0].endswith("renamed to damaged-step-00000008; the checkpoint before it is used")
    assert notes[1] == f"going on after step 6, from {place}/step-00000006"
    assert_same_training(copied, whole)
    left = {path.name for path in place.iterdir()}
    assert left == {"step-00000006", "step-00000008", "damaged-step-00000008"}


def test_without_a_whole_checkpoint_a_training_is_not_begun_anew_in_silence(copied):
    for path in (copied / "checkpoints").glob("*/state.json"):
        cut_short(path)
    for _ in range(2):  # set aside by the first, they still count for the second
        with pytest.raises(ValueError, match="must hold a whole checkpoint, got 2 damaged ones"):
            run(copied, resume=True)


def test_a_checkpoint_of_a_newer_format_is_refused_not_set_aside(copied):
    path = copied / "checkpoints" / "step-00000008" / "manifest.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(ValueError, match="must be of format 1, got format=2"):
        run(copied, resume=True)


def no_space(path):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def test_a_full_disk_costs_the_checkpoint_and_not_the_training(whole, tmp_path, monkeypatch):
    written = at_call(2, lambda: no_space("optimizer.safetensors"), checkpoints._save_tensors)
    monkeypatch.setattr(checkpoints, "_save_tensors", written)
    notes = run(tmp_path / "run")
    assert len(notes) == 1
    assert notes[0].startswith("no checkpoint of step 3: [Errno 28] No space left on device")
    assert notes[0].endswith("; the one before it is kept")
    assert_same_training(tmp_path / "run", whole)
    left = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert left == {"step-00000006", "step-00000008"}


LARGEST_FILE = 20_000  # bytes: less than the weights, more than the log and the settings


def train_with_little_space(folder):
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
    run(folder)


@pytest.mark.slow
def test_what_the_system_refuses_to_write_is_survived_too(whole, tmp_path):
    """A limit on the size of files: the same path as a full disk, with the system's own error."""
    process = start_process(train_with_little_space, tmp_path / "run")
    process.join(SECONDS)
    assert process.exitcode == 0
    assert curve(tmp_path / "run") == curve(whole)
    notes = [e["text"] for e in read_events(tmp_path / "run" / "metrics.jsonl") if "text" in e]
    assert [note.partition(":")[0] for note in notes] == [
        f"no checkpoint of step {step}" for step in (3, 6, 8)
    ]
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_stopping_saves_and_going_on_changes_nothing(whole, tmp_path):
    folder = tmp_path / "run"

    def ask(kind, values):
        if kind == "step" and values["step"] == 4:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Stopped) as stopped:
        train(task(), CELL, folder, EngineOptions(save_every=SAVE_EVERY, log_every=1), ask)
    assert (stopped.value.step, stopped.value.is_saved) == (5, True)
    assert signal.getsignal(signal.SIGINT) is before
    assert run(folder, resume=True) == [
        f"going on after step 5, from {folder}/checkpoints/step-00000005"
    ]
    assert_same_training(folder, whole)


def test_a_second_wish_to_stop_is_heard_at_once():
    with listening() as request:
        os.kill(os.getpid(), signal.SIGINT)
        assert request.is_made
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_finished_training_is_not_done_again(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    assert run(tmp_path / "run", resume=True) == [
        "this training is finished; nothing was left to do"
    ]
    assert (tmp_path / "run" / "cells.jsonl").read_text() == (whole / "cells.jsonl").read_text()


def test_a_folder_is_never_mixed_up(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    with pytest.raises(ValueError, match="must be empty for a new training.*--resume, to go on"):
        run(tmp_path / "run")
    other = TinyText(dropout_p=0.2, ema_decay=0.8, micro_batch_size=6, learning_rate=0.02)
    with pytest.raises(
        ValueError, match=r"holds another training: learning_rate was 0.01, not 0.0"
    ):
        train(other, CELL, tmp_path / "run", EngineOptions(resume=True))
    with pytest.raises(ValueError, match="cell.seed was 0, not 1"):
        train(task(), tiny_cell(CELL.variant, 1), tmp_path / "run", EngineOptions(resume=True))
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "letter.txt").write_text("Dear")
    with pytest.raises(ValueError, match="must hold the config.yaml of a training, got none"):
        run(tmp_path / "else", resume=True)


def test_resuming_before_the_first_checkpoint_starts_over_and_says_so(whole, tmp_path):
    folder = tmp_path / "run"
    kill_at(tmp_path / "here", run_until_step_2, tmp_path / "here", folder)
    assert run(folder, resume=True) == [
        "no checkpoint was written yet; starting from the first step"
    ]
    assert_same_training(folder, whole)


def run_until_step_2(marker, folder):
    TinyText.loss = at_call(4, partial(hang, marker), TinyText.loss)
    run(folder)


def test_random_numbers_outside_a_training_go_on_as_if_it_had_not_been(tmp_path):
    def drawn():
        return random.random(), np.random.rand(), torch.rand(1).item()

    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    expected = drawn()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    run(tmp_path / "run")
    assert drawn() == expected


def test_the_state_of_every_generator_survives_json():
    torch.randn(3), random.gauss(0, 1), np.random.randn()
    state = random_state()
    plain = json.loads(json.dumps({k: v for k, v in state.items() if k != "torch"}))
    expected = random.gauss(0, 1), random.random(), np.random.randn(5).tolist(), torch.randn(5)
    set_random_state(plain | {"torch": state["torch"]})
    found = random.gauss(0, 1), random.random(), np.random.randn(5).tolist(), torch.randn(5)
    assert found[:3] == expected[:3]
    assert torch.equal(found[3], expected[3])


def test_tied_weights_are_saved_under_both_names(tmp_path):
    tensor = torch.randn(3, 2)
    place = checkpoints.write_checkpoint(tmp_path, 1, {"model": {"a": tensor, "b": tensor}}, {})
    found = checkpoints.read_checkpoint(place).tensors["model"]
    assert torch.equal(found["a"], tensor)
    assert torch.equal(found["b"], tensor)

"""What a worker does with one cell: the same numbers, and an honest clock."""

import time

import pytest
import torch

from levelhead.harness import workers
from levelhead.harness.config import Cell
from levelhead.harness.recipe import load_recipe
from levelhead.harness.recipe_tasks import make_recipe_task
from levelhead.harness.tasks import ImageClassification, resolve_task
from levelhead.harness.train import train_cell
from levelhead.harness.workers import loaded_task, train_job

TINY = {"vit": {"embed_dim": 12, "num_heads": 2, "num_layers": 1}}
CELL = Cell(task="digits", variant="quest", init="default", seed=3)


def settings(**more):
    return resolve_task("digits", TINY, steps=4, batch_size=8, **more)


def test_a_worker_trains_what_train_cell_trains(tmp_path):
    steps = []
    record = train_job((settings(), CELL, tmp_path / "none"), lambda: steps.append(1))
    plain = train_cell(loaded_task(settings()), CELL)
    for key in set(plain) - {"seconds"}:
        assert record[key] == plain[key]
    assert len(steps) == 4
    assert not (tmp_path / "none").exists()


def test_the_clock_tells_training_from_evaluation_and_building(tmp_path, monkeypatch):
    """On a clock that stands still but for known seconds in each part."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def takes(name, seconds):
        real = getattr(ImageClassification, name)

        def call(self, *args):
            now[0] += seconds
            return real(self, *args)

        monkeypatch.setattr(ImageClassification, name, call)

    for name, seconds in (("start", 2.0), ("loss", 10.0), ("evaluate", 0.5)):
        takes(name, seconds)
    clock = train_job((settings(), CELL, tmp_path), lambda: None)["clock_s"]
    # Four steps, three evaluations between them and one at the end.
    expected = {"data": 0.0, "training": 40.0, "evaluation": 2.0, "building": 2.0}
    assert clock == pytest.approx(expected)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
)
def test_torchs_lack_of_memory_is_a_memory_error(tmp_path, monkeypatch, error):
    def hungry(*args):
        raise error

    monkeypatch.setattr(workers, "train_cell", hungry)
    with pytest.raises(MemoryError, match="memory"):
        train_job((settings(), CELL, tmp_path), lambda: None)


def test_any_other_complaint_of_torch_stays_what_it_is(tmp_path, monkeypatch):
    def wrong(*args):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(workers, "train_cell", wrong)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        train_job((settings(), CELL, tmp_path), lambda: None)


@pytest.mark.slow
def test_a_real_allocation_that_cannot_be_served_is_named_as_such():
    with pytest.raises(RuntimeError, match=workers.NO_MEMORY):
        torch.empty(2**60, dtype=torch.uint8)


def test_a_recipes_training_that_died_goes_on_from_its_checkpoint(tmp_path):
    changes = ["training.steps=20", "training.warmup_steps=2", "training.batch_size=4",
               "evaluation.max_samples=8", "evaluation.theta_rows=0"]  # fmt: skip
    task = make_recipe_task(load_recipe("theta_pre_ln", "small", changes))
    cell = Cell(task=task.settings.name, variant="affine", init="default", seed=2)
    whole = train_job((task.settings, cell, tmp_path / "whole"), lambda: None)
    steps = []

    def die():
        steps.append(1)
        if len(steps) == 7:
            raise ConnectionError("the process is gone")

    job = (task.settings, cell, tmp_path / "died")
    with pytest.raises(ConnectionError):
        train_job(job, die)
    again = []
    record = train_job(job, lambda: again.append(1))
    assert len(again) == 20 - 6  # every second step is saved
    for key in ("final", "curve", "hash", "num_params"):
        assert record[key] == whole[key]
    assert not (tmp_path / "died" / "checkpoints").exists()

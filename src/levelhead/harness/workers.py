"""Many trainings at once: processes with one thread each, stopped cleanly and never left behind.

On models as small as the demo's, two processes with one thread beat one process with two. What
trains is behind ``train_all``: another engine, on many machines, need only yield the same results.
"""

import copy
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from pydantic import TypeAdapter

from levelhead.harness.config import (
    Cell,
    TaskSettings,
    Training,
    TrainingSettings,
    default_workers,
)
from levelhead.harness.processes import (
    Crew,
    OnSteps,
    Report,
    Result,
    run_here,
)
from levelhead.harness.selection import held_out
from levelhead.harness.step_times import step_times
from levelhead.harness.tasks import Task, make_task
from levelhead.harness.train import train_cell
from levelhead.modes import one_thread

NO_MEMORY = "can't allocate memory"  # what torch's CPU allocator says


@dataclass(frozen=True)
class StepTiming:
    """The job of timing all variants' steps, in turn, beside the last trainings.

    Attributes:
        settings: Of the task.
        variants: The baseline among them.
    """

    settings: Training
    variants: tuple[str, ...]


Job = tuple[Training, Cell, Path] | StepTiming
"""What is trained, which cell of it, and a folder for what a recipe's training leaves."""


def new_crew(workers: int | None = None, is_at_start: bool = False) -> Crew:
    """Return the processes of a comparison, none of them started.

    Args:
        workers: As many of them; None: one for each core.
        is_at_start: This process has imported and done nothing else: it is copied at once, so that
            the copies are ready when there is work, and nothing is imported twice.

    Returns:
        A context that ends the processes.
    """
    crew = Crew(do_job)
    count = default_workers() if workers is None else workers
    if is_at_start and count > 1:
        crew.copy_program(count)
    return crew


def train_all(
    jobs: Sequence[Job], workers: int, on_steps: OnSteps, retries: int, crew: Crew
) -> Iterator[Result]:
    """Train cells, at most ``workers`` at a time, and yield each result as it is there.

    Args:
        jobs: Settings, cell and folder of each training, and what is to be timed.
        workers: Number of processes; 1 trains in this one, whose death nothing survives.
        on_steps: Told how many more steps have been done, a few times a second.
        retries: How often a training whose process died is begun again.
        crew: The processes.

    Yields:
        One result a job, in the order of ending: its value is the record, or None where every
        attempt died.
    """
    if workers == 1:
        yield from run_here(jobs, do_job, on_steps, retries)
    else:
        yield from crew.do(jobs, workers, on_steps, retries)


def do_job(job: Job, report: Report) -> dict[str, Any]:
    """Do what a job says.

    Args:
        job: A training, or steps to be timed.
        report: Called after each step of a training.

    Returns:
        The training's record, or ``times`` as ``step_times`` gives them with ``clock_s``.
    """
    if not isinstance(job, StepTiming):
        return train_job(job, report)
    begun = time.perf_counter()
    times = step_times(loaded_task(job.settings), job.variants)
    return {"times": times, "clock_s": {"step_timing": time.perf_counter() - begun}}


def train_job(job: tuple[Training, Cell, Path], report: Report) -> dict[str, Any]:
    """Train one cell on one thread.

    Args:
        job: Settings, cell and folder.
        report: Called after each step.

    Returns:
        The cell's record, with ``clock_s``: the seconds of ``data`` (loading it), ``training``,
        ``evaluation`` and ``building`` (all else: the model, its start, a look at its attention).

    Raises:
        MemoryError: There is not enough of it.
        RuntimeError: Anything else that torch complains of.
    """
    settings, cell, folder = job
    begun = time.perf_counter()
    task = Clocked(task_of_cell(loaded_task(settings), cell))
    loaded = time.perf_counter()

    def step_done() -> None:
        task.step_done()
        report()

    try:
        with one_thread():
            record = _trained(cast(Task, task), cell, folder, step_done)
    except RuntimeError as error:
        if not (isinstance(error, torch.OutOfMemoryError) or NO_MEMORY in str(error)):
            raise
        raise MemoryError(str(error)) from error
    clock = {"data": loaded - begun, **task.clock_s(time.perf_counter() - loaded)}
    return record | {"clock_s": {name: round(seconds, 3) for name, seconds in clock.items()}}


def _trained(task: Task, cell: Cell, folder: Path, step_done: Report) -> dict[str, Any]:
    """Train as the comparison's own tasks do, or as the engine does a recipe's, resumed.

    Raises:
        KeyboardInterrupt: Someone asked the engine to stop.
    """
    if not isinstance(task.settings, TrainingSettings):
        return train_cell(task, cell, step_done)
    # Imported here: the embedded comparison needs no accelerate.
    from levelhead.harness.engine.checkpoint import CHECKPOINTS
    from levelhead.harness.engine.engine import train
    from levelhead.harness.engine.options import EngineOptions
    from levelhead.harness.engine.stop import Stopped

    def on_event(kind: str, values: Mapping[str, Any]) -> None:
        if kind == "step":
            step_done()

    try:
        record = train(task, cell, folder, EngineOptions(resume=folder.exists()), on_event)
    except Stopped as stopped:  # it has saved what it had done, for the next attempt
        raise KeyboardInterrupt from stopped
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)  # the record and its log stay
    return record


class Clocked:
    """A task that notes when its training began and how long its evaluations took.

    Args:
        task: Does the work.
    """

    def __init__(self, task: Task):
        self._task = task
        self._evaluation_s = 0.0
        self._asked = self._begun = self._last_step = time.perf_counter()
        self._evaluation_s_at_last_step = 0.0
        self._has_stepped = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def batches(self, seed: int, start_step: int = 0) -> Iterator[Any]:
        """Give batches; the last call before the first step is the training's, and begins it.

        Args:
            seed: Of their order.
            start_step: The first step wanted.

        Returns:
            What the task returns.
        """
        self._asked = time.perf_counter()
        return self._task.batches(seed, start_step)

    def evaluate(self, model: torch.nn.Module) -> dict[str, float]:
        """Evaluate, with a look at the clock before and after.

        Args:
            model: To be measured.

        Returns:
            What the task returns.
        """
        begun = time.perf_counter()
        measured = self._task.evaluate(model)
        self._evaluation_s += time.perf_counter() - begun
        return measured

    def step_done(self) -> None:
        """Note that a training step has ended."""
        if not self._has_stepped:
            self._begun, self._has_stepped = self._asked, True
        self._last_step = time.perf_counter()
        self._evaluation_s_at_last_step = self._evaluation_s

    def clock_s(self, total_s: float) -> dict[str, float]:
        """Split a training's seconds.

        Args:
            total_s: From before the model was built to after the last evaluation.

        Returns:
            Seconds of ``training``, ``evaluation`` and ``building``; their sum is the total.
        """
        training = self._last_step - self._begun - self._evaluation_s_at_last_step
        building = total_s - training - self._evaluation_s
        return {"training": training, "evaluation": self._evaluation_s, "building": building}


def task_of_cell(task: Task, cell: Cell) -> Task:
    """Give a task the learning rate and the part of the data that a cell is about.

    Args:
        task: With the learning rate of its own, measured on the test data.
        cell: May ask for another rate, and for the validation part.

    Returns:
        The task itself where the cell asks for nothing else.
    """
    if cell.part == "validation":
        task = held_out(task)
    if cell.learning_rate is not None:
        task = copy.copy(task)
        changed = {"learning_rate": cell.learning_rate}
        task.settings = task.settings.model_copy(update=changed)  # pyright: ignore
    return task


@lru_cache(maxsize=4)
def _loaded(settings_json: str) -> Task:
    settings = TypeAdapter(Training).validate_json(settings_json)
    if isinstance(settings, TaskSettings):
        return make_task(settings)
    from levelhead.harness.recipe_tasks import task_of  # the embedded comparison needs no recipe

    return task_of(settings)


def loaded_task(settings: Training) -> Task:
    """Make a task, or take the one that this process has made of the same settings before.

    Args:
        settings: What to train.

    Returns:
        The task, its data loaded.
    """
    return _loaded(settings.model_dump_json())

"""Many trainings at once: processes with one thread each, stopped cleanly and never left behind.

On models as small as the demo's, two processes with one thread beat one process with two. What
trains is behind ``train_all``: another engine need only yield the same records.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import lru_cache
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from typing import Any

from levelhead.harness.config import Cell, TaskSettings, Training
from levelhead.harness.tasks import Task, make_task
from levelhead.harness.train import train_cell

POLL_SECONDS = 0.2

Job = tuple[Training, Cell]
OnSteps = Callable[[int], None]


class Stopped(Exception):
    """A worker was told to stop in the middle of a training."""


def train_all(jobs: Sequence[Job], workers: int, on_steps: OnSteps) -> Iterator[dict[str, Any]]:
    """Train cells, at most ``workers`` at a time, and yield each record as it is done.

    Args:
        jobs: Settings and cell of each training.
        workers: Number of processes; 1 trains in this one.
        on_steps: Told how many more steps have been done, a few times a second.

    Yields:
        The records, in the order of finishing.
    """
    if workers == 1:
        for settings, cell in jobs:
            yield train_cell(_task(settings), cell, lambda: on_steps(1))
    else:
        yield from _train_in_processes(jobs, workers, on_steps)


def _train_in_processes(
    jobs: Sequence[Job], workers: int, on_steps: OnSteps
) -> Iterator[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")  # a forked torch may deadlock in its threads
    stop, counter = context.Event(), context.Value("q", 0)
    pool = ProcessPoolExecutor(workers, context, _start_worker, (stop, counter))
    counted = 0
    try:
        with _interrupts_ignored():  # the children inherit it
            pending = {pool.submit(_train_job, job) for job in jobs}
        while pending:
            done, pending = wait(pending, POLL_SECONDS, FIRST_COMPLETED)
            on_steps(counter.value - counted)
            counted = counter.value
            for future in done:
                yield future.result()
        on_steps(counter.value - counted)
    except BrokenProcessPool as broken:
        raise RuntimeError(
            "a training process died (killed, or out of memory?); what is finished is kept: "
            "the same command goes on, --workers 1 needs the least memory"
        ) from broken
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


@lru_cache(maxsize=4)
def _loaded(settings_json: str) -> Task:
    return make_task(TaskSettings.model_validate_json(settings_json))


def _task(settings: Training) -> Task:
    return _loaded(settings.model_dump_json())


# What the parent handed to this worker process at its start.
_from_parent: dict[str, Any] = {}


def _start_worker(stop: Event, counter: "Synchronized[int]") -> None:
    import torch

    torch.set_num_threads(1)
    _from_parent.update(stop=stop, counter=counter)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Leave when the parent is gone, however it went: nobody would take the results."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _train_job(job: Job) -> dict[str, Any]:
    settings, cell = job
    return train_cell(_task(settings), cell, _count_step)


def _count_step() -> None:
    if _from_parent["stop"].is_set():
        raise Stopped
    counter = _from_parent["counter"]
    with counter.get_lock():
        counter.value += 1


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ignore Ctrl-C for a moment, so that processes started in it do so for good."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

"""What a training step of each variant costs: all in turn, in one process, on one thread."""

import time
from collections.abc import Callable, Mapping, Sequence

from levelhead.bench.timing import compare_times, ratios
from levelhead.harness.config import BASELINE, Cell
from levelhead.harness.runs import RunFolder
from levelhead.harness.seeding import named_seed
from levelhead.harness.tasks import Task
from levelhead.harness.train import make_optimizer, start_model, training_step
from levelhead.modes import one_thread

TIMINGS = "timings.json"
TIMING_ROUNDS = 25
FEWEST_ROUNDS = 5
TIMING_SECONDS = 2.0  # for one task; slow steps get fewer rounds, down to the fewest
TIMING_WARMUP = 2

Times = dict[str, dict[str, float]]


def lacking(run: RunFolder, tasks: Mapping[str, Task], variants: Sequence[str]) -> list[str]:
    """Name the tasks of which a folder does not hold all variants' step times.

    Args:
        run: Where ``timings.json`` lies.
        tasks: Name to task.
        variants: All variants of the grid.

    Returns:
        Names of tasks.
    """
    known = run.read_json(TIMINGS) or {}
    return [name for name in tasks if not set(variants) <= set(known.get(name, {}))]


def keep(run: RunFolder, task: str, times: Times) -> None:
    """Write a task's step times into a folder.

    Args:
        run: Where ``timings.json`` lies.
        task: Name of the task.
        times: As ``step_times`` gives them.
    """
    run.write_json(TIMINGS, (run.read_json(TIMINGS) or {}) | {task: times})


def timed(run: RunFolder, tasks: Mapping[str, Task], variants: Sequence[str]) -> dict[str, Times]:
    """Return step times of all variants, measured now where the folder lacks one of them.

    Args:
        run: Where ``timings.json`` lies.
        tasks: Name to task.
        variants: All variants of the grid.

    Returns:
        Task to variant to ``ratio`` over the baseline, its range, and ``median_s``.
    """
    for name in lacking(run, tasks, variants):
        keep(run, name, step_times(tasks[name], variants))
    return run.read_json(TIMINGS)


def step_times(task: Task, variants: Sequence[str]) -> Times:
    """Time one training step of each variant.

    The trainings themselves run side by side and share the machine with whatever else runs, so
    their own durations are no measure; here a slow moment hits all variants alike and cancels,
    also where another process trains meanwhile.

    Args:
        task: Gives model and batches.
        variants: The baseline among them.

    Returns:
        Variant to ``ratio`` (median over rounds), ``ratio_min``, ``ratio_max``, ``median_s``.
    """
    steps = {variant: _stepper(task, variant) for variant in variants}
    with one_thread():
        compare_times(steps, repeats=1, warmup=TIMING_WARMUP - 1)
        begun = time.perf_counter()
        first = compare_times(steps, repeats=1, warmup=0)
        affordable = int(TIMING_SECONDS / (time.perf_counter() - begun))
        rounds = min(TIMING_ROUNDS, max(FEWEST_ROUNDS, affordable))
        more = compare_times(steps, repeats=max(1, rounds - 1), warmup=0)
    return ratios({name: first[name] + more[name] for name in steps}, BASELINE)


def _stepper(task: Task, variant: str) -> Callable[[], float]:
    cell = Cell(task=task.settings.name, variant=variant, init="default", seed=0)
    model = start_model(task, cell).train()
    optimizer = make_optimizer(model, task.settings)
    batch = next(task.batches(named_seed(0, "timing")))
    return lambda: training_step(task, model, optimizer, batch)

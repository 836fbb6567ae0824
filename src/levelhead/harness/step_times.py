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

TIMING_ROUNDS = 25
FEWEST_ROUNDS = 5
TIMING_SECONDS = 4.0  # for one task; slow steps get fewer rounds, down to the fewest
TIMING_WARMUP = 2

Times = dict[str, dict[str, float]]


def timed(run: RunFolder, tasks: Mapping[str, Task], variants: Sequence[str]) -> dict[str, Times]:
    """Return step times of all variants, measured now where the folder lacks one of them.

    Args:
        run: Where ``timings.json`` lies.
        tasks: Name to task.
        variants: All variants of the grid.

    Returns:
        Task to variant to ``ratio`` over the baseline, its range, and ``median_s``.
    """
    known = run.read_json("timings.json") or {}
    lacking = {n: task for n, task in tasks.items() if not set(variants) <= set(known.get(n, {}))}
    if lacking:
        known = known | {name: step_times(task, variants) for name, task in lacking.items()}
        run.write_json("timings.json", known)
    return known


def step_times(task: Task, variants: Sequence[str]) -> Times:
    """Time one training step of each variant.

    The trainings themselves run side by side and share the machine with whatever else runs, so
    their own durations are no measure; here a slow moment hits all variants alike and cancels.

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

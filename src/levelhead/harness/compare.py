"""Train a grid of variants side by side, paired, and say what the numbers show.

Every variant gets the same seeds, the same start of every parameter it shares with the others,
and the same batches in the same order. Finished trainings are kept and never done twice.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from levelhead.bench.timing import compare_times, ratios
from levelhead.harness.config import BASELINE, Cell, CompareSettings, cells, default_workers
from levelhead.harness.reading import read_task
from levelhead.harness.runs import VERSIONS, RunFolder
from levelhead.harness.seeding import named_seed
from levelhead.harness.statistics import PairedDifference, holm, paired_difference
from levelhead.harness.tasks import Metric, Task, make_task
from levelhead.harness.train import make_optimizer, one_thread, start_model, training_step
from levelhead.harness.workers import Job, train_all

TIMING_ROUNDS = 25
TIMING_WARMUP = 3

Records = Mapping[str, dict[str, Any]]
OnEvent = Callable[[str, int], None]


def compare(
    settings: CompareSettings,
    folder: Path,
    workers: int | None = None,
    on_event: OnEvent = lambda what, count: None,
) -> dict[str, Any]:
    """Train what is missing of a grid, time all variants, and sum up.

    Args:
        settings: The grid.
        folder: Where everything is written; what it already holds is taken as done.
        workers: Processes that train side by side; as many as cores by default. With more than
            one, a script that calls this needs the usual ``if __name__ == "__main__":``.
        on_event: Told of progress: ``("total", steps)``, ``("steps", more)``, ``("cells", 1)``,
            ``("timing", 0)``.

    Returns:
        The summary, as written to ``summary.json``.

    Raises:
        ValueError: Settings that do not fit the data, the models or the folder.
    """
    tasks = {task.name: make_task(task) for task in settings.tasks}
    check_cells(tasks, settings)
    run = RunFolder(folder)
    with run.held():
        return _fill(run, tasks, settings, workers, on_event)


def _fill(
    run: RunFolder,
    tasks: Mapping[str, Task],
    settings: CompareSettings,
    workers: int | None,
    on_event: OnEvent,
) -> dict[str, Any]:
    run.open_grid(settings.model_dump(mode="json"))
    records = {Cell.from_record(record).key: record for record in run.finished()}
    jobs = missing_jobs(tasks, settings, records)
    on_event("total", sum(task.steps for task, _ in jobs))
    if jobs:
        workers = default_workers(len(jobs)) if workers is None else min(workers, len(jobs))
        for record in train_all(jobs, workers, lambda steps: on_event("steps", steps)):
            run.append(record)
            on_event("cells", 1)
        records = {Cell.from_record(record).key: record for record in run.finished()}
    on_event("timing", 0)
    timings = timed(run, tasks, settings.variants, measure_again=bool(jobs))
    summed_up = [summarise(task, settings, records, timings[name]) for name, task in tasks.items()]
    summary = {
        "folder": str(run.path),
        "num_trained": len(jobs),
        "num_reused": len(cells(settings)) - len(jobs),
        "tasks": summed_up,
    }
    run.write_json("summary.json", summary)
    return summary


def check_cells(tasks: Mapping[str, Task], settings: CompareSettings) -> None:
    """Build every model of the grid once, so that a bad one is found before any is trained.

    Args:
        tasks: Name to task.
        settings: The grid.

    Raises:
        ValueError: A variant or init that does not exist or does not fit a model.
    """
    for cell in cells(settings.model_copy(update={"seeds": 1})):
        start_model(tasks[cell.task], cell)


def missing_jobs(
    tasks: Mapping[str, Task], settings: CompareSettings, records: Records
) -> list[Job]:
    """List the trainings of a grid that no record holds.

    Args:
        tasks: Name to task.
        settings: The grid.
        records: Cell key to record.

    Returns:
        Settings and cell of each, in the order of the grid.
    """
    missing = [cell for cell in cells(settings) if cell.key not in records]
    return [(tasks[cell.task].settings, cell) for cell in missing]


def timed(
    run: RunFolder, tasks: Mapping[str, Task], variants: Sequence[str], measure_again: bool
) -> dict[str, dict[str, dict[str, float]]]:
    """Return step times of all variants, measured now or taken from the folder.

    Args:
        run: Where ``timings.json`` lies.
        tasks: Name to task.
        variants: All variants of the grid.
        measure_again: Measure although the folder holds all of them.

    Returns:
        Task to variant to ``ratio`` over the baseline, its range, and ``median_s``.
    """
    before = run.read_json("timings.json") or {}
    complete = all(set(variants) <= set(before.get(name, {})) for name in tasks)
    if measure_again or not complete:
        before = before | {name: step_times(task, variants) for name, task in tasks.items()}
        run.write_json("timings.json", before)
    return before


def step_times(
    task: Task, variants: Sequence[str], rounds: int = TIMING_ROUNDS
) -> dict[str, dict[str, float]]:
    """Time one training step of each variant, all in turn in this process, on one thread.

    The trainings themselves run side by side and share the machine with whatever else runs, so
    their own durations are no measure; here a slow moment hits all variants alike and cancels.

    Args:
        task: Gives model and batches.
        variants: The baseline among them.
        rounds: Timed rounds; each steps every variant once.

    Returns:
        Variant to ``ratio`` (median over rounds), ``ratio_min``, ``ratio_max``, ``median_s``.
    """
    steps = {variant: _stepper(task, variant) for variant in variants}
    with one_thread():
        times = compare_times(steps, repeats=rounds, warmup=TIMING_WARMUP)
    return ratios(times, BASELINE)


def _stepper(task: Task, variant: str) -> Callable[[], float]:
    cell = Cell(task=task.settings.name, variant=variant, init="default", seed=0)
    model = start_model(task, cell).train()
    optimizer = make_optimizer(model, task.settings)
    batch = next(task.batches(named_seed(0, "timing")))
    return lambda: training_step(task, model, optimizer, batch)


def summarise(
    task: Task,
    settings: CompareSettings,
    records: Records,
    timings: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
    """Sum up one task: a row for each variant and init, and what they show in words.

    Args:
        task: The task.
        settings: The grid.
        records: Cell key to record, all cells of the grid among them.
        timings: Variant to step times.

    Returns:
        Plain values for a table or JSON.
    """
    groups = {
        (variant, init): [
            records[Cell(task=task.settings.name, variant=variant, init=init, seed=seed).key]
            for seed in range(settings.seeds)
        ]
        for init in settings.inits
        for variant in settings.variants
    }
    baseline = groups[BASELINE, settings.inits[0]]
    rows = [
        {"variant": variant, "init": init}
        | _row(group, baseline, task.metric, is_baseline=group is baseline)
        | _costs(group, baseline, timings[variant])
        for (variant, init), group in groups.items()
    ]
    _adjust(rows)
    used = [record for group in groups.values() for record in group]
    summary = {
        "task": task.settings.name,
        "model": task.settings.model,
        "steps": task.settings.steps,
        "learning_rate": task.settings.learning_rate,
        "metric": task.metric.name,
        "unit": task.metric.unit,
        "label": task.metric.label,
        "digits": task.metric.digits,
        "higher_is_better": task.metric.higher_is_better,
        "num_seeds": settings.seeds,
        "num_params": baseline[0]["num_params"],
        "num_versions": len({tuple(r["versions"][name] for name in VERSIONS) for r in used}),
        "rows": rows,
    }
    return summary | {"reading": read_task(summary)}


def _row(
    group: list[dict[str, Any]], baseline: list[dict[str, Any]], metric: Metric, is_baseline: bool
) -> dict[str, Any]:
    values = [record["final"] and record["final"][metric.name] for record in group]
    base = [record["final"] and record["final"][metric.name] for record in baseline]
    finite = [value for value in values if value is not None]
    row: dict[str, Any] = {
        "values": values,
        "mean": statistics.fmean(finite) if finite else None,
        "std": statistics.stdev(finite) if len(finite) > 1 else None,
        "n": len(finite),
        "diverged_seeds": [r["seed"] for r in group if r["diverged_step"]],
        "concentration_start": _mean([record["concentration_start"] for record in group]),
        "concentration_end": _mean([record["concentration_end"] for record in group]),
    }
    if is_baseline:
        return row | {"difference": None, "verdict": "baseline"}
    pairs = [(own, b) for own, b in zip(values, base, strict=True) if None not in (own, b)]
    shown = paired_difference([own - b for own, b in pairs])
    return row | {"difference": shown.as_dict(), "verdict": verdict(shown, metric)}


def verdict(shown: PairedDifference, metric: Metric) -> str:
    """Put the position of an interval into words.

    Args:
        shown: Variant minus baseline.
        metric: Says which way is up.

    Returns:
        ``"better"``, ``"worse"``, ``"no difference shown"``, or ``"not judged"`` where there is
        no interval.
    """
    if shown.t_interval is None:
        return "not judged"
    if shown.sign == 0:
        return "no difference shown"
    return "better" if (shown.sign > 0) == metric.higher_is_better else "worse"


def _costs(
    group: list[dict[str, Any]], baseline: list[dict[str, Any]], timing: Mapping[str, float]
) -> dict[str, Any]:
    return {
        "step_time_ratio": timing["ratio"],
        "step_time_ratio_range": [timing["ratio_min"], timing["ratio_max"]],
        "step_ms": 1000 * timing["median_s"],
        "params_added": group[0]["num_params"] - baseline[0]["num_params"],
    }


def _adjust(rows: list[dict[str, Any]]) -> None:
    """Write Holm's p values beside the plain ones."""
    judged = {
        str(number): row["difference"]["p_value"]
        for number, row in enumerate(rows)
        if row["difference"] and row["difference"]["p_value"] is not None
    }
    for number, p_value in holm(judged).items():
        rows[int(number)]["difference"]["p_holm"] = p_value


def _mean(values: list[float | None]) -> float | None:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.fmean(finite) if finite else None

"""Records in, rows out: means, paired differences, verdicts corrected over the whole grid."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from levelhead.harness.config import BASELINE, CompareSettings, Row, cells
from levelhead.harness.reading import SIGNIFICANT, read_task
from levelhead.harness.runs import VERSIONS
from levelhead.harness.selection import Choice, can_hold_out, chosen_rates
from levelhead.harness.statistics import PairedDifference, holm, paired_difference
from levelhead.harness.tasks import Metric, Task

Records = Mapping[str, Mapping[str, Any]]
Deaths = Mapping[str, Sequence[str]]
Group = Sequence[Mapping[str, Any] | None]
"""One record a seed; None where every attempt died."""


def summarise(
    tasks: Mapping[str, Task],
    settings: CompareSettings,
    records: Records,
    timings: Mapping[str, Mapping[str, Mapping[str, float]]],
    chosen: Mapping[Row, Choice] | None = None,
    deaths: Deaths | None = None,
) -> list[dict[str, Any]]:
    """Sum up a grid: for each task a row for each variant and init, and what they show in words.

    Args:
        tasks: Name to task.
        settings: The grid.
        records: Cell key to record; cells whose every attempt died are missing.
        timings: Task to variant to step times.
        chosen: Row to the choice of its learning rate, where there was one.
        deaths: Cell key to the ends of all attempts, of the cells that are missing.

    Returns:
        Plain values for tables or JSON, one entry a task.
    """
    chosen, deaths = chosen or {}, deaths or {}
    groups = _groups(settings, records, chosen)
    summed_up: list[dict[str, Any]] = [
        _task_values(task, settings)
        | {"rows": _rows(task, settings, groups, timings[name], chosen)}
        | {"num_versions": _num_versions(groups, name)}
        for name, task in tasks.items()
    ]
    for task in summed_up:
        for row in task["rows"]:
            row["unfinished"] = _unfinished(task, row, settings, chosen, deaths)
    _judge_all(summed_up)
    return [task | {"reading": read_task(task)} for task in summed_up]


def _groups(
    settings: CompareSettings, records: Records, chosen: Mapping[Row, Choice]
) -> dict[Row, list[Mapping[str, Any] | None]]:
    groups: dict[Row, list[Mapping[str, Any] | None]] = {}
    for cell in cells(settings, chosen_rates(settings, chosen)):
        group = groups.setdefault((cell.task, cell.variant, cell.init), [])
        group.append(records.get(cell.key))
    return groups


def _task_values(task: Task, settings: CompareSettings) -> dict[str, Any]:
    return {
        "task": task.settings.name,
        "model": task.settings.model,
        "steps": task.settings.steps,
        "learning_rate": task.settings.learning_rate,
        "learning_rates": list(settings.learning_rates),
        "num_selection_seeds": settings.selection_seeds,
        "can_choose_rates": can_hold_out(task),
        "metric": task.metric.name,
        "unit": task.metric.unit,
        "label": task.metric.label,
        "digits": task.metric.digits,
        "higher_is_better": task.metric.higher_is_better,
        "num_seeds": settings.seeds,
    }


def _rows(
    task: Task,
    settings: CompareSettings,
    groups: Mapping[Row, Group],
    timings: Mapping[str, Mapping[str, float]],
    chosen: Mapping[Row, Choice],
) -> list[dict[str, Any]]:
    name = task.settings.name
    baseline = groups[name, BASELINE, settings.inits[0]]
    rates = chosen_rates(settings, chosen)
    rows = []
    for (task_name, variant, init), group in groups.items():
        if task_name != name:
            continue
        choice = chosen.get((name, variant, init))
        rate = rates.get((name, variant, init))
        rows.append(
            {"variant": variant, "init": init}
            | _results(group, task.metric)
            | _difference(group, baseline, task.metric, is_baseline=group is baseline)
            | {"learning_rate": task.settings.learning_rate if rate is None else rate}
            | {"selection": choice and choice.as_dict()}
            | _costs(group, baseline, timings[variant])
        )
    return rows


def _results(group: Group, metric: Metric) -> dict[str, Any]:
    finished = [record for record in group if record is not None]
    values = [_value(record, metric) for record in group]
    finite = [value for value in values if value is not None]
    return {
        "values": values,
        "mean": statistics.fmean(finite) if finite else None,
        "std": statistics.stdev(finite) if len(finite) > 1 else None,
        "n": len(finite),
        "diverged_seeds": [r["seed"] for r in finished if r["diverged_step"]],
        "retried": [
            {"seed": r["seed"], "deaths": list(r["deaths"])} for r in finished if r.get("deaths")
        ],
        "concentration_start": _mean([record["concentration_start"] for record in finished]),
        "concentration_end": _mean([record["concentration_end"] for record in finished]),
    }


def _value(record: Mapping[str, Any] | None, metric: Metric) -> float | None:
    return record["final"][metric.name] if record is not None and record["final"] else None


def _difference(
    group: Group, baseline: Group, metric: Metric, is_baseline: bool
) -> dict[str, Any]:
    if is_baseline:
        return {"difference": None, "verdict": "baseline", "stands": None, "shown": "baseline"}
    pairs = zip(group, baseline, strict=True)
    values = [(_value(own, metric), _value(base, metric)) for own, base in pairs]
    differences = [own - base for own, base in values if own is not None and base is not None]
    shown = paired_difference(differences)
    return {"difference": shown.as_dict(), "verdict": verdict(shown, metric)}


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


def _costs(group: Group, baseline: Group, timing: Mapping[str, float]) -> dict[str, Any]:
    own, base = _num_params(group), _num_params(baseline)
    return {
        "step_time_ratio": timing["ratio"],
        "step_time_ratio_range": [timing["ratio_min"], timing["ratio_max"]],
        "step_ms": 1000 * timing["median_s"],
        "num_params": own,
        "params_added": None if own is None or base is None else own - base,
    }


def _num_params(group: Group) -> int | None:
    return next((record["num_params"] for record in group if record is not None), None)


def _num_versions(groups: Mapping[Row, Group], task: str) -> int:
    used = [r for row, group in groups.items() if row[0] == task for r in group if r is not None]
    return len({tuple(record["versions"][name] for name in VERSIONS) for record in used})


def _unfinished(
    task: Mapping[str, Any],
    row: Mapping[str, Any],
    settings: CompareSettings,
    chosen: Mapping[Row, Choice],
    deaths: Deaths,
) -> list[dict[str, Any]]:
    """The row's seeds whose every attempt died, and how each attempt ended."""
    rates = chosen_rates(settings, chosen)
    return [
        {"seed": cell.seed, "deaths": list(deaths[cell.key])}
        for cell in cells(settings, rates)
        if (cell.task, cell.variant, cell.init) == (task["task"], row["variant"], row["init"])
        and cell.key in deaths
    ]


def _judge_all(summed_up: Sequence[dict[str, Any]]) -> None:
    """Write Holm's p values beside the plain ones, over all tasks together, and what stands."""
    judged = {
        f"{place}.{number}": row
        for place, task in enumerate(summed_up)
        for number, row in enumerate(task["rows"])
        if row["difference"] and row["difference"]["p_value"] is not None
    }
    adjusted = holm({name: row["difference"]["p_value"] for name, row in judged.items()})
    for name, row in judged.items():
        row["difference"]["p_holm"] = adjusted[name]
        row["stands"] = row["verdict"] in ("better", "worse") and adjusted[name] < SIGNIFICANT
    for task in summed_up:
        task["num_comparisons"] = len(judged)
        task["num_params"] = next(r["num_params"] for r in task["rows"] if _is_baseline(r))
        for row in task["rows"]:
            row.setdefault("stands", None)
            row.setdefault("shown", _shown(row))


def _is_baseline(row: Mapping[str, Any]) -> bool:
    return row["verdict"] == "baseline"


def _shown(row: Mapping[str, Any]) -> str:
    if row["verdict"] in ("better", "worse") and not row["stands"]:
        return f"{row['verdict']}, not after Holm"
    return row["verdict"]


def _mean(values: list[float | None]) -> float | None:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.fmean(finite) if finite else None

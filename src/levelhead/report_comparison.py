"""A comparison laid out as a page: what differs by how much, curves, costs, every number."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from levelhead.measure.spikes import running_spikes
from levelhead.report_curves import SPIKE_EQUATION, SPIKE_WORDS, banded, lines_figure
from levelhead.report_depth import section
from levelhead.report_diagnosis import flat_meta
from levelhead.report_monitor import monitor_section

PAIRED_WORDS = [
    "Each variant minus softmax, paired: both runs of a pair share seed, start and batches.",
    "Thick bar: 95 % paired-t interval, which decides. Thin bar: percentile bootstrap over the "
    "seeds, shown beside it; it cannot reach beyond the smallest and largest difference. Small "
    "dots: single pairs. An interval across zero shows no difference, which is not the same as "
    "no difference.",
]
PAIRED_EQUATION = "mean(d) +- t_{n-1} s(d) / sqrt(n),  d = variant - softmax, one a seed"
AFTER_HOLM = ", not after Holm"
RATE_WORDS = (
    "Learning rates were chosen by seeds that are not reported, on a part of the training data "
    "that those runs did not train on; every row had the same number of trainings to choose by."
)
BAND_WORDS = "Line: mean over the seeds. Band: from the lowest seed to the highest, at each step."
COST_WORDS = (
    "Time of a whole training step over softmax's: median over rounds in which every variant "
    "steps once, all in one process, so that a slow moment hits all alike. Bar: smallest and "
    "largest round."
)
_UNITS = {"nats": "nats", "bits": "bits", "pct": "%", "frac": "share", "ms": "ms"}
_TABLE = (
    ("variant", "variant"), ("init", "init"), ("mean", "mean"), ("std", "std over seeds"),
    ("n", "n"), ("shown", "shown"), ("learning_rate", "learning rate"),
    ("difference.mean", "difference"),
    ("difference.t_interval.0", "95 % low"), ("difference.t_interval.1", "95 % high"),
    ("difference.bootstrap_interval.0", "bootstrap low"),
    ("difference.bootstrap_interval.1", "bootstrap high"), ("difference.p_value", "p"),
    ("difference.p_holm", "p (Holm)"), ("difference.detectable", "could show"),
    ("step_time_ratio", "step time ratio"),
    ("params_added", "parameters added"), ("concentration_start", "strongest key, start"),
    ("concentration_end", "strongest key, end"),
)  # fmt: skip


def run_page(run: Mapping[str, Any]) -> dict[str, Any]:
    """Lay a run out.

    Args:
        run: What ``report_runs.read_run`` returned.

    Returns:
        What ``report_render.render_page`` draws.
    """
    by_task: dict[str, list[dict[str, Any]]] = {}
    for cell in run["cells"]:
        by_task.setdefault(cell["task"], []).append(cell)
    summed_up = {task["task"]: task for task in (run["summary"] or {}).get("tasks", [])}
    sections = [
        _task_section(number, task, summed_up.get(task), cells)
        for number, (task, cells) in enumerate(by_task.items())
    ]
    if run.get("monitor"):
        sections.append(monitor_section(run["monitor"]))
    sections.append(_cells_section(run["cells"]))
    unfinished = sorted(set(by_task) - set(summed_up))
    return {
        "kind": "comparison",
        "title": f"Attention variants on {' and '.join(by_task)}",
        "subtitle": "Comparison of attention variants",
        "verdict": _verdict(summed_up.values()),
        "severity": "neutral",
        "tiles": _tiles(run, by_task),
        "findings": [],
        "not_measured": [
            f"{task}: the comparison was not finished, so nothing is compared; the same "
            "`levelhead compare` command goes on where it stopped."
            for task in unfinished
        ],
        "sections": sections,
        "meta": [("folder", run["path"]), *flat_meta(run["config"])],
        "figures": {
            "heads": None,
            "figures": [figure for section in sections for figure in section["figures"]],
        },
    }


def _judged(task: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (_row_label(row, task), _shown(row))
        for row in task["rows"]
        if row["verdict"] != "baseline"
    ]


def _shown(row: Mapping[str, Any]) -> str:
    """In the table's words; an older summary has only the verdict."""
    return row.get("shown", row["verdict"])


def _verdict(tasks: Any) -> str:
    """One sentence: what stands, over all tasks."""
    better, worse, fallen, count = [], [], [], 0
    for task in tasks:
        for label, verdict in _judged(task):
            count += 1
            place = f"{label} on {task['task']}"
            better += [place] if verdict == "better" else []
            worse += [place] if verdict == "worse" else []
            fallen += [place] if verdict.endswith(AFTER_HOLM) else []
    if not count:
        return "No comparison was finished; the curves below are what there is."
    if not better + worse + fallen:
        return f"No difference from softmax shown in any of {count} comparisons."
    parts = [f"Better than softmax: {', '.join(better)}"] if better else []
    parts += [f"Worse: {', '.join(worse)}"] if worse else []
    parts += [f"Not after correction (Holm): {', '.join(fallen)}"] if fallen else []
    rest = count - len(better) - len(worse) - len(fallen)
    parts += [f"Not told apart: {rest} of {count}"] if rest else []
    return ". ".join(parts) + "."


def _tiles(run: Mapping[str, Any], by_task: Mapping[str, Any]) -> list[tuple[str, str]]:
    cells = run["cells"]
    return [
        ("tasks", str(len(by_task))),
        ("variants", str(len({cell["variant"] for cell in cells}))),
        ("seeds", str(len({cell["seed"] for cell in cells}))),
        ("trainings", str(len(cells))),
        ("diverged", str(sum(bool(cell.get("diverged_step")) for cell in cells))),
    ]


def _task_section(
    number: int, task: str, summary: Mapping[str, Any] | None, cells: list[dict[str, Any]]
) -> dict[str, Any]:
    figures = []
    intro = ""
    if summary is not None:
        intro = (
            f"{summary['model']} with {summary['num_params']:,} parameters, {summary['steps']} "
            f"steps, {summary['num_seeds']} paired seeds."
        )
        figures += [_paired_figure(f"paired-{number}", summary)]
    figures += _curve_figures(number, summary, _reported(cells, summary))
    if summary is not None:
        figures += [_cost_figure(f"costs-{number}", summary)]
        figures += [_rows_table(f"rows-{number}", summary)]
        figures += _rates_tables(f"rates-{number}", summary)
    laid_out = section(f"task-{number}", task, intro, figures)
    if summary is not None:
        laid_out |= {"judged": _judged(summary), "reading": summary["reading"]}
    return laid_out


def _reported(
    cells: list[dict[str, Any]], summary: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """The trainings of the table: on the test data, at their row's learning rate."""
    on_test = [cell for cell in cells if cell.get("part", "test") == "test"]
    if summary is None:
        return on_test
    rates = {(r["variant"], r["init"]): r.get("learning_rate") for r in summary["rows"]}

    def is_shown(cell: dict[str, Any]) -> bool:
        own = cell.get("learning_rate") or summary["learning_rate"]
        wanted = rates.get((cell["variant"], cell["init"]))
        return wanted is None or own == wanted

    return [cell for cell in on_test if is_shown(cell)]


def _row_label(row: Mapping[str, Any], task: Mapping[str, Any]) -> str:
    several = len({other["init"] for other in task["rows"]}) > 1
    return f"{row['variant']}, {row['init']}" if several else row["variant"]


def _paired_figure(name: str, task: Mapping[str, Any]) -> dict[str, Any]:
    baseline = next(row["values"] for row in task["rows"] if row["verdict"] == "baseline")
    rows = []
    for number, row in enumerate(task["rows"]):
        shown = row["difference"]
        if not shown or shown["mean"] is None:
            continue
        pairs = zip(row["values"], baseline, strict=False)
        rows.append(
            {
                "label": _row_label(row, task),
                "number": number,
                "middle": shown["mean"],
                "interval": shown["t_interval"],
                "thin": shown["bootstrap_interval"],
                "dots": [own - base for own, base in pairs if None not in (own, base)],
                "verdict": row["verdict"],
                "n": shown["n"],
            }
        )
    way = "right" if task["higher_is_better"] else "left"
    return {
        "id": name,
        "kind": "intervals",
        "title": f"Difference from softmax in {task['label']}",
        "words": [f"Further {way} is better."],
        "conventions": PAIRED_WORDS,
        "equations": [("paired t interval", PAIRED_EQUATION)],
        "details": [],
        "unit": task["unit"],
        "digits": task["digits"],
        "reference": 0,
        "ends": ["worse", "better"] if task["higher_is_better"] else ["better", "worse"],
        "rows": rows,
    }


def _curve_figures(
    number: int, summary: Mapping[str, Any] | None, cells: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    labels = [_row_label(row, summary) for row in summary["rows"]] if summary else []
    groups: dict[str, list[dict[str, Any]]] = {label: [] for label in labels}
    several = len({cell["init"] for cell in cells}) > 1
    for cell in cells:
        label = f"{cell['variant']}, {cell['init']}" if several else cell["variant"]
        groups.setdefault(label, []).append(cell)
    groups = {label: group for label, group in groups.items() if group}
    losses = [_loss_series(label, group) for label, group in groups.items()]
    figures = [
        lines_figure(
            f"loss-{number}", "Training loss (nats)", losses, [BAND_WORDS, SPIKE_WORDS],
            [("a spike", SPIKE_EQUATION)],
        )
    ]  # fmt: skip
    metrics = [key for cell in cells for point in cell.get("evaluations", []) for key in point]
    for key in dict.fromkeys(key for key in metrics if key != "step"):
        title = f"Test {_with_unit(key)}"
        if summary is not None and key == summary["metric"]:
            title = f"Test {summary['label']}"
        series = [_evaluation_series(label, group, key) for label, group in groups.items()]
        figures.append(lines_figure(f"{key}-{number}", title, series, [BAND_WORDS]))
    return figures


def _with_unit(key: str) -> str:
    """``loss_nats`` as ``loss (nats)``."""
    quantity, _, unit = key.rpartition("_")
    is_unit = bool(quantity) and unit in _UNITS
    return f"{quantity} ({_UNITS[unit]})".replace("_", " ") if is_unit else key.replace("_", " ")


def _loss_series(label: str, cells: list[dict[str, Any]]) -> dict[str, Any]:
    curves = [
        list(zip(cell["curve"]["step"], cell["curve"]["train_loss_nats"], strict=True))
        for cell in cells
    ]
    series = banded(label, curves)
    series["spikes"] = list(running_spikes(series["middle"]))
    series["broken"] = [
        [cell["seed"], cell["diverged_step"]] for cell in cells if cell.get("diverged_step")
    ]
    return series


def _evaluation_series(label: str, cells: list[dict[str, Any]], key: str) -> dict[str, Any]:
    curves = []
    for cell in cells:
        points = ((point["step"], point[key]) for point in cell.get("evaluations", []))
        curve = [(step, value) for step, value in points if not isinstance(value, str)]  # "nan"
        last = cell["curve"]["step"][-1:]
        if cell.get("final") and key in cell["final"] and last:
            curve += [(last[0], cell["final"][key])]
        curves.append(curve)
    return banded(label, curves)


def _cost_figure(name: str, task: Mapping[str, Any]) -> dict[str, Any]:
    rows = [
        {
            "label": _row_label(row, task),
            "number": number,
            "middle": row["step_time_ratio"],
            "interval": None,
            "thin": row["step_time_ratio_range"],
            "dots": [],
            "verdict": row["verdict"],
            "n": None,
        }
        for number, row in enumerate(task["rows"])
    ]
    return {
        "id": name,
        "kind": "intervals",
        "title": "Step time over softmax's",
        "words": [],
        "conventions": [COST_WORDS],
        "equations": [],
        "details": [],
        "unit": "times softmax",
        "digits": 2,
        "reference": 1,
        "ends": ["faster", "slower"],
        "rows": rows,
    }


def _rows_table(name: str, task: Mapping[str, Any]) -> dict[str, Any]:
    columns = [label for _, label in _TABLE]
    rows = [[_at({"shown": _shown(row), **row}, path) for path, _ in _TABLE]
            for row in task["rows"]]  # fmt: skip
    title = f"{task['task']}: {task['label']}, all columns"
    return _table(name, title, columns, rows)


def _rates_tables(name: str, task: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each row's learning rate was chosen from; none where there was nothing to choose."""
    columns = ["variant", "init", "learning rate", f"validation {task['label']}", "n", "diverged",
               "died", "chosen"]  # fmt: skip
    rows = [
        [
            row["variant"], row["init"], tried["learning_rate"], tried["mean"], tried["n"],
            tried["num_diverged"], tried["num_missing"],
            "chosen" if tried["learning_rate"] == row["selection"]["learning_rate"] else "",
        ]
        for row in task["rows"]
        if row.get("selection")
        for tried in row["selection"]["tried"]
    ]  # fmt: skip
    if not rows:
        return []
    table = _table(name, f"{task['task']}: choosing the learning rate", columns, rows)
    return [table | {"words": [RATE_WORDS]}]


def _cells_section(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    finals = list(dict.fromkeys(key for cell in cells for key in cell.get("final") or {}))
    columns = [
        "task",
        "variant",
        "init",
        "seed",
        "learning rate",
        "measured on",
        *finals,
        "mean training loss",
        "diverged at step",
    ]
    rows = [
        [
            cell["task"], cell["variant"], cell["init"], cell["seed"],
            cell.get("learning_rate") or "the task's", cell.get("part", "test"),
            *((cell.get("final") or {}).get(key) for key in finals),
            _mean(cell["curve"]["train_loss_nats"]), cell.get("diverged_step"),
        ]
        for cell in cells
    ]  # fmt: skip
    figure = _table("cells", "Every training", columns, rows)
    intro = "One row for each training; sort by a heading, or take the CSV."
    return section("tables", "Every training", intro, [figure])


def _table(name: str, title: str, columns: list[str], rows: list[list[Any]]) -> dict[str, Any]:
    return {"id": name, "kind": "table", "title": title, "words": [], "columns": columns,
            "rows": rows}  # fmt: skip


def _at(row: Any, path: str) -> Any:
    for key in path.split("."):
        if row is None:
            return None
        row = row[int(key)] if isinstance(row, list) else row.get(key)
    return row


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None

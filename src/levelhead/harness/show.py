"""How a comparison looks in a terminal: the bar while it trains, the table, the reading."""

import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from levelhead.harness.compare import OnEvent
from levelhead.harness.reading import counted, row_name
from levelhead.harness.statistics import POWER

PLAIN_WIDTH = 120  # columns where the output is not a terminal: no row is broken
SHOWN_SHARE = 0.0005  # of the time: 0.1 % when rounded
TABLE_WORDS = (
    "95 % interval: paired t. p (Holm): paired t, corrected for all comparisons of the grid. "
    f"could show: the smallest true difference that {POWER:.0%} of such experiments show. "
    "step time: of a whole training step over softmax's, median of rounds that step every variant "
    "in turn."
)
VERDICT_STYLES = {"better": "green", "worse": "red", "baseline": "dim"}


@contextmanager
def progress_bar(console: Console) -> Iterator[OnEvent]:
    """Show a bar over all optimiser steps and what is going on.

    Args:
        console: Where to; standard error, so that standard output stays clean.

    Yields:
        The ``on_event`` of ``compare``.
    """
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    ) as progress:
        bar = progress.add_task("starting", total=None)
        num_cells = num_deaths = 0

        def said() -> str:
            died = f", {num_deaths} died" if num_deaths else ""
            return f"{counted(num_cells, 'training')} done{died}"

        def on_event(what: str, count: int) -> None:
            nonlocal num_cells, num_deaths
            if what == "total":
                progress.update(bar, total=count, description="training")
            elif what == "steps":
                progress.advance(bar, count)
            elif what == "cells":
                num_cells += count
                progress.update(bar, description=said())
            elif what == "deaths":
                num_deaths += count
                progress.update(bar, description=said())

        yield on_event


def stdout_console() -> Console:
    """Return a console for standard output, wide enough when nobody looks at it.

    Returns:
        The console.
    """
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def show_summary(console: Console, summary: Mapping[str, Any]) -> None:
    """Print every task's table and its reading.

    Args:
        console: Where to.
        summary: What ``compare`` returned.
    """
    for task in summary["tasks"]:
        console.print(comparison_table(task))
        for sentence in task["reading"]:
            lines = textwrap.fill(f"- {sentence}", console.width, subsequent_indent="  ")
            console.print(lines, markup=False)
        console.print()
    console.print(_closing_words(summary), markup=False)


def _closing_words(summary: Mapping[str, Any]) -> str:
    reused, lost = summary["num_reused"], summary["num_unfinished"]
    again = f"; {reused} were there already (another --out starts afresh)" if reused else ""
    lost_words = f"; {lost} died at every attempt (the same command tries again)" if lost else ""
    spent = f"{time_words(summary['time'])}\n" if summary["num_trained"] else ""
    return (
        f"{spent}{counted(summary['num_trained'], 'training')} done{again}{lost_words}. "
        f"Settings, versions, seeds and curves: {summary['folder']}/\n"
        f"As a page: levelhead report {summary['folder']}"
    )


def time_words(spent: Mapping[str, Any]) -> str:
    """Say where the time went.

    Args:
        spent: The summary's ``"time"``.

    Returns:
        One line: the shares of all processes' time, the largest first.
    """
    budget = spent["wall_s"] * spent["workers"]
    shares = sorted(spent["worker_s"].items(), key=lambda part: -part[1])
    parts = [
        f"{seconds / budget:.1%} {name.replace('_', ' ')}"
        for name, seconds in shares
        if seconds / budget >= SHOWN_SHARE
    ]
    return (
        f"{spent['wall_s']:.0f} s with {counted(spent['workers'], 'training')} at a time: "
        f"{', '.join(parts)}."
    )


def comparison_table(task: Mapping[str, Any]) -> Table:
    """Lay out one task's rows.

    Args:
        task: An entry of the summary's ``"tasks"``.

    Returns:
        The table.
    """
    table = Table(
        title=f"{task['task']}: {task['model']} with {_params(task)} parameters, "
        f"{counted(task['steps'], 'step')}, {counted(task['num_seeds'], 'paired seed')}",
        title_justify="left",
        caption=TABLE_WORDS,
        caption_justify="left",
    )
    columns = _columns(task)
    table.add_column("variant", overflow="fold")  # on a narrow terminal cells break, none is cut
    for heading in columns[0][1:-1]:
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column("shown", overflow="fold")
    for row, line in zip(task["rows"], columns[1:], strict=True):
        table.add_row(*line, style=VERDICT_STYLES.get(row["shown"], ""))
    return table


def _params(task: Mapping[str, Any]) -> str:
    return "an unknown number of" if task["num_params"] is None else f"{task['num_params']:,}"


def _columns(task: Mapping[str, Any]) -> list[list[str]]:
    """The headings, then the cells of each row."""
    headings = ["variant", task["label"], "vs\nsoftmax", "95 %\ninterval", "n", "p\n(Holm)",
                "could\nshow", "step\ntime", "parameters", "shown"]  # fmt: skip
    lines = [headings, *(_table_cells(row, task) for row in task["rows"])]
    if any(row["selection"] for row in task["rows"]):
        rates = ["learning\nrate", *(f"{row['learning_rate']:g}" for row in task["rows"])]
        lines = [[*line[:-1], rate, line[-1]] for line, rate in zip(lines, rates, strict=True)]
    if any(row["unfinished"] or row["retried"] for row in task["rows"]):
        died = ["died", *map(_died, task["rows"])]
        lines = [[*line[:-1], cell, line[-1]] for line, cell in zip(lines, died, strict=True)]
    return lines


def _died(row: Mapping[str, Any]) -> str:
    """How many trainings were lost, and how many done again."""
    lost, again = len(row["unfinished"]), len(row["retried"])
    parts = [f"{lost} lost"] * bool(lost) + [f"{again} again"] * bool(again)
    return ", ".join(parts)


def _table_cells(row: Mapping[str, Any], task: Mapping[str, Any]) -> list[str]:
    digits = task["digits"]
    difference = interval = p_holm = could_show = ""
    num_pairs = row["n"]
    if row["difference"]:
        found = row["difference"]
        num_pairs = found["n"]
        difference = _number(found["mean"], digits, "+")
        ends = found["t_interval"]
        interval = "-" if ends is None else f"{ends[0]:+.{digits}f} .. {ends[1]:+.{digits}f}"
        p_holm = _number(found.get("p_holm"), 3)
        could_show = _number(found["detectable"], digits)
    return [
        row_name(row, task),
        _number(row["mean"], digits),
        difference,
        interval,
        str(num_pairs),
        p_holm,
        could_show,
        f"{row['step_time_ratio']:.2f}",
        f"{row['params_added']:+,}" if row["params_added"] else "0",
        row["shown"],
    ]


def _number(value: float | None, digits: int, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.{digits}f}"

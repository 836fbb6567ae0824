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

PLAIN_WIDTH = 120  # columns where the output is not a terminal: no row is broken
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
        num_cells = 0

        def on_event(what: str, count: int) -> None:
            nonlocal num_cells
            if what == "total":
                progress.update(bar, total=count, description="training")
            elif what == "steps":
                progress.advance(bar, count)
            elif what == "cells":
                num_cells += count
                progress.update(bar, description=f"{num_cells} trainings done")
            elif what == "timing":
                progress.update(bar, description="timing steps, all variants in turn")

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
    reused = summary["num_reused"]
    again = f"; {reused} were there already (another --out starts afresh)" if reused else ""
    console.print(
        f"{summary['num_trained']} trainings done{again}. Settings, versions, seeds and curves: "
        f"{summary['folder']}/",
        markup=False,
    )


def comparison_table(task: Mapping[str, Any]) -> Table:
    """Lay out one task's rows.

    Args:
        task: An entry of the summary's ``"tasks"``.

    Returns:
        The table.
    """
    table = Table(
        title=f"{task['task']}: {task['model']} with {task['num_params']:,} parameters, "
        f"{counted(task['steps'], 'step')}, {counted(task['num_seeds'], 'paired seed')}",
        title_justify="left",
        caption="95 % interval: paired t. step time: of a whole training step over softmax's, "
        "median of rounds that step every variant in turn.",
        caption_justify="left",
    )
    table.add_column("variant", overflow="fold")  # on a narrow terminal cells break, none is cut
    for heading in (task["label"], "vs softmax", "95 % interval", "n", "step time", "parameters"):
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column("shown", overflow="fold")
    for row in task["rows"]:
        table.add_row(*_table_cells(row, task), style=VERDICT_STYLES.get(row["verdict"], ""))
    return table


def _table_cells(row: Mapping[str, Any], task: Mapping[str, Any]) -> list[str]:
    digits = task["digits"]
    difference, interval, num_pairs = "", "", row["n"]
    if row["difference"]:
        num_pairs = row["difference"]["n"]
        difference = _number(row["difference"]["mean"], digits, "+")
        ends = row["difference"]["t_interval"]
        interval = "-" if ends is None else f"{ends[0]:+.{digits}f} .. {ends[1]:+.{digits}f}"
    return [
        row_name(row, task),
        _number(row["mean"], digits),
        difference,
        interval,
        str(num_pairs),
        f"{row['step_time_ratio']:.2f}",
        f"{row['params_added']:+,}" if row["params_added"] else "0",
        row["verdict"],
    ]


def _number(value: float | None, digits: int, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.{digits}f}"

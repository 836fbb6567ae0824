"""How much of a grid's time is not training: sixty small runs as a user starts them.

A real ``levelhead compare`` in a process of its own, from the command line to its end:

    budget = wall seconds x processes;  outside = 1 - training / budget

Evaluation is asked for, so it stands by itself; the bar is on all the rest.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from levelhead.bench.arguments import out_file, positive
from levelhead.harness.runs import replace_text

OUTSIDE_BAR = 0.05
NUM_VARIANTS = 6  # of the default comparison


def measure_grid(data: str, num_runs: int, workers: int | None) -> dict[str, Any]:
    """Run a grid of the default variants and account for its time.

    Args:
        data: As ``--data`` takes it.
        num_runs: Trainings, a multiple of 6.
        workers: Processes; None: as many as cores.

    Returns:
        ``shares`` of the budget by what they were for, ``outside_frac`` without and
        ``outside_with_evaluation_frac`` with evaluation, ``wall_s``, ``workers``.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-c", "import sys; from levelhead.cli import main; sys.exit(main())",
            "compare", "--data", data, "--seeds", str(max(1, num_runs // NUM_VARIANTS)),
            "--out", str(Path(folder, "run")), "--json",
        ]  # fmt: skip
        command += [] if workers is None else ["--workers", str(workers)]
        begun = time.perf_counter()
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        wall = time.perf_counter() - begun
    return account(json.loads(done.stdout)["time"], wall)


def account(spent: dict[str, Any], wall_s: float) -> dict[str, Any]:
    """Add to a comparison's own account what came before and after it.

    Args:
        spent: The summary's ``"time"``.
        wall_s: Of the whole command.

    Returns:
        As ``measure_grid``.
    """
    workers = spent["workers"]
    budget = workers * wall_s
    seconds = {**spent["worker_s"], "import": workers * (wall_s - spent["wall_s"])}
    shares = {name: round(value / budget, 4) for name, value in seconds.items()}
    with_evaluation = 1 - seconds["training"] / budget
    return {
        "num_runs": spent["num_trained"],
        "workers": workers,
        "wall_s": round(wall_s, 2),
        "shares": shares,
        "outside_with_evaluation_frac": round(with_evaluation, 4),
        "outside_frac": round(with_evaluation - seconds["evaluation"] / budget, 4),
    }


def table(record: dict[str, Any]) -> str:
    """Return the record as text: a line for each share of the time, and the verdict."""
    shares = sorted(record["shares"].items(), key=lambda item: -item[1])
    lines = [f"{share:7.2%}  {name.replace('_', ' ')}" for name, share in shares]
    verdict = "ok" if record["holds"] else "ABOVE"
    lines.append(
        f"{record['num_runs']} runs, {record['workers']} at a time, {record['wall_s']:.0f} s: "
        f"outside training {record['outside_frac']:.2%} (bar {OUTSIDE_BAR:.0%}, {verdict}), "
        f"with evaluation {record['outside_with_evaluation_frac']:.2%}"
    )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run from the command line.

    Args:
        argv: Arguments, those of the process if None.

    Returns:
        0 if the share outside training stays below its bar, else 1.
    """
    parser = argparse.ArgumentParser(prog="levelhead bench grid", description=__doc__)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--runs", type=positive, default=60)
    parser.add_argument("--workers", type=positive, help="processes; default one for each core")
    parser.add_argument("--out", type=out_file, help="write the record here as JSON")
    parser.add_argument("--json", action="store_true", help="print the record as JSON")
    chosen = parser.parse_args(argv)
    found = measure_grid(chosen.data, chosen.runs, chosen.workers)
    holds = found["outside_frac"] <= OUTSIDE_BAR
    record = {
        "benchmark": "grid",
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load_before": [round(load, 2) for load in os.getloadavg()],
        "bar": OUTSIDE_BAR,
        "holds": holds,
        **found,
    }
    text = json.dumps(record, indent=1)
    print(text if chosen.json else table(record))
    if chosen.out is not None:
        replace_text(chosen.out, text + "\n")
    return 0 if holds else 1

"""What ``import levelhead`` costs beside ``import torch``: fresh processes, in turn."""

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

from levelhead.bench.arguments import out_file, positive
from levelhead.bench.timing import compare_times, ratios
from levelhead.harness.runs import replace_text

IMPORT_BAR = 1.2
"""Longest import of levelhead, over that of torch."""


def import_in_a_process(module: str) -> Callable[[], None]:
    """Return a call that starts a process, which imports a module and ends.

    Args:
        module: Its name.

    Returns:
        The call.
    """
    command = [sys.executable, "-c", f"import {module}"]
    return lambda: subprocess.run(command, check=True).check_returncode()


def run(repeats: int) -> dict[str, Any]:
    """Time the imports.

    Args:
        repeats: Rounds, each a process of both.

    Returns:
        One JSON-able record, the machine included.
    """
    calls = {module: import_in_a_process(module) for module in ("torch", "levelhead")}
    found = ratios(compare_times(calls, repeats), "torch")
    return {
        "benchmark": "startup",
        "torch": str(torch.__version__),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "repeats": repeats,
        "torch_s": found["torch"]["median_s"],
        "levelhead": found["levelhead"],
        "bar": IMPORT_BAR,
        "holds": found["levelhead"]["ratio"] <= IMPORT_BAR,
    }


def main(argv: list[str] | None = None) -> int:
    """Run from the command line.

    Args:
        argv: Arguments, those of the process if None.

    Returns:
        0 if the import stays below its bar, else 1.
    """
    parser = argparse.ArgumentParser(prog="levelhead bench startup", description=__doc__)
    parser.add_argument("--repeats", type=positive, default=15, help="rounds")
    parser.add_argument("--out", type=out_file, help="write the record here as JSON")
    parser.add_argument("--json", action="store_true", help="print the record as JSON")
    chosen = parser.parse_args(argv)
    record = run(chosen.repeats)
    text = json.dumps(record, indent=1)
    if chosen.out:
        replace_text(chosen.out, text + "\n")
    found = record["levelhead"]
    spread = f"{found['ratio_min']:.2f} .. {found['ratio_max']:.2f}"
    line = f"import levelhead / import torch: {found['ratio']:.3f} ({spread}), bar {IMPORT_BAR}"
    print(text if chosen.json else line)
    return 0 if record["holds"] else 1

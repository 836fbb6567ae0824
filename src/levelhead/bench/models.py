"""Whole models, converted against stock: throughput, memory and the time a conversion takes."""

import argparse
import copy
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.bench.timing import compare_times, peak_extra_bytes, ratios
from levelhead.convert import convert
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
VOCAB = 50257


@dataclass(frozen=True)
class Case:
    """A model and one batch.

    Attributes:
        build: Makes the model, random weights.
        batch: Makes keyword arguments, or the one positional argument.
        is_fused: Whether stock runs a fused attention.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor] | Tensor]
    is_fused: bool = True


def _timm(name: str, batch: int, **options: Any) -> Case:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name, **options)

    size = options.get("img_size", 224)
    return Case(build, lambda: torch.randn(batch, 3, size, size), not name.startswith(UNFUSED))


UNFUSED = ("swin", "xcit")


def _gpt2(num_tokens: int, **options: Any) -> Case:
    def build() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **options)
        return GPT2LMHeadModel(config)

    vocab = options.get("vocab_size", VOCAB)
    return Case(build, lambda: {"input_ids": torch.randint(vocab, (1, num_tokens))})


CASES: dict[str, Case] = {
    "vit_b": _timm("vit_base_patch16_224", 8),
    "gpt2": _gpt2(512),
    "swin": _timm("swin_tiny_patch4_window7_224", 8),
    "xcit": _timm("xcit_small_12_p16_224", 8),
}
TINY: dict[str, Case] = {
    "vit_b": _timm("vit_tiny_patch16_224", 2, img_size=32, depth=2),
    "gpt2": _gpt2(16, n_layer=2, n_embd=48, n_head=3, vocab_size=101),
    "swin": _timm("swin_tiny_patch4_window7_224", 1, img_size=56, depths=(1, 1), embed_dim=24),
    "xcit": _timm("xcit_nano_12_p16_224", 1, img_size=32, depth=2),
}
"""The same architectures, small enough to see whether everything runs."""
LARGE, LARGE_TINY = "vit_large_patch16_224", "vit_tiny_patch16_224"


def training_step(model: nn.Module, batch: dict[str, Tensor] | Tensor) -> Callable[[], None]:
    """Return a forward and backward pass as a call without arguments."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        output = model(batch) if isinstance(batch, Tensor) else model(**batch).logits
        output.float().square().mean().backward()

    return step


def measure_model(
    stock: nn.Module, variants: list[str], case: Case, repeats: int
) -> dict[str, dict[str, Any]]:
    """Compare converted copies with stock: every round steps each of them once.

    Args:
        stock: The model as its library made it, in training mode.
        variants: What to convert to.
        case: For the batch.
        repeats: Timed rounds.

    Returns:
        For each variant ``throughput``: converted over stock, median of the rounds, with its
        range; ``memory``: parameters and peak of a step, converted over stock; or ``refused``
        with the reason.
    """
    models, rows, batch = {"stock": stock}, {}, case.batch()
    for variant in variants:
        converted = copy.deepcopy(stock)
        try:
            convert(converted, variant, start="paper")
            models[variant] = converted
        except ValueError as refusal:
            rows[variant] = {"refused": str(refusal)}
    steps = {name: training_step(model, batch) for name, model in models.items()}
    times = compare_times(steps, repeats)
    peaks = {
        name: peak_extra_bytes(step) + _parameter_bytes(models[name])
        for name, step in steps.items()
    }
    for variant in models.keys() - {"stock"}:
        row = ratios({name: times[name] for name in ("stock", variant)}, variant)["stock"]
        rows[variant] = {
            "throughput": row["ratio"],
            "throughput_min": row["ratio_min"],
            "throughput_max": row["ratio_max"],
            "stock_s": row["median_s"],
            "memory": peaks[variant] / peaks["stock"],
        }
    return {variant: rows[variant] for variant in variants}


def _parameter_bytes(model: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())


def measure_conversion(name: str, variants: list[str], repeats: int) -> dict[str, float]:
    """Time the conversion itself.

    Args:
        name: A timm model.
        variants: What to convert to.
        repeats: Fresh copies for each.

    Returns:
        Median seconds for each variant.
    """
    import timm

    stock = timm.create_model(name)
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    for variant in variants * repeats:
        model = copy.deepcopy(stock)
        start = time.perf_counter()
        convert(model, variant)
        seconds[variant].append(time.perf_counter() - start)
        del model
    return {variant: statistics.median(values) for variant, values in seconds.items()}


def run(
    models: list[str], variants: list[str], repeats: int, is_tiny: bool = False
) -> dict[str, Any]:
    """Run the whole benchmark.

    Args:
        models: Names in ``CASES``.
        variants: Variant strings.
        repeats: Timed rounds.
        is_tiny: Take small models: to see that everything runs, not how fast.

    Returns:
        One JSON-able record, the machine included.
    """
    cases = TINY if is_tiny else CASES
    found: dict[str, dict[str, Any]] = {}
    for name in models:
        require_known("model", name, cases)
        torch.manual_seed(0)
        stock = cases[name].build().train()
        found[name] = measure_model(stock, variants, cases[name], repeats)
        del stock
        gc.collect()
    return {
        "benchmark": "models",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": platform.processor(),
        "machine": platform.machine(),
        "repeats": repeats,
        "is_tiny": is_tiny,
        "models": found,
        "conversion_s": measure_conversion(LARGE_TINY if is_tiny else LARGE, variants, 3),
    }


def bar(model: str, variant: str) -> float | None:
    """Return the least throughput a variant must reach on a model, None where none is set.

    Args:
        model: A name in ``CASES``.
        variant: A variant string.
    """
    if model in UNFUSED:
        return UNFUSED_BAR
    return THROUGHPUT_BARS.get(variant)


def table(record: dict[str, Any]) -> str:
    """Return the record as text: a line per model and variant, with what was asked of it."""
    lines = [f"training step, converted over stock, {record['threads']} threads"]
    lines.append(f"{'model':8s} {'variant':16s} throughput (range)         bar  memory")
    for model, rows in record["models"].items():
        for variant, row in rows.items():
            if "refused" in row:
                lines.append(f"{model:8s} {variant:16s} refused: {row['refused']:.60}")
                continue
            least = bar(model, variant)
            wanted = "  -" if least is None else f"{least:.2f}"
            spread = f"({row['throughput_min']:.2f} .. {row['throughput_max']:.2f})"
            lines.append(
                f"{model:8s} {variant:16s} {row['throughput']:5.3f} {spread:18s}"
                f" {wanted:>4s}   {row['memory']:.3f}"
            )
    lines.append(f"conversion of a ViT-L, at most {CONVERT_BAR_S} s:")
    lines += [f"  {name:24s} {value:.2f} s" for name, value in record["conversion_s"].items()]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark from the command line.

    Args:
        argv: Arguments; those of the process by default.

    Returns:
        0.
    """
    parser = argparse.ArgumentParser(prog="levelhead bench models", description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--variants", nargs="+", default=["softmax", *THROUGHPUT_BARS])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="small models, to see that it runs")
    parser.add_argument("--out", type=Path, help="write the record here as JSON")
    parser.add_argument("--json", action="store_true", help="print the record as JSON")
    chosen = parser.parse_args(argv)
    record = run(chosen.models, chosen.variants, chosen.repeats, chosen.tiny)
    text = json.dumps(record, indent=2)
    print(text if chosen.json else table(record))
    if chosen.out is not None:
        temporary = chosen.out.with_suffix(".tmp")
        temporary.write_text(text + "\n")
        temporary.replace(chosen.out)
    return 0

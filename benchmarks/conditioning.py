"""Follow kappa of the attention Jacobian through training, beside the papers' surrogate.

    apt-get install dataset-fashion-mnist
    python benchmarks/conditioning.py               # 40 minutes on two cores
    python benchmarks/conditioning.py --data digits --seeds 2 --steps 40     # a try

The trainings are those of benchmarks/initializers.py and lie in the same folder; finished ones are
kept. The record is written at the end, and by itself with --only-write.
"""

import argparse
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from initializers import (
    Start,
    called,
    finished,
    heading,
    reading,
    settings_of,
    train_missing,
)
from torch import Tensor, nn

from levelhead.attention import Attention
from levelhead.harness.tasks import ImageClassification, Task, make_task
from levelhead.measure.jacobian import jacobian_condition
from levelhead.measure.surrogate import jacobian_surrogate

STARTS = (
    ("softmax", "default"),  # spectral(strength=0) is this one
    ("softmax", "mimetic"),
    ("softmax", "conditioned"),
    ("softmax", "conditioned(gain='match')"),
    ("spectral(strength=1)", "default"),
    ("spectral(strength=10)", "default"),
)
LOOKS = 2  # and one before the first step

Measured = list[list[dict[str, float]]]
"""Numbers of each head of each layer."""


@torch.no_grad()
def head_conditioning(task: Task, model: nn.Module, seed: int) -> Measured:
    """Measure every head's Jacobian to its weights on one test image.

    Args:
        task: Holds the images.
        model: A ViT on ``Attention``, without projection biases.
        seed: Which test image: all starts of a seed see the same one.

    Returns:
        ``kappa`` over the non-zero singular values, ``rank``, ``rows`` (T D; a smaller rank
        means that the literal kappa is infinite) and the papers' ``surrogate``.
    """
    assert isinstance(task, ImageClassification)
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    inputs: list[Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0])) for layer in layers
    ]
    was_training = model.training
    model.eval()(task.data.test_images[seed : seed + 1])
    model.train(was_training)
    for hook in hooks:
        hook.remove()
    return [_layer(layer, states[0]) for layer, states in zip(layers, inputs, strict=True)]


def _layer(layer: Attention, hidden_states: Tensor) -> list[dict[str, float]]:
    identity = torch.eye(hidden_states.shape[-1])
    weights = [
        layer.projections.project(which, identity, linear.weight, None)
        .unflatten(-1, (layer.num_heads, -1))
        .unbind(1)
        for which, linear in (("q", layer.q_proj), ("k", layer.k_proj), ("v", layer.v_proj))
    ]
    return [_head(hidden_states, head, layer.scale) for head in zip(*weights, strict=True)]


def _head(hidden_states: Tensor, weights: Sequence[Tensor], scale: float) -> dict[str, float]:
    found = jacobian_condition(hidden_states, *weights, scale=scale, method="dense")
    surrogate = jacobian_surrogate(hidden_states, *weights, scale=scale)
    assert found.rank is not None
    return {
        "kappa": found.kappa,
        "rank": found.rank,
        "rows": found.shape[0],
        "surrogate": surrogate.value,
    }


def conditioning_table(records: Sequence[dict[str, Any]], number: str) -> Iterator[str]:
    """Write how a number of all heads moves through training.

    Args:
        records: Finished trainings with what was watched.
        number: ``"kappa"`` or ``"surrogate"``.

    Yields:
        Lines of Markdown: median and maximum over heads, mean and spread over seeds.
    """
    steps = [look["step"] for look in records[0]["watched"]]
    yield "| start | n | " + " | ".join(f"step {step}" for step in steps) + " |"
    yield "|---" * (len(steps) + 2) + "|"
    for start in STARTS:
        mine = [r for r in records if (r["variant"], r["init"]) == start]
        cells = [_cell(mine, look, number) for look in range(len(steps))]
        yield f"| `{called(start)}` | {len(mine)} | " + " | ".join(cells) + " |"


def _cell(records: Sequence[dict[str, Any]], look: int, number: str) -> str:
    heads = [_heads(record, look) for record in records]
    medians = [statistics.median(head[number] for head in seed) for seed in heads]
    largest = [max(head[number] for head in seed) for seed in heads]
    return f"{_spread(medians)}; max {_spread(largest)}"


def _heads(record: dict[str, Any], look: int) -> list[dict[str, float]]:
    return [head for layer in record["watched"][look]["seen"] for head in layer]


def _spread(values: Sequence[float]) -> str:
    """Geometric mean and range: the numbers span orders of magnitude."""
    if not all(map(math.isfinite, values)):
        return "inf"
    mean = math.exp(statistics.fmean(map(math.log, values)))
    return f"{mean:.3g} [{min(values):.3g}, {max(values):.3g}]"


def literal(records: Sequence[dict[str, Any]]) -> str:
    """Say in how many of the measured heads the literal kappa is infinite."""
    heads = [
        head for r in records for look in range(len(r["watched"])) for head in _heads(r, look)
    ]
    deficient = sum(head["rank"] < head["rows"] for head in heads)
    return (
        f"J lacks full row rank, and its literal kappa is infinite, in {deficient} of "
        f"{len(heads)} measured heads."
    )


CONVENTION = """Kappa is over the non-zero singular values (above max(shape) eps sigma_max in
float64) of J = [dA/dW_Q, dA/dW_K, dA/dW_V] of each head, on one test image a seed (the same one
for all starts). A cell holds the median over all heads of all layers, then the largest; of each
the geometric mean over seeds and [smallest, largest]. With spectral conditioning the weights are
the conditioned ones, W + strength I. `spectral(strength=0)` is `default` itself. Singular values
below the threshold count as zero, so no kappa can exceed 1 / (max(shape) eps), here 1.2e11: many
background patches of these images are alike, which leaves P X all but rank-deficient."""
SURROGATE = """kappa(X)^3 kappa(Lambda) kappa(W_V) (kappa(W_Q) + kappa(W_K)) + kappa(X) kappa(P),
every kappa over the non-zero singular values. It is not a bound on kappa(J)."""


def record_lines(task: Task, records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Write the record of one task.

    Args:
        task: What was trained.
        records: All finished trainings of the task with what was watched.

    Yields:
        Lines of Markdown.
    """
    yield from reading(task, records, STARTS)
    yield f"\n## kappa(J)\n\n{CONVENTION} {literal(records)}\n"
    yield from conditioning_table(records, "kappa")
    yield f"\n## The papers' surrogate\n\n{SURROGATE}\n"
    yield from conditioning_table(records, "surrogate")
    yield ""


def main() -> None:
    """Train and watch, then write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="fashion_mnist")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/initializers"))
    parser.add_argument("--record", type=Path, help="Markdown file to write; default in --out.")
    parser.add_argument("--only-write", action="store_true", help="Train nothing.")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    settings = settings_of(arguments.data, arguments.steps)
    path = arguments.out / "cells.jsonl"
    if not arguments.only_write:
        train_missing(
            {settings.name: settings}, STARTS, arguments.seeds, path, arguments.workers,
            head_conditioning, LOOKS,
        )  # fmt: skip
    lines = heading("Conditioning of the attention Jacobian through training")
    chosen: list[Start] = list(STARTS)
    records = [
        r
        for r in finished(path)
        if r["task"] == settings.name and (r["variant"], r["init"]) in chosen and r["watched"]
    ]
    lines += record_lines(make_task(settings), records)
    record = arguments.record or arguments.out / "conditioning.md"
    record.write_text("\n".join(lines))
    print(f"written: {record}")


if __name__ == "__main__":
    main()

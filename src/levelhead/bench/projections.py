"""Every term on the projections against plain ones: time of q, k and v, in one process."""

import argparse
import json
import platform
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from levelhead.attention import Attention
from levelhead.bench.arguments import device, out_file, positive
from levelhead.bench.attention import BATCH, HEAD_DIM, NUM_HEADS, Case, plain_sdpa
from levelhead.bench.timing import adjacent_times, spread
from levelhead.harness.runs import replace_text
from levelhead.parts.projections import WHICH
from levelhead.steps import track_steps
from levelhead.variants import VARIANTS

OPTIONS = {"spectral": ("spectral", "spectral(form='svd')")}
"""Forms that cost something else."""


def projection_variants() -> list[str]:
    """Return a variant string for every term on the projections, and each of its forms."""
    names = [name for name, info in VARIANTS.items() if info.stage == "projections"]
    return [form for name in names for form in OPTIONS.get(name, (name,))]


def project_with(variant: str, hidden_states: Tensor) -> Callable[[], None]:
    """Return the projections to q, k and v under a variant, forward and backward.

    Args:
        variant: A term on the projections, or "softmax" for plain ones.
        hidden_states: ``[B, T, E]``; a gradient for each projection is drawn alike.

    Returns:
        One training step of them, without an optimiser's.
    """
    width = hidden_states.shape[-1]
    attention = Attention(width, NUM_HEADS, variant=variant).to(hidden_states)
    track_steps(attention)
    linears = dict(zip(WHICH, (attention.q_proj, attention.k_proj, attention.v_proj), strict=True))
    inputs = hidden_states.clone().requires_grad_()
    grads = [torch.randn_like(hidden_states) for _ in linears]

    def run() -> None:
        inputs.grad = None
        attention.zero_grad()
        projected = [
            attention.projections.project(which, inputs, linear.weight, linear.bias)
            for which, linear in linears.items()
        ]
        torch.autograd.backward(projected, grads)

    return run


def measure_times(
    num_tokens: int, repeats: int, seconds: float, device: str, dtype: torch.dtype
) -> dict[str, Any]:
    """Time every term at one length, each right beside plain projections.

    Args:
        num_tokens: T.
        repeats: Least timed rounds.
        seconds: Least time spent on them.
        device: Where.
        dtype: Of all tensors.

    Returns:
        By variant, the ratio to plain projections; those, and what each adds to them, over plain
        SDPA at the same length.
    """
    case = Case(num_tokens, BATCH, device, dtype)
    plain = project_with("softmax", case.hidden_states)
    calls = {"plain": project_with("softmax", case.hidden_states)}
    calls |= {v: project_with(v, case.hidden_states) for v in projection_variants()}
    sdpa = case.step(plain_sdpa, backward=True)
    for call in (plain, sdpa, *calls.values()):  # the warm-up
        call()
    pairs = adjacent_times(plain, calls | {"sdpa": sdpa}, repeats, seconds)
    over_sdpa = [own / attention for own, attention in pairs.pop("sdpa")]
    share = statistics.median(over_sdpa)
    rows = {
        name: spread([own / base for base, own in found], "ratio")
        for name, found in pairs.items()
    }  # fmt: skip
    for row in rows.values():
        row["added_over_sdpa"] = (row["ratio"] - 1) * share
    return {
        "tokens": num_tokens,
        "plain_over_sdpa": spread(over_sdpa, "ratio"),
        "over_plain": rows,
    }


def table(record: dict[str, Any]) -> str:
    """Return the record as text: a line per variant."""
    lines = []
    for times in record["times"]:
        lines.append(
            f"{times['tokens']} tokens: time of q, k and v, forward and backward, over plain ones "
            f"({times['plain_over_sdpa']['ratio']:.2f} of plain SDPA's), and added over SDPA's"
        )
        for name, row in times["over_plain"].items():
            low, high = row["interval"]
            interval = f"({low:.3f} .. {high:.3f})"
            lines.append(
                f"  {name:24s} {row['ratio']:6.3f} {interval} {row['added_over_sdpa']:+6.3f}"
            )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark from the command line.

    Args:
        argv: Arguments; those of the process by default.

    Returns:
        0.
    """
    parser = argparse.ArgumentParser(prog="levelhead bench projections", description=__doc__)
    parser.add_argument("--tokens", type=positive, nargs="+", default=[1024, 4096])
    parser.add_argument("--repeats", type=positive, default=21, help="least timed rounds")
    parser.add_argument("--seconds", type=float, default=0.0, help="least time spent on them")
    parser.add_argument("--device", type=device, default="cpu")
    parser.add_argument("--out", type=out_file, help="write the record here as JSON")
    parser.add_argument("--json", action="store_true", help="print the record as JSON")
    chosen = parser.parse_args(argv)
    record = {
        "benchmark": "projections",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "dtype": "float32",
        "batch": BATCH,
        "heads": NUM_HEADS,
        "head_dim": HEAD_DIM,
        "repeats": chosen.repeats,
        "seconds": chosen.seconds,
        "times": [
            measure_times(n, chosen.repeats, chosen.seconds, chosen.device, torch.float32)
            for n in chosen.tokens
        ],
    }
    text = json.dumps(record, indent=2)
    print(text if chosen.json else table(record))
    if chosen.out is not None:
        replace_text(chosen.out, text + "\n")
    return 0

"""Every variant against plain SDPA: time and memory, in one process, alternating."""

import argparse
import json
import platform
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from levelhead.bench.arguments import device, not_negative, out_file, positive
from levelhead.bench.attention_peers import SOFT_CAP, Precomputed, peer_version, peers
from levelhead.bench.timing import adjacent_times, compare_times, peak_extra_bytes, spread
from levelhead.compiled import find_compiler
from levelhead.harness.runs import replace_text
from levelhead.inner import InnerAttention
from levelhead.steps import track_steps
from levelhead.variants import VARIANTS

BATCH, NUM_HEADS, HEAD_DIM = 2, 12, 64
MEMORY_TOKENS = 8192
PEER_TOKENS = 2048
"""Longest sequence that x-transformers is timed at: it builds the matrix of scores for some."""
OPTIONS = {"soft_cap": f"soft_cap(cap={SOFT_CAP})"}


def inner_variants() -> list[str]:
    """Return a variant string for every term an inner attention can take."""
    names = [name for name, info in VARIANTS.items() if info.stage != "projections"]
    return [OPTIONS.get(name, name) for name in names]


class Case:
    """The same tensors for every variant: inputs, and a gradient for the output.

    Heads lie beside each other in memory, as projections write and read them. ``projected`` holds,
    by width, what a projection of the hidden states comes to.
    """

    def __init__(self, num_tokens: int, batch: int, device: str, dtype: torch.dtype):
        generator = torch.Generator().manual_seed(0)
        shape = (batch, num_tokens, NUM_HEADS, HEAD_DIM)
        draw = lambda *size: torch.randn(*size, generator=generator).to(device, dtype)  # noqa: E731
        self.qkv = [draw(*shape).transpose(1, 2).requires_grad_() for _ in range(3)]
        self.grad = draw(*shape).transpose(1, 2)
        self.hidden_states = draw(batch, num_tokens, NUM_HEADS * HEAD_DIM)
        widths = (NUM_HEADS, NUM_HEADS * HEAD_DIM)
        self.projected = {
            width: draw(batch, num_tokens, width).requires_grad_() for width in widths
        }

    def step(self, attend: Callable[..., Tensor], backward: bool) -> Callable[[], None]:
        """Return one forward (and backward) as a call without arguments."""

        def run() -> None:
            for tensor in (*self.qkv, *self.projected.values()):
                tensor.grad = None
            with torch.set_grad_enabled(backward):
                attn_output = attend(*self.qkv)
                if backward:
                    attn_output.backward(self.grad)

        return run


def plain_sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention as torch has it: the baseline."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def attend_with(variant: str, case: Case) -> Callable[..., Tensor]:
    """Return causal attention of a variant.

    The products of a method's own projections (alpha, gate) are left out, as the issue of time
    is the attention: they are computed once before and timed by ``projection_ms``.
    """
    like = case.qkv[0]
    inner = InnerAttention(
        variant, embed_dim=NUM_HEADS * HEAD_DIM, num_heads=NUM_HEADS,
        device=like.device, dtype=like.dtype,
    )  # fmt: skip
    track_steps(inner)
    _precompute_projections(inner, case)
    return lambda *qkv: inner(*qkv, case.hidden_states, is_causal=True)


def _precompute_projections(inner: InnerAttention, case: Case) -> None:
    for part in (inner.weights, inner.gate):
        for name, child in list(part.named_children()) if part is not None else []:
            if isinstance(child, torch.nn.Linear):
                setattr(part, name, Precomputed(case.projected[child.out_features]))


def projection_calls(case: Case) -> dict[str, Callable[[], None]]:
    """Return the projections of affine and gate by themselves, forward and backward."""
    width = NUM_HEADS * HEAD_DIM
    sizes = {"affine": NUM_HEADS, "gate": width, "gate(granularity='headwise')": NUM_HEADS}
    calls = {}
    for name, rows in sizes.items():
        linear = torch.nn.Linear(width, rows, bias=False).to(case.grad)
        hidden_states = case.hidden_states.clone().requires_grad_()
        calls[name] = lambda linear=linear, x=hidden_states: linear(x).sum().backward()
    return calls


def measure_times(
    num_tokens: int, repeats: int, seconds: float, device: str, dtype: torch.dtype
) -> dict:
    """Time all variants, and their peers, at one length, each right beside what it is held to.

    Args:
        num_tokens: T.
        repeats: Least timed rounds.
        seconds: Least time spent on those of one comparison.
        device: Where.
        dtype: Of all tensors.

    Returns:
        Ratios to plain SDPA, forward alone and forward with backward; ratios to x-transformers;
        times of the projections.
    """
    case = Case(num_tokens, BATCH, device, dtype)
    # Plain SDPA beside itself tells how far a figure can be told.
    calls = {"sdpa": plain_sdpa} | {v: attend_with(v, case) for v in inner_variants()}
    rivals = peers(case) if num_tokens <= PEER_TOKENS else {}
    others = {f"x-transformers {name}": call for name, call in rivals.items()}
    result: dict[str, Any] = {"tokens": num_tokens}
    for name, backward in (("forward", False), ("forward_backward", True)):
        steps = {n: case.step(call, backward) for n, call in (calls | others).items()}
        plain = case.step(plain_sdpa, backward)
        result[name] = _held_to(plain, steps, repeats, seconds)
        result[f"{name}_over_x_transformers"] = {
            variant: _held_to(
                steps[f"x-transformers {variant}"], {variant: steps[variant]}, repeats,
                seconds / len(rivals),
            )[variant]
            for variant in rivals
        }  # fmt: skip
    projections = compare_times(projection_calls(case), repeats)
    base = result["forward_backward"]["sdpa"]["baseline_s"]
    result["projection_over_sdpa"] = {
        name: statistics.median(times) / base for name, times in projections.items()
    }
    return result


def _held_to(
    baseline: Callable[[], None],
    calls: dict[str, Callable[[], None]],
    repeats: int,
    seconds: float,
) -> dict[str, dict[str, Any]]:
    """Return what the times of calls come to over those of the baseline beside them."""
    for call in (baseline, *calls.values()):  # the warm-up
        call()
    pairs = adjacent_times(baseline, calls, repeats, seconds)
    return {
        name: spread([own / base for base, own in found], "ratio")
        | {"baseline_s": statistics.median(base for base, _ in found)}
        for name, found in pairs.items()
    }


def measure_memory(num_tokens: int, device: str, dtype: torch.dtype) -> dict[str, dict]:
    """Measure the peak memory of a training step of every variant, beyond that of plain SDPA.

    Returns:
        Extra bytes, and as a share of one T x S float32 matrix per head.
    """
    case = Case(num_tokens, 1, device, dtype)
    calls = {"sdpa": plain_sdpa} | {v: attend_with(v, case) for v in inner_variants()}
    # Gradients exist from here on, counted, so that every step frees them: the baseline's too.
    peak_extra_bytes(case.step(plain_sdpa, True), device)
    peaks = {n: peak_extra_bytes(case.step(call, True), device) for n, call in calls.items()}
    matrix = NUM_HEADS * num_tokens**2 * torch.finfo(torch.float32).bits // 8
    return {
        name: {"extra_mib": (peak - peaks["sdpa"]) / 2**20,
               "share_of_scores": (peak - peaks["sdpa"]) / matrix}
        for name, peak in peaks.items()
    }  # fmt: skip


def run(
    tokens: list[int], repeats: int, seconds: float, memory_tokens: int, device: str, dtype: str
) -> dict:
    """Run the whole benchmark.

    Returns:
        One JSON-able record, the machine included.
    """
    torch_dtype = getattr(torch, dtype)
    return {
        "benchmark": "attention",
        "torch": torch.__version__,
        "x_transformers": peer_version(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "machine": platform.machine(),
        "compiler": find_compiler(),
        "dtype": dtype,
        "batch": BATCH,
        "heads": NUM_HEADS,
        "head_dim": HEAD_DIM,
        "causal": True,
        "repeats": repeats,
        "seconds": seconds,
        "times": [measure_times(n, repeats, seconds, device, torch_dtype) for n in tokens],
        "memory_tokens": memory_tokens,
        "memory": measure_memory(memory_tokens, device, torch_dtype) if memory_tokens else {},
    }


def table(record: dict) -> str:
    """Return the record as text: a line per variant."""
    lines = []
    for times in record["times"]:
        lines.append(
            f"{times['tokens']} tokens: time over plain SDPA (forward, with backward, interval)"
        )
        for name, row in times["forward_backward"].items():
            peer = times["forward_backward_over_x_transformers"].get(name)
            tail = f"   over x-transformers {_text(peer)}" if peer else ""
            forward = times["forward"][name]["ratio"]
            lines.append(f"  {name:34s} {forward:5.2f} {_text(row)}{tail}")
        for name, share in times["projection_over_sdpa"].items():
            lines.append(f"  projection of {name:20s}       {share:5.2f}")
    if record["memory"]:
        lines.append(f"{record['memory_tokens']} tokens: extra memory, share of T x S per head")
        for name, row in record["memory"].items():
            lines.append(f"  {name:34s} {row['share_of_scores']:7.2%}")
    return "\n".join(lines)


def _text(row: dict[str, Any]) -> str:
    low, high = row["interval"]
    return f"{row['ratio']:5.2f} ({low:.2f} .. {high:.2f})"


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark from the command line.

    Args:
        argv: Arguments; those of the process by default.

    Returns:
        0.
    """
    parser = argparse.ArgumentParser(prog="levelhead bench attention", description=__doc__)
    parser.add_argument("--tokens", type=positive, nargs="+", default=[1024, 4096])
    parser.add_argument("--repeats", type=positive, default=7, help="least timed rounds")
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="least time spent on a comparison's rounds"
    )
    parser.add_argument(
        "--memory-tokens", type=not_negative, default=MEMORY_TOKENS, help="0 to leave out"
    )
    parser.add_argument(
        "--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--out", type=out_file, help="write the record here as JSON")
    parser.add_argument("--json", action="store_true", help="print the record as JSON")
    chosen = parser.parse_args(argv)
    record = run(
        chosen.tokens, chosen.repeats, chosen.seconds, chosen.memory_tokens, chosen.device,
        chosen.dtype,
    )  # fmt: skip
    text = json.dumps(record, indent=2)
    print(text if chosen.json else table(record))
    if chosen.out is not None:
        replace_text(chosen.out, text + "\n")
    return 0

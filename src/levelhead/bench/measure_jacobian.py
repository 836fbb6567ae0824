"""Kappa of the attention Jacobian: time, memory and error, and how tight the bounds are."""

import argparse
import json
import platform
import time
from pathlib import Path

import torch
from torch import Tensor

from levelhead.bench.timing import compare_times, peak_extra_rss_bytes, ratios
from levelhead.measure.certificate import ends_are_certified
from levelhead.measure.gram import weight_gram
from levelhead.measure.head import attention_head
from levelhead.measure.jacobian import jacobian_condition
from levelhead.measure.linearise import linearise
from levelhead.measure.lipschitz_interval import lipschitz_interval
from levelhead.measure.surrogate import jacobian_bound

# What the figures must stay below.
DENSE_BAR, DENSE_ERROR_BAR = 0.1, 1e-8
LANCZOS_SECONDS_BAR, LANCZOS_BYTES_BAR, LANCZOS_ERROR_BAR = 90.0, 4.5e9, 1e-6
_INIT_STD = 0.02  # the usual truncated normal of vision transformers


def normed_head(num_tokens: int, embed_dim: int, head_dim: int, device: str) -> tuple[Tensor, ...]:
    """Return LayerNormed hidden states and freshly initialised weights of one head, float32.

    Args:
        num_tokens: T.
        embed_dim: E.
        head_dim: D.
        device: Where to put them.

    Returns:
        Hidden states, q, k and v weight.
    """
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(num_tokens, embed_dim, generator=generator)
    weights = [_INIT_STD * torch.randn(embed_dim, head_dim, generator=generator) for _ in range(3)]
    states = torch.nn.functional.layer_norm(states, (embed_dim,))
    return tuple(tensor.to(device) for tensor in (states, *weights))


def measure_dense(size: tuple[int, int, int], repeats: int, device: str) -> list[dict]:
    """Compare the dense and the Lanczos method with autograd's Jacobian and its SVD.

    Args:
        size: T, E, D.
        repeats: Rounds; autograd takes about a minute each at T 65, E 192, D 32.
        device: Where to run.

    Returns:
        A record for each method: ratio of times, and the relative error of kappa.
    """
    arguments, scale = normed_head(*size, device), size[2] ** -0.5
    found = {}

    def call(method: str) -> None:
        found[method] = jacobian_condition(*arguments, scale=scale, method=method)

    methods = ("dense", "lanczos", "autograd")
    calls = {method: (lambda method=method: call(method)) for method in methods}
    compared = ratios(compare_times(calls, repeats, warmup=0), "autograd")
    records = []
    for method in methods[:2]:
        error = abs(found[method].kappa / found["autograd"].kappa - 1)
        name = f"{method} {list(size)}"
        records.append(_record(f"{name}, time / autograd and SVD", compared[method], DENSE_BAR))
        records.append(_record(f"{name}, error of kappa", {"ratio": error}, DENSE_ERROR_BAR))
    return records


def measure_lanczos(size: tuple[int, int, int], device: str) -> list[dict]:
    """Time one head at the size of ViT-B, watch its memory, and certify its kappa.

    Args:
        size: T, E, D.
        device: Where to run.

    Returns:
        Records of seconds, bytes and the certified relative error of kappa.
    """
    arguments, scale = normed_head(*size, device), size[2] ** -0.5
    found = {}

    def call() -> None:
        start = time.perf_counter()
        found["kappa"] = jacobian_condition(*arguments, scale=scale, method="lanczos")
        found["seconds"] = time.perf_counter() - start

    memory = peak_extra_rss_bytes(call)
    linear = linearise(attention_head(*arguments, scale=scale))
    certified = ends_are_certified(
        lambda: weight_gram(linear),
        found["kappa"].sigma_min,
        found["kappa"].sigma_max,
        LANCZOS_ERROR_BAR / 2,
    )
    error = LANCZOS_ERROR_BAR if certified else float("inf")
    name, kappa = f"lanczos {list(size)}", found["kappa"].kappa
    return [
        _record(f"{name}, seconds", {"ratio": found["seconds"]}, LANCZOS_SECONDS_BAR, kappa=kappa),
        _record(f"{name}, bytes", {"ratio": float(memory)}, LANCZOS_BYTES_BAR),
        _record(f"{name}, certified error of kappa", {"ratio": error}, LANCZOS_ERROR_BAR),
    ]


def measure_tightness(count: int) -> list[dict]:
    """How far the bounds lie above what they bound, on small random nets.

    Args:
        count: Nets for each bound.

    Returns:
        Records of the median ratio; ``holds`` says that no net violated the bound.
    """
    kappa, lipschitz, local = [], [], []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        normal = {"generator": generator, "dtype": torch.float64}
        states = torch.randn(5, 7, **normal)
        query, key, value, output = 0.5 * torch.randn(4, 7, 3, **normal)
        exact = jacobian_condition(states, query, key, value, scale=3**-0.5).kappa
        kappa.append(jacobian_bound(states, query, key, value, scale=3**-0.5).kappa / exact)
        found = lipschitz_interval(
            states, query, key, value, 2 * output.mT, num_heads=1, scale=3**-0.5
        )
        lipschitz.append(found.bound / found.found)
        local.append(found.local_bound / found.found)
    figures = {"kappa bound": kappa, "Lipschitz bound": lipschitz, "local Lipschitz bound": local}
    return [_tightness(name, values) for name, values in figures.items()]


def run(repeats: int, nets: int, device: str, small: bool = False) -> dict:
    """Run the whole benchmark.

    Args:
        repeats: Rounds of the comparison with autograd.
        nets: Random nets for the tightness of the bounds.
        device: Where to run.
        small: Sizes of a few seconds, for a first look; the bars are meant for the full sizes.

    Returns:
        One JSON-able record, the machine included.
    """
    dense_size = (17, 48, 8) if small else (65, 192, 32)
    lanczos_size = (33, 96, 16) if small else (197, 768, 64)
    return {
        "benchmark": "measure-jacobian",
        "torch": torch.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "device": device,
        "results": [
            *measure_lanczos(lanczos_size, device),
            *measure_dense(dense_size, repeats, device),
            *measure_tightness(nets),
        ],
    }


def main(argv: list[str] | None = None) -> int:
    """Run from the command line.

    Args:
        argv: Arguments, those of the process if None.

    Returns:
        0 if every figure stays below its bar, else 1.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--nets", type=int, default=100)
    parser.add_argument("--small", action="store_true", help="small sizes, for a first look")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="also write the record here")
    chosen = parser.parse_args(argv)
    record = run(chosen.repeats, chosen.nets, chosen.device, chosen.small)
    for row in record["results"]:
        bar = f"bar {row['bar']:.3g}" if "bar" in row else ""
        verdict = "ok" if row["holds"] else "ABOVE"
        print(f"{verdict:5} {row['ratio']:12.4g} {bar:12} {row['name']}")
    if chosen.json:
        chosen.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(row["holds"] for row in record["results"]) else 1


def _record(name: str, found: dict[str, float], bar: float, **more: float) -> dict:
    return {"name": name, "bar": bar, "holds": found["ratio"] <= bar, **found, **more}


def _tightness(name: str, ratios_above_one: list[float]) -> dict:
    values = torch.tensor(ratios_above_one, dtype=torch.float64)
    return {
        "name": f"{name} / exact or found, median of {len(values)} nets",
        "holds": bool((values >= 1 - 1e-9).all()),
        "ratio": float(values.median()),
        "ratio_min": float(values.min()),
        "ratio_max": float(values.max()),
    }

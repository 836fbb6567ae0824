"""Kappa of the attention Jacobian: time, memory and error, and how tight the bounds are."""

import time

import torch
from torch import Tensor

from levelhead.bench.measure_rows import record
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
FULL_SIZES = {"lanczos": (197, 768, 64), "dense": (65, 192, 32)}
SMALL_SIZES = {"lanczos": (33, 96, 16), "dense": (17, 48, 8)}
"""T, E, D of one head; the bars are meant for the full sizes."""
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
        records.append(record(f"{name}, time / autograd and SVD", compared[method], DENSE_BAR))
        records.append(record(f"{name}, error of kappa", {"ratio": error}, DENSE_ERROR_BAR))
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
        record(f"{name}, seconds", {"ratio": found["seconds"]}, LANCZOS_SECONDS_BAR, kappa=kappa),
        record(f"{name}, bytes", {"ratio": float(memory)}, LANCZOS_BYTES_BAR),
        record(f"{name}, certified error of kappa", {"ratio": error}, LANCZOS_ERROR_BAR),
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


def _tightness(name: str, ratios_above_one: list[float]) -> dict:
    values = torch.tensor(ratios_above_one, dtype=torch.float64)
    return {
        "name": f"{name} / exact or found, median of {len(values)} nets",
        "holds": bool((values >= 1 - 1e-9).all()),
        "ratio": float(values.median()),
        "ratio_min": float(values.min()),
        "ratio_max": float(values.max()),
    }

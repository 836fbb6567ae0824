"""Seconds and peak extra memory of initialising ViT-B and the attention of a 1.7 B GPT-2.

    python benchmarks/initialize.py                          # conditioned on both
    python benchmarks/initialize.py --initializers mimetic orthogonal --models vit_b

The GPT-2 is built as its attentions alone, a few layers, and the seconds are scaled to all.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn

from levelhead.attention import Attention
from levelhead.bench.timing import peak_extra_bytes
from levelhead.initialize import initialize_

GPT2_WIDTH, GPT2_HEADS, GPT2_LAYERS = 1664, 26, 50  # 12 * width^2 * layers = 1.66e9 parameters
GPT2_BUILT = 2


def vit_b() -> tuple[nn.Module, int, float]:
    """ViT-B, 86 M parameters, whole; its width, and how many times it repeats: once."""
    import timm

    return timm.create_model("vit_base_patch16_224"), 768, 1.0


def gpt2() -> tuple[nn.Module, int, float]:
    """A few attentions of a GPT-2 of 1.7 B parameters, their width, and how often they repeat."""
    layers = (Attention(GPT2_WIDTH, GPT2_HEADS, qkv_bias=True) for _ in range(GPT2_BUILT))
    return nn.ModuleList(layers), GPT2_WIDTH, GPT2_LAYERS / GPT2_BUILT


MODELS: dict[str, Callable[[], tuple[nn.Module, int, float]]] = {"vit_b": vit_b, "gpt2_1.7b": gpt2}


def measure(model_name: str, initializer: str) -> str:
    """Time one initialisation (wall and processor time) and weigh another.

    Args:
        model_name: One of ``MODELS``.
        initializer: As for ``initialize_``.

    Returns:
        One line.
    """
    model, width, repeats = MODELS[model_name]()
    initialize_(model, initializer)  # libraries load once
    wall, processor = time.perf_counter(), time.process_time()
    initialize_(model, initializer)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    extra = peak_extra_bytes(lambda: initialize_(model, initializer))
    layer_bytes = 12 * width**2 * 4
    return (
        f"{model_name:10} {initializer:28} {wall * repeats:7.2f} s wall "
        f"{processor * repeats:7.2f} s processor {extra / 2**20:7.1f} MiB extra "
        f"= {extra / layer_bytes:.2f} layers"
    )


def main() -> None:
    """Print one line for each model and initialiser."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--initializers", nargs="+", default=["conditioned"])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for model_name in arguments.models:
        for initializer in arguments.initializers:
            print(measure(model_name, initializer), flush=True)


if __name__ == "__main__":
    main()

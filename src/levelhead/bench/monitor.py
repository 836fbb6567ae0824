"""What watching costs: a measured step, a step in between, the default cadence, and diagnose."""

import argparse
import gc
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.bench.timing import compare_times, peak_extra_bytes, ratios
from levelhead.diagnose import diagnose
from levelhead.harness.models.gpt import GPT, GPTConfig
from levelhead.harness.models.vit import ViT, ViTConfig
from levelhead.monitor import Monitor

CADENCE = 50
# What the figures must stay below.
CADENCE_BAR, MEASURED_BAR = 1.03, 2.0
DIAGNOSE_BAR_S, JACOBIAN_BAR_S, MEMORY_BAR, FLAT_BAR = 60.0, 300.0, 1.3, 1.0


def small_vit() -> tuple[nn.Module, Tensor]:
    """Return the small ViT of the comparison and a batch of its size.

    Returns:
        Model and images.
    """
    model = ViT(ViTConfig(image_size=8, patch_size=2, num_channels=1, num_classes=10))
    return model, torch.randn(64, 1, 8, 8)


def gpt(num_layers: int, num_tokens: int) -> tuple[nn.Module, Tensor]:
    """Return a GPT of width 768 with twelve heads and one row of tokens.

    Args:
        num_layers: 12 for GPT-2's size.
        num_tokens: Length of the row.

    Returns:
        Model and tokens.
    """
    config = GPTConfig(
        vocab_size=256, context_length=num_tokens, embed_dim=768, num_heads=12,
        num_layers=num_layers,
    )  # fmt: skip
    return GPT(config), torch.randint(256, (1, num_tokens))


def measure_monitor(
    name: str, model: nn.Module, inputs: Tensor, repeats: int, folder: Path, steps: int = 1
) -> list[dict[str, Any]]:
    """Time a training step: unwatched, watched in between, watched and measured.

    Args:
        name: Of the model.
        model: To be trained.
        inputs: One batch.
        repeats: Rounds; each does ``steps`` steps of every kind.
        folder: For the JSONL files.
        steps: Of each timing; short steps want several.

    Returns:
        A record for the measured step and one for the default cadence.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    monitors = {
        "measured": Monitor(model, every=1, jsonl=folder / "measured.jsonl"),
        "between": Monitor(model, every=10**9, jsonl=folder / "between.jsonl"),
    }
    monitors["between"].step = 1  # its only measured step lies behind

    def step() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(inputs).float().square().mean().backward()
            optimizer.step()

    def watched(monitor: Monitor) -> Callable[[], None]:
        def call() -> None:
            with monitor:
                step()

        return call

    calls = {"plain": step} | {kind: watched(m) for kind, m in monitors.items()}
    found = ratios(compare_times(calls, repeats, warmup=2), "plain")
    between, measured = found["between"]["ratio"], found["measured"]["ratio"]
    cadence = {"ratio": ((CADENCE - 1) * between + measured) / CADENCE}
    return [
        _record(f"{name}: measured step / step", found["measured"], MEASURED_BAR),
        _record(f"{name}: every {CADENCE} / none", cadence, CADENCE_BAR, between=between),
    ]


def measure_growth(num_steps: int, folder: Path) -> list[dict[str, Any]]:
    """Count what lives after many measured steps of the small ViT, and after a tenth of them.

    Args:
        num_steps: How many, all of them measured.
        folder: For the JSONL file.

    Returns:
        One record: bytes of live tensors late over early, with the growth of the process.
    """
    model, inputs = small_vit()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    early = max(1, num_steps // 10)
    seen: dict[int, tuple[int, int]] = {}
    with Monitor(model, every=1, jsonl=folder / "growth.jsonl") as monitor:
        for step in range(1, num_steps + 1):
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            monitor.note(loss=loss)
            optimizer.step()
            if step in (early, num_steps):
                seen[step] = (live_tensor_bytes(), resident_bytes())
    (before, resident), (after, resident_after) = seen[early], seen[num_steps]
    name = f"small ViT: live tensors after {num_steps} measured steps / after {early}"
    grown = (resident_after - resident) / 2**20
    return [_record(name, {"ratio": after / before}, FLAT_BAR, process_growth_mib=grown)]


def live_tensor_bytes() -> int:
    """Add up the storages of all tensors that are alive.

    Returns:
        Bytes.
    """
    gc.collect()
    tensors = [item for item in gc.get_objects() if issubclass(type(item), Tensor)]
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(sizes.values())


def resident_bytes() -> int:
    """Memory the process holds.

    Returns:
        Bytes; 0 where the system does not say.
    """
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if path.exists() else 0


def measure_diagnose(num_images: int, jacobian_tokens: int) -> list[dict[str, Any]]:
    """Time ``diagnose`` of a ViT-B and its memory against a plain forward.

    Args:
        num_images: Images in the batch.
        jacobian_tokens: Tokens of the Jacobians.

    Returns:
        Records: seconds without and with Jacobians, and memory.
    """
    import timm

    model = timm.create_model("vit_base_patch16_224").eval()
    images = torch.randn(num_images, 3, 224, 224)

    def forward() -> object:
        with torch.no_grad():
            return model(images)

    records = []
    for tokens, bar in ((0, DIAGNOSE_BAR_S), (jacobian_tokens, JACOBIAN_BAR_S)):
        start = time.perf_counter()
        diagnose(model, images, jacobian_tokens=tokens)
        seconds = {"ratio": time.perf_counter() - start}
        what = f"Jacobians on {tokens} tokens" if tokens else "no Jacobians"
        name = f"diagnose ViT-B, {num_images} images, {what} (seconds)"
        records.append(_record(name, seconds, bar))
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    plain = weights + peak_extra_bytes(forward)
    peak = weights + peak_extra_bytes(lambda: diagnose(model, images, jacobian_tokens=0))
    name = "diagnose ViT-B: peak memory / plain forward, weights counted in both"
    return [*records, _record(name, {"ratio": peak / plain}, MEMORY_BAR)]


def _record(name: str, found: dict[str, float], bar: float, **more: float) -> dict[str, Any]:
    return {"name": name, "bar": bar, "holds": found["ratio"] <= bar, **found, **more}


def run(
    num_layers: int, num_tokens: int, num_images: int, repeats: int, num_steps: int
) -> dict[str, Any]:
    """Run the whole benchmark.

    Args:
        num_layers: Of the GPT; 0 leaves it out.
        num_tokens: Of its row.
        num_images: For ``diagnose`` of ViT-B; 0 leaves it out.
        repeats: Rounds of each comparison.
        num_steps: Measured steps over which memory must stay flat; 0 leaves it out.

    Returns:
        One JSON-able record, the machine included.
    """
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        results = measure_monitor("small ViT", *small_vit(), 2 * repeats, Path(folder), 20)
        if num_layers:
            name = f"GPT, {num_layers} layers, {num_tokens} tokens"
            model = gpt(num_layers, num_tokens)
            results += measure_monitor(name, *model, repeats, Path(folder))
        if num_steps:
            results += measure_growth(num_steps, Path(folder))
    if num_images:
        results += measure_diagnose(num_images, 8)
    return {
        "benchmark": "monitor",
        "torch": torch.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "results": results,
    }


def main(argv: list[str] | None = None) -> int:
    """Run from the command line.

    Args:
        argv: Arguments, those of the process if None.

    Returns:
        0 if every figure stays below its bar, else 1.
    """
    parser = argparse.ArgumentParser(prog="levelhead bench monitor", description=__doc__)
    parser.add_argument("--layers", type=int, default=12, help="of the GPT; 0 leaves it out")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--images", type=int, default=8, help="for diagnose; 0 leaves it out")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000, help="for memory; 0 leaves it out")
    parser.add_argument("--out", type=Path, help="write the record here as JSON")
    parser.add_argument("--json", action="store_true", help="print the record as JSON")
    chosen = parser.parse_args(argv)
    record = run(chosen.layers, chosen.tokens, chosen.images, chosen.repeats, chosen.steps)
    text = json.dumps(record, indent=1)
    if chosen.json:
        print(text)
    for row in [] if chosen.json else record["results"]:
        verdict = "ok" if row["holds"] else "ABOVE"
        print(f"{verdict:5} {row['ratio']:8.3f}  bar {row['bar']:.2f}  {row['name']}")
    if chosen.out:
        chosen.out.write_text(text + "\n")
    return 0 if all(row["holds"] for row in record["results"]) else 1

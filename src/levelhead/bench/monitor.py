"""What watching costs: a measured step, a step in between, the default cadence, and diagnose."""

import argparse
import gc
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.bench.arguments import not_negative, out_file, positive
from levelhead.bench.timing import compare_times, peak_extra_bytes, ratios
from levelhead.diagnose import diagnose
from levelhead.harness.models.vit import ViT, ViTConfig
from levelhead.harness.runs import replace_text
from levelhead.modes import one_thread
from levelhead.monitor import Monitor

SETTINGS = ("layers", "tokens", "images", "repeats", "steps")
CADENCE, CADENCE_STEPS = 50, 200
VIT_STEPS, VIT_ROUNDS = 20, 10  # steps so short want many: in a timing, and of these in a round
VOCAB_SIZE = 50257  # of the published GPT-2
STRETCH = 5  # long steps are compared in short stretches: the machine changes within minutes
JACOBIAN_TOKENS = 8
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


def gpt2(num_layers: int, num_tokens: int) -> tuple[nn.Module, Tensor]:
    """Return transformers' GPT-2 of width 768 with twelve heads, untrained, and a row of tokens.

    Args:
        num_layers: 12 for the published size.
        num_tokens: Length of the row.

    Returns:
        Model and tokens.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=VOCAB_SIZE, n_layer=num_layers, n_positions=num_tokens)
    return GPT2LMHeadModel(config), torch.randint(config.vocab_size, (1, num_tokens))


def training_step(model: nn.Module, inputs: Tensor) -> Callable[[], None]:
    """Return one optimiser step as a call.

    Args:
        model: To be trained.
        inputs: One batch.

    Returns:
        The step.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        output = model(inputs)
        getattr(output, "logits", output).float().square().mean().backward()
        optimizer.step()

    return step


def times(call: Callable[[], None], count: int, monitor: Monitor | None) -> Callable[[], None]:
    """Return a call repeated, watched or not.

    Args:
        call: A step.
        count: How often.
        monitor: Entered once for all of them, or None.

    Returns:
        The steps.
    """

    def repeated() -> None:
        with monitor or nullcontext():
            for _ in range(count):
                call()

    return repeated


def measure_step(
    name: str, model: nn.Module, inputs: Tensor, repeats: int, folder: Path, steps: int
) -> list[dict[str, Any]]:
    """Time a training step unwatched, watched in between, and measured.

    The default cadence is worked out of the three: 49 steps in between and one measured.

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
    step = training_step(model, inputs)
    measured = Monitor(model, every=1, jsonl=folder / "measured.jsonl")
    idle = Monitor(model, every=10**9, jsonl=folder / "between.jsonl")
    idle.step = 1  # its only measured step lies behind
    watching = {"plain": None, "between": idle, "measured": measured}
    calls = {kind: times(step, steps, monitor) for kind, monitor in watching.items()}
    found = ratios(compare_times(calls, repeats, warmup=1), "plain")
    between = found["between"]
    cadence = {"ratio": ((CADENCE - 1) * between["ratio"] + found["measured"]["ratio"]) / CADENCE}
    worked_out = f"{CADENCE - 1} steps in between and a measured one, each timed by itself"
    return [
        _record(f"{name}: measured step / step", found["measured"], MEASURED_BAR),
        _record(f"{name}: every {CADENCE} / none", cadence, CADENCE_BAR, how=worked_out,
                between=between["ratio"], between_min=between["ratio_min"],
                between_max=between["ratio_max"]),
    ]  # fmt: skip


def measure_cadence(
    name: str, model: nn.Module, inputs: Tensor, folder: Path, steps: int, rounds: int
) -> list[dict[str, Any]]:
    """Time training as people run it, watched at the default cadence, against the same unwatched.

        ratio = time of all watched steps / time of all plain steps

    One monitor counts on through all watched stretches: what it does at entering and leaving
    each is in the time.

    Args:
        name: Of the model.
        model: To be trained.
        inputs: One batch.
        folder: For the JSONL file.
        steps: Of a stretch.
        rounds: Stretches of both kinds, in turn.

    Returns:
        One record; ``ratio_min`` and ``ratio_max`` are over the rounds.
    """
    step = training_step(model, inputs)
    watched = Monitor(model, every=CADENCE, jsonl=folder / "cadence.jsonl")
    calls = {"plain": times(step, steps, None), "watched": times(step, steps, watched)}
    seconds = compare_times(calls, rounds, warmup=1)
    found = ratios(seconds, "plain")["watched"]
    found["ratio"] = sum(seconds["watched"]) / sum(seconds["plain"])
    named = f"{name}: every {CADENCE} / none, over {steps * rounds} steps"
    return [_record(named, found, CADENCE_BAR, rounds=rounds, steps_a_round=steps,
                    measured_steps=sum(s >= steps for s in watched.measured_steps))]  # fmt: skip


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
    """Add up the storages of all tensors that are alive and numbers in memory.

    Returns:
        Bytes.
    """
    gc.collect()
    tensors = [item for item in gc.get_objects() if type(item) in (Tensor, nn.Parameter)]
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
    """Time ``diagnose`` of a ViT-B.

    Args:
        num_images: Images in the batch.
        jacobian_tokens: Tokens of the Jacobians of all heads; 0 for none.

    Returns:
        One record, in seconds.
    """
    model, images = vit_b(num_images)
    start = time.perf_counter()
    diagnose(model, images, jacobian_tokens=jacobian_tokens)
    seconds = {"ratio": time.perf_counter() - start}
    what, bar = "no Jacobians", DIAGNOSE_BAR_S
    if jacobian_tokens:
        what, bar = f"Jacobians of all heads on {jacobian_tokens} tokens", JACOBIAN_BAR_S
    return [_record(f"diagnose ViT-B, {num_images} images, {what} (seconds)", seconds, bar)]


def measure_memory(num_images: int) -> list[dict[str, Any]]:
    """Compare the peak memory of ``diagnose`` of a ViT-B with that of a plain forward.

    Args:
        num_images: Images in the batch.

    Returns:
        One record.
    """
    model, images = vit_b(num_images)

    def forward() -> object:
        with torch.no_grad():
            return model(images)

    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    plain = weights + peak_extra_bytes(forward)
    peak = weights + peak_extra_bytes(lambda: diagnose(model, images, jacobian_tokens=0))
    name = "diagnose ViT-B: peak memory / plain forward, weights counted in both"
    return [_record(name, {"ratio": peak / plain}, MEMORY_BAR, plain_mib=plain / 2**20)]


def vit_b(num_images: int) -> tuple[nn.Module, Tensor]:
    """Return timm's ViT-B, untrained, and random images.

    Args:
        num_images: How many.

    Returns:
        Model and images.
    """
    import timm

    model = timm.create_model("vit_base_patch16_224").eval()
    return model, torch.randn(num_images, 3, 224, 224)


def _record(name: str, found: dict[str, float], bar: float, **more: Any) -> dict[str, Any]:
    return {"name": name, "bar": bar, "holds": found["ratio"] <= bar, **found, **more}


Part = Callable[[], list[dict[str, Any]]]


def on_one_thread(part: Part) -> Part:
    """Let a part run on one thread, as the comparison trains its small models.

    Args:
        part: Of the benchmark.

    Returns:
        The part; its records say so.
    """

    def run_alone() -> list[dict[str, Any]]:
        with one_thread():
            return [row | {"threads": 1} for row in part()]

    return run_alone


def parts_of(
    num_layers: int, num_tokens: int, num_images: int, repeats: int, num_steps: int, folder: Path
) -> dict[str, Part]:
    """List what is measured.

    Args:
        num_layers: Of the GPT-2; 0 leaves it out.
        num_tokens: Of its row.
        num_images: For ``diagnose`` of ViT-B; 0 leaves it out.
        repeats: Rounds of each comparison.
        num_steps: Measured steps over which memory must stay flat; 0 leaves it out.
        folder: For the monitors' files.

    Returns:
        Name to part, the quick ones first.
    """
    vit = small_vit()
    parts: dict[str, Part] = {
        "small ViT, steps": on_one_thread(
            lambda: measure_step("small ViT", *vit, VIT_ROUNDS * repeats, folder, VIT_STEPS)
        ),
        "small ViT, cadence": on_one_thread(
            lambda: measure_cadence("small ViT", *vit, folder, CADENCE_STEPS, repeats)
        ),
    }
    if num_steps:
        parts["growth"] = on_one_thread(lambda: measure_growth(num_steps, folder))
    if num_layers:
        name = f"GPT-2, {num_layers} layers, width 768, {num_tokens} tokens"
        gpt = partial(gpt2, num_layers, num_tokens)
        parts[name] = lambda: measure_step(name, *gpt(), repeats, folder, 1)
        parts[f"{name}, cadence"] = lambda: measure_cadence(
            name, *gpt(), folder, STRETCH, CADENCE_STEPS // STRETCH
        )
    if num_images:
        parts["diagnose"] = lambda: measure_diagnose(num_images, 0)
        parts["memory"] = lambda: measure_memory(num_images)
        parts["Jacobians"] = lambda: measure_diagnose(num_images, JACOBIAN_TOKENS)
    return parts


def empty_record(settings: Mapping[str, int]) -> dict[str, Any]:
    """Return a record without results, the machine included.

    Args:
        settings: What sets the sizes.

    Returns:
        What ``run`` fills.
    """
    return {
        "benchmark": "monitor",
        "torch": str(torch.__version__),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "settings": dict(settings),
        "is_complete": False,
        "part_seconds": {},
        "results": [],
    }


def run(
    parts: Mapping[str, Part], keep: Callable[[dict[str, Any]], None], record: dict[str, Any]
) -> dict[str, Any]:
    """Run the parts one after the other, those that the record lacks.

    Args:
        parts: As ``parts_of`` returns them.
        keep: Called with the record after each part: what was measured outlasts a stop.
        record: As ``empty_record`` returns it, or one to go on with.

    Returns:
        The record; ``is_complete`` once all parts are in it.
    """
    for name, part in parts.items():
        if name in record["part_seconds"]:
            continue
        torch.manual_seed(0)
        start = time.perf_counter()
        record["results"] += [row | {"part": name} for row in part()]
        record["part_seconds"][name] = round(time.perf_counter() - start, 1)
        record["is_complete"] = set(record["part_seconds"]) >= set(parts)
        keep(record)
        gc.collect()
    return record


def record_at(path: Path | None, settings: Mapping[str, int]) -> dict[str, Any]:
    """Return the record to go on with.

    Args:
        path: Where one may lie, or None.
        settings: What sets the sizes.

    Returns:
        That of the same machine, torch and sizes that lies there, else an empty one. A part whose
        name is taken out of ``part_seconds`` is measured again.
    """
    fresh = empty_record(settings)
    if path is None or not path.exists():
        return fresh
    before = json.loads(path.read_text())
    if any(
        before.get(name) != fresh[name] for name in ("torch", "machine", "threads", "settings")
    ):
        return fresh
    before["results"] = [r for r in before["results"] if r.get("part") in before["part_seconds"]]
    return before


def main(argv: list[str] | None = None) -> int:
    """Run from the command line.

    Args:
        argv: Arguments, those of the process if None.

    Returns:
        0 if every figure stays below its bar, else 1.
    """
    parser = argparse.ArgumentParser(prog="levelhead bench monitor", description=__doc__)
    parser.add_argument(
        "--layers", type=not_negative, default=12, help="of the GPT-2; 0 leaves it out"
    )
    parser.add_argument("--tokens", type=positive, default=512)
    parser.add_argument(
        "--images", type=not_negative, default=8, help="for diagnose; 0 leaves it out"
    )
    parser.add_argument("--repeats", type=positive, default=7, help="rounds of each comparison")
    parser.add_argument(
        "--steps", type=not_negative, default=1000, help="for memory; 0 leaves it out"
    )
    parser.add_argument(
        "--out", type=out_file, help="keep the record here, after every part, and go on with one"
    )
    parser.add_argument("--json", action="store_true", help="print the record as JSON")
    chosen = parser.parse_args(argv)

    def keep(record: dict[str, Any]) -> None:
        name, seconds = list(record["part_seconds"].items())[-1]
        print(f"{name}: {seconds:.0f} s", file=sys.stderr)
        if chosen.out:
            replace_text(chosen.out, json.dumps(record, indent=1) + "\n")

    sizes = (chosen.layers, chosen.tokens, chosen.images, chosen.repeats, chosen.steps)
    settings: dict[str, int] = dict(zip(SETTINGS, sizes, strict=True))
    with tempfile.TemporaryDirectory() as folder:
        record = run(parts_of(*sizes, Path(folder)), keep, record_at(chosen.out, settings))
    if chosen.json:
        print(json.dumps(record, indent=1))
    for row in [] if chosen.json else record["results"]:
        verdict = "ok" if row["holds"] else "ABOVE"
        print(f"{verdict:5} {row['ratio']:8.3f}  bar {row['bar']:.2f}  {row['name']}")
    return 0 if all(row["holds"] for row in record["results"]) else 1

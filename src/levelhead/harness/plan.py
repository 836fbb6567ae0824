"""What a recipe will cost, before a GPU is rented: counted, not computed, without data."""

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from levelhead.harness.config import TrainingSettings
from levelhead.harness.recipe import IMAGES, Recipe
from levelhead.harness.recipe_models import check_count
from levelhead.harness.recipe_parts import RetrievalData
from levelhead.harness.recipe_tasks import make_recipe_task
from levelhead.shapes import require

BYTES_OF_STATE = {"weights": 4, "gradients": 4, "AdamW's two moments": 8}
"""float32, whatever forward and backward compute in: autocast keeps the master weights."""

HALF = {"no": 1.0, "bf16": 0.5, "fp16": 0.5}
"""What is kept for the backward, over float32: an estimate, as norms and softmax stay float32."""


def _fused_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _fused_backward_flops(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(grad, query, key, value)


FUSED_ON_CPU = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _fused_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _fused_backward_flops,
}
"""torch counts the fused attention of GPUs and leaves that of CPUs out."""

GIB = 2**30
PEAK_TFLOPS = 989.0  # H100 SXM, bf16, dense: NVIDIA's data sheet
EFFICIENCY = 0.4  # of the peak; large Transformers reach .3 to .5


@dataclass(frozen=True)
class Plan:
    """The costs of one training.

    Attributes:
        recipe: Name and form.
        hash: Of the recipe.
        num_params: Parameters of the baseline.
        num_params_stated: What the recipe states, or None.
        flops_per_sample: Matrix products of a forward and a backward.
        samples_per_step: The global batch.
        steps: Optimiser steps.
        flops: Of the whole training.
        devices: That share it.
        micro_batch_size: Samples of one forward on one device.
        num_accumulated: Forwards of one step on each device.
        state_gib: Weights, gradients, optimiser and average on each device under DDP.
        state_sharded_gib: The same under FSDP.
        activations_gib: What one forward keeps for its backward, on each device.
        hours: At the stated speed.
        peak_tflops: Of one device.
        efficiency: Share of it that is reached.
        deviations: From the paper.
    """

    recipe: str
    hash: str
    num_params: int
    num_params_stated: float | None
    flops_per_sample: float
    samples_per_step: int
    steps: int
    flops: float
    devices: int
    micro_batch_size: int
    num_accumulated: int
    state_gib: float
    state_sharded_gib: float
    activations_gib: float
    hours: float
    peak_tflops: float
    efficiency: float
    deviations: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self) | {"deviations": list(self.deviations)}

    def __str__(self) -> str:
        stated = f" ({self.num_params_stated:,.0f} stated)" if self.num_params_stated else ""
        sharded = f", or {self.state_sharded_gib:.1f} sharded" if self.devices > 1 else ""
        speed = f"{self.peak_tflops:g} TFLOP/s x {self.efficiency:g} x {self.devices}"
        rows = {
            "parameters": f"{self.num_params:,}{stated}",
            "FLOPs": f"{self.flops:.2e} ({self.flops_per_sample:.2e} a sample)",
            "steps": f"{self.steps:,} of {self.samples_per_step:,} samples",
            "batch": f"{self.samples_per_step} = {self.devices} devices x "
            f"{self.num_accumulated} x {self.micro_batch_size}",
            "memory/rank": f"{self.state_gib:.1f} GiB state{sharded}, about "
            f"{self.activations_gib:.1f} GiB activations",
            "hours": f"{self.hours:,.1f} at {speed}",
        }
        lines = [f"{self.recipe} ({self.hash})", *(f"  {k:<12}{v}" for k, v in rows.items())]
        lines += ["  deviations from the paper:"] + [f"    - {d}" for d in self.deviations]
        return "\n".join(lines if self.deviations else [*lines[:-1], "  deviations: none"])


def make_plan(
    recipe: Recipe,
    devices: int = 1,
    peak_tflops: float = PEAK_TFLOPS,
    efficiency: float = EFFICIENCY,
) -> Plan:
    """Count what a training costs.

        hours = flops_per_sample * batch_size * steps / (devices * peak * efficiency * 3600)

    FLOPs are those of the matrix products, 2 for each multiply-add, as torch counts them in one
    forward and one backward, without computing. Memory is float32 state, and what one forward
    keeps for its backward; buffers of kernels and of communication come on top.

    Args:
        recipe: In either form.
        devices: That share each step.
        peak_tflops: Of one device, at the recipe's precision.
        efficiency: Share of the peak that is reached.

    Returns:
        The plan.

    Raises:
        ValueError: Devices that cannot share the batch, or a model that is not of the stated size.
    """
    require(0 < efficiency <= 1, "efficiency must be in (0, 1]", f"{efficiency}")
    require(peak_tflops > 0, "peak_tflops must be positive", f"{peak_tflops}")
    task = make_recipe_task(recipe)
    settings = task.settings
    assert isinstance(settings, TrainingSettings)
    micro, num_accumulated = share(settings, devices)
    with torch.device("meta"):
        model = task.build("softmax")
    is_grid = isinstance(recipe.data, RetrievalData)
    check_count(model.models[0] if is_grid else model, recipe.model.num_params)  # pyright: ignore
    num_params = sum(p.numel() for p in model.parameters())
    per_sample, kept = _cost(task, model, _sample(recipe))
    state = num_params * (sum(BYTES_OF_STATE.values()) + 4 * (settings.ema_decay is not None))
    flops = per_sample * settings.batch_size * settings.steps
    return Plan(
        recipe=f"{recipe.name}, {recipe.form}",
        hash=recipe.hash,
        num_params=num_params,
        num_params_stated=recipe.model.num_params,
        flops_per_sample=per_sample,
        samples_per_step=settings.batch_size,
        steps=settings.steps,
        flops=flops,
        devices=devices,
        micro_batch_size=micro,
        num_accumulated=num_accumulated,
        state_gib=state / GIB,
        state_sharded_gib=state / devices / GIB,
        activations_gib=kept * micro * HALF[settings.mixed_precision] / GIB,
        hours=flops / (devices * peak_tflops * 1e12 * efficiency * 3600),
        peak_tflops=peak_tflops,
        efficiency=efficiency,
        deviations=(*recipe.deviations, *recipe.changed),
    )


def share(settings: TrainingSettings, devices: int) -> tuple[int, int]:
    """Divide the global batch: micro-batch of a device, and how many of them make a step.

        batch_size = devices * num_accumulated * micro_batch_size

    Args:
        settings: With the global batch and the largest micro-batch.
        devices: That share each step.

    Returns:
        Micro-batch and number of micro-batches.

    Raises:
        ValueError: The devices cannot share the batch equally.
    """
    size = settings.batch_size
    require(
        devices >= 1 and size % devices == 0,
        "the number of devices must divide the global batch, so that the batch stays the paper's",
        f"batch_size={size} on {devices} devices",
        ", ".join(str(n) for n in range(1, size + 1) if size % n == 0),
    )
    own = size // devices
    largest = min(own, settings.micro_batch_size or own)
    micro = max(n for n in range(1, largest + 1) if own % n == 0)
    return micro, own // micro


def _sample(recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Return a batch of the right shapes on the meta device."""
    if isinstance(recipe.data, IMAGES):
        augmentation = recipe.augmentation
        assert augmentation is not None
        side = augmentation.image_size
        images = torch.empty(1, augmentation.num_channels, side, side, device="meta")
        return images, torch.empty(1, dtype=torch.long, device="meta")
    if isinstance(recipe.data, RetrievalData):
        data = recipe.data
        width = data.real_dim + data.num_classes
        tokens = torch.empty(1, data.num_tokens, width, device="meta")
        return tokens, torch.empty(1, dtype=torch.long, device="meta")
    length = recipe.model.context_length  # pyright: ignore
    tokens = torch.empty(1, length, dtype=torch.long, device="meta")
    return tokens, tokens.clone()


def _cost(task: Any, model: nn.Module, batch: Sequence[Tensor]) -> tuple[float, float]:
    """FLOPs of a forward and backward, and bytes that the forward keeps beside the weights.

    Fake tensors take the kernels that a CPU would take, fused attention among them, and compute
    nothing.
    """
    kept: dict[int, int] = {}
    alive: list[Tensor] = []  # else a storage may be freed and its number used again
    counter = FlopCounterMode(display=False, custom_mapping=FUSED_ON_CPU)
    with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fake attention may be told that it is not fused
        model.to_empty(device="cpu").train()
        weights = {p.untyped_storage()._cdata for p in model.parameters()}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in weights:
                kept[storage._cdata] = storage.nbytes()
                alive.append(tensor)
            return tensor

        inputs = tuple(torch.empty(part.shape, dtype=part.dtype) for part in batch)
        with counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            task.loss(model, inputs).backward()
    return float(counter.get_total_flops()), float(sum(kept.values()))

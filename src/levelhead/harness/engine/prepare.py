"""Devices, precision and data parallelism: Accelerate's, told what this library needs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn

from levelhead.shapes import require
from levelhead.sites.find import find_attention


def make_accelerator(
    mixed_precision: str, trackers: Sequence[str], folder: Path, block_names: Sequence[str] = ()
) -> Accelerator:
    """Join the processes that ``accelerate launch`` or ``torchrun`` started, if any.

    Args:
        mixed_precision: ``"no"``, ``"bf16"`` or ``"fp16"``.
        trackers: Names of Accelerate's trackers.
        folder: Where those that write files do so.
        block_names: Classes whose modules FSDP2 gathers one at a time; empty: DDP, or what
            ``accelerate launch`` was told.

    Returns:
        The accelerator.

    Raises:
        ValueError: Sharding in a single process.
    """
    before = AcceleratorState._shared_state.get("_mixed_precision", mixed_precision)
    if before != mixed_precision and not torch.distributed.is_initialized():
        AcceleratorState._reset_state(reset_partial_state=True)  # of an earlier training
    plugin = _sharding(block_names) if block_names else None
    accelerator = Accelerator(
        mixed_precision=mixed_precision,
        cpu=not torch.accelerator.is_available(),
        log_with=list(trackers) or None,
        project_dir=str(folder),
        fsdp_plugin=plugin,
    )
    require(
        plugin is None or accelerator.num_processes > 1,
        "sharding needs several processes",
        f"{accelerator.num_processes}",
        "torchrun --no-python --nproc-per-node N levelhead train ...",
    )
    if plugin is not None and accelerator.distributed_type == DistributedType.MULTI_CPU:
        _shard_on_cpu(accelerator, plugin)
    return accelerator


def block_names(model: nn.Module) -> tuple[str, ...]:
    """Name the classes of the blocks that hold a model's attention.

    Args:
        model: Any with attention that ``find_attention`` knows.

    Returns:
        Class names: of the innermost module around each attention that stands in a list.

    Raises:
        ValueError: No attention stands in a list of blocks.
    """
    modules = dict(model.named_modules())
    found: dict[str, None] = {}
    for site in find_attention(model):
        path = site.name.split(".")
        for end in range(len(path), 0, -1):
            parent = modules[".".join(path[: end - 1])]
            if isinstance(parent, nn.ModuleList | nn.Sequential):
                found[type(modules[".".join(path[:end])]).__name__] = None
                break
    require(bool(found), "sharding needs blocks in an nn.ModuleList or nn.Sequential",
            f"none around the attention of {type(model).__name__}")  # fmt: skip
    return tuple(found)


def _sharding(names: Sequence[str]) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=list(names),
        cpu_ram_efficient_loading=False,  # every rank starts the same weights from the seed
    )


def _shard_on_cpu(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin) -> None:
    """Accelerate offers FSDP on GPUs alone; torch's runs on gloo as well, which tests use."""
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    state: Any = accelerator.state
    state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin
    if state.mixed_precision != "no":
        plugin.set_mixed_precision(state.mixed_precision)


def leave_group() -> None:
    """Leave the process group of ``torchrun`` at the very end of a process."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()

"""A model in training: one optimiser step over ranks and micro-batches, and its whole state."""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device
from torch import Tensor, nn

from levelhead.harness.config import Training
from levelhead.harness.engine.average import WeightAverage, drop_gathered
from levelhead.harness.engine.checkpoint import Checkpoint
from levelhead.harness.engine.random_state import random_state, seed_all, set_random_state
from levelhead.harness.engine.schedule import make_schedule
from levelhead.harness.engine.split import Split
from levelhead.harness.engine.state import (
    Tensors,
    fill,
    fill_model,
    fill_optimizer,
    gathered,
    optimizer_groups,
    optimizer_tensors,
)
from levelhead.harness.engine.stop import StopRequest
from levelhead.harness.tasks import Task
from levelhead.monitor import Monitor, unwrapped
from levelhead.shapes import require
from levelhead.sharding import is_sharded
from levelhead.steps import one_step


@dataclass(frozen=True)
class StepResult:
    """What one optimiser step showed.

    Attributes:
        loss: Mean over the global batch before the update, in nats.
        grad_norm: Before clipping; None where nothing was clipped or updated.
        learning_rate: Of the first group, as used.
        wants_stop: Whether a rank was asked to stop.
    """

    loss: float
    grad_norm: float | None
    learning_rate: float
    wants_stop: bool


class ModelInTraining:
    """A model with its optimiser, schedule and average, prepared for all devices.

    Args:
        task: Gives the loss and the parameter groups.
        model: At its start.
        accelerator: Prepares both.
        split: This rank's part of a global batch.
    """

    def __init__(self, task: Task, model: nn.Module, accelerator: Accelerator, split: Split):
        self.task, self.accelerator, self.split = task, accelerator, split
        settings = task.settings
        self.model, self.optimizer = accelerator.prepare(model, make_optimizer(task, model))
        self.module = unwrapped(self.model)
        self.raw_optimizer: torch.optim.Optimizer = self.optimizer.optimizer
        self.parameters = list(self.model.parameters())
        # Accelerate's own steps look into much that only a gradient scaler (fp16) needs.
        self.is_scaled = accelerator.scaler is not None
        self.schedule = make_schedule(self.raw_optimizer, settings)
        decay = settings.ema_decay
        self.average = None if decay is None else WeightAverage(self.module, decay)
        self.monitor: Monitor | None = None

    def step(self, batch: Any, stop: StopRequest) -> StepResult:
        """Do one optimiser step; where the loss is not finite, nothing moves.

        Args:
            batch: The global batch, the same on every rank.
            stop: Whether this rank was asked to stop.

        Returns:
            The same on every rank.
        """
        if not self.module.training:
            self.model.train()
        parts = self.split.parts(batch)
        with one_step(self.module) if len(parts) > 1 else nullcontext():
            losses = [self._backward(part, part is parts[-1]) for part in parts]
        mean = losses[0] if len(losses) == 1 else torch.stack(losses).mean()
        loss, wants_stop = self._agreed(mean, stop)
        learning_rate = self.raw_optimizer.param_groups[0]["lr"]
        grad_norm = self._update(loss) if math.isfinite(loss) else None
        self.schedule.step()
        return StepResult(loss, grad_norm, learning_rate, wants_stop)

    def _backward(self, part: Any, is_last: bool) -> Tensor:
        if self.accelerator.device.type != "cpu":
            part = send_to_device(part, self.accelerator.device)
        with nullcontext() if is_last else self.accelerator.no_sync(self.model):
            loss = self.task.loss(self.model, part)
            share = loss if self.split.num_micro == 1 else loss / self.split.num_micro
            self.accelerator.backward(share) if self.is_scaled else share.backward()
        return loss.detach()

    def _agreed(self, loss: Tensor, stop: StopRequest) -> tuple[float, bool]:
        """Mean loss over ranks, and whether any of them shall stop, in one sum."""
        if self.accelerator.num_processes == 1:
            return loss.item(), stop.is_made
        packed = torch.stack([loss.double(), torch.full_like(loss, stop.is_made).double()])
        dist.all_reduce(packed)
        return packed[0].item() / self.accelerator.num_processes, packed[1].item() > 0

    def _update(self, loss: float) -> float | None:
        grad_norm = self._clip(self.task.settings.clip_norm)
        if self.monitor is not None:
            self.monitor.note(loss=loss, grad_norm=grad_norm)
        optimizer = self.optimizer if self.is_scaled else self.raw_optimizer
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update()
        return grad_norm

    def _clip(self, largest: float | None) -> float | None:
        if largest is None:
            return None
        if self.is_scaled:
            norm: Any = self.accelerator.clip_grad_norm_(self.parameters, largest)
        else:
            norm = nn.utils.clip_grad_norm_(self.parameters, largest)
        return norm.full_tensor().item() if is_sharded(norm) else norm.item()

    def evaluate(self) -> dict[str, float]:
        """Measure the model, or its average where one is kept; every rank does all of it.

        Returns:
            The task's metrics.
        """
        with self.average.in_place() if self.average is not None else nullcontext():
            try:
                return self.task.evaluate(self.module)
            finally:
                drop_gathered(self.module)

    def tensors(self) -> dict[str, Tensors]:
        """Gather all tensors of the state; every rank must call it.

        Returns:
            Group to name to tensor, on the CPU; empty groups on all ranks but the first.
        """
        wanted = self.accelerator.is_main_process
        groups = {
            "model": self.module.state_dict(),
            "optimizer": optimizer_tensors(self.module, self.raw_optimizer),
        }
        if self.average is not None:
            groups["average"] = self.average.averages
        found = {name: gathered(tensors, wanted) for name, tensors in groups.items()}
        torch_states = [state["torch"] for state in self._random_states()]
        found["random"] = {str(rank): state for rank, state in enumerate(torch_states)}
        return found

    def numbers(self) -> dict[str, Any]:
        """Gather the rest of the state; every rank must call it.

        Returns:
            Plain values.
        """
        scaler = self.accelerator.scaler
        return {
            "optimizer": optimizer_groups(self.raw_optimizer),
            "schedule": self.schedule.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "monitor": None if self.monitor is None else self.monitor.state_dict(),
            "random": [
                {name: _plain(value) for name, value in state.items() if name != "torch"}
                for state in self._random_states()
            ],
        }

    def _random_states(self) -> list[dict[str, Any]]:
        return gather_object([random_state()])

    def load(self, checkpoint: Checkpoint, seed: int) -> None:
        """Go on where a checkpoint was written.

        Args:
            checkpoint: The same on every rank.
            seed: Of the run: with another number of ranks than before, random numbers start
                anew from it and the step.

        Raises:
            ValueError: It is of another model or optimiser.
        """
        tensors, numbers = checkpoint.tensors, checkpoint.state["training"]
        fill_model(self.module, tensors["model"])
        fill_optimizer(self.module, self.raw_optimizer, tensors["optimizer"], numbers["optimizer"])
        own, came = self.average is not None, "average" in tensors
        require(own == came, "a checkpoint must hold an average where ema_decay is set", f"{came}")
        if self.average is not None:
            fill(self.average.averages, tensors["average"])
        self.schedule.load_state_dict(numbers["schedule"])
        if numbers["scaler"] is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(numbers["scaler"])
        if numbers["monitor"] is not None and self.monitor is not None:
            self.monitor.load_state_dict(numbers["monitor"])
        self._load_random(tensors["random"], numbers["random"], seed, checkpoint.step)

    def _load_random(
        self, states: Mapping[str, Tensor], numbers: list[dict[str, Any]], seed: int, step: int
    ) -> None:
        rank = self.accelerator.process_index
        if len(numbers) != self.accelerator.num_processes:
            seed_all(seed, f"dropout, rank {rank}, step {step}")
            return
        own = {k: torch.tensor(v) if k == "cuda" else v for k, v in numbers[rank].items()}
        set_random_state(own | {"torch": states[str(rank)]})


def make_optimizer(task: Task, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over the task's groups; ``lr_scale`` multiplies the learning rate of a group.

    Args:
        task: Says how to train.
        model: At its start.

    Returns:
        The optimiser.
    """
    settings: Training = task.settings
    groups = [
        {**group, "lr": settings.learning_rate * group.get("lr_scale", 1.0)}
        for group in task.parameter_groups(model)
    ]
    return torch.optim.AdamW(
        groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps, fused=True
    )


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value

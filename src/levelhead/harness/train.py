"""One training, start to end: the same code for every variant, seeded so that runs pair."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from levelhead.attention import Attention
from levelhead.harness.config import Cell, Training
from levelhead.harness.optimizer import EagerAdamW
from levelhead.harness.parameter_groups import decayed_apart
from levelhead.harness.seeding import named_seed
from levelhead.harness.tasks import Task
from levelhead.initialize import initialize_
from levelhead.modes import one_thread
from levelhead.shapes import require

NUM_EVALUATIONS = 3
NUM_CURVE_POINTS = 60

OnStep = Callable[[], None]


def train_cell(task: Task, cell: Cell, on_step: OnStep = lambda: None) -> dict[str, Any]:
    """Train one cell of the grid and measure it.

    Args:
        task: Data, model and metric.
        cell: Variant, init and seed.
        on_step: Called after each step; what it raises stops the training.

    Returns:
        The cell's record, ready for JSON: final metrics (None after divergence), curves,
        parameter count, how concentrated attention was at the start and at the end.
    """
    started = time.perf_counter()
    model = start_model(task, cell)
    probe = next(task.batches(named_seed(cell.seed, "probe")))
    record: dict[str, Any] = {
        **cell.model_dump(),
        "num_params": sum(parameter.numel() for parameter in model.parameters()),
        "concentration_start": concentration(model, probe[0]),
    }
    with one_thread():
        curves, diverged_step = _train(task, model, cell.seed, on_step)
        final = None if diverged_step else task.evaluate(model)
        if final is not None and not are_finite(final):
            final, diverged_step = None, task.settings.steps
    return record | {
        "final": final,
        "diverged_step": diverged_step,
        "concentration_end": concentration(model, probe[0]),
        "seconds": round(time.perf_counter() - started, 3),
        **curves,
    }


def start_model(task: Task, cell: Cell) -> nn.Module:
    """Build a cell's model and start its weights, equal to those of its pair where both have them.

    Args:
        task: Says which model.
        cell: Variant, init and seed.

    Returns:
        The model before its first step.

    Raises:
        ValueError: A variant or an init that does not exist or does not fit, or an init that would
            overwrite the weights that a recipe starts from.
    """
    weights = getattr(task.settings, "recipe", {}).get("model", {}).get("weights")
    require(
        weights is None or cell.init == "default",
        "init must be default where a recipe starts from the weights of another training",
        f"init={cell.init}, which would overwrite those of model.weights={weights}",
    )
    model = task.start(cell.variant, cell.seed)
    generator = torch.Generator().manual_seed(named_seed(cell.seed, "init"))
    initialize_(model, cell.init, generator=generator)
    return model


def make_optimizer(model: nn.Module, settings: Training) -> torch.optim.Optimizer:
    """AdamW that decays matrices and leaves vectors (biases, gains, sinks) alone.

    Args:
        model: To be trained.
        settings: Learning rate and weight decay.

    Returns:
        The optimiser.
    """
    return EagerAdamW(
        decayed_apart(model, settings.weight_decay),
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        fused=True,
    )


def warmup_cosine(step: int, num_steps: int, warmup_frac: float) -> float:
    """Factor on the learning rate: up in a line, down along a cosine.

    Args:
        step: From 0.
        num_steps: Of the whole training.
        warmup_frac: Share of the steps that rise.

    Returns:
        A factor in (0, 1].
    """
    num_warmup = round(warmup_frac * num_steps)
    if step < num_warmup:
        return (step + 1) / (num_warmup + 1)
    progress = (step - num_warmup) / max(1, num_steps - num_warmup)
    return 0.5 * (1 + math.cos(math.pi * progress))


def training_step(
    task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]
) -> float:
    """Do one step: forward, backward, clip, update; no update where the loss is not finite.

    Args:
        task: Gives the loss and the largest gradient norm.
        model: In training mode.
        optimizer: Of the model's parameters.
        batch: Inputs and targets.

    Returns:
        The loss before the update, in nats.
    """
    loss = task.loss(model, batch)
    value = loss.item()
    if math.isfinite(value):
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if task.settings.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), task.settings.clip_norm)
        optimizer.step()
    return value


@torch.no_grad()
def concentration(model: nn.Module, inputs: Tensor) -> float | None:
    """Say how much of a row's attention its strongest key holds.

        mean over layers, heads and rows of  max_s |attn_weights[s]| / sum_s |attn_weights[s]|

    Args:
        model: Holds ``Attention`` modules. One that stacks others as its ``models`` is asked
            model by model, as calls under ``vmap`` cannot be repeated outside of it.
        inputs: One batch.

    Returns:
        A share in (0, 1]; 1 means one key has it all: saturated. None where the model holds no
        ``Attention`` or a weight is not finite.
    """
    calls: list[tuple[nn.Module, tuple, dict[str, Any]]] = []
    hooks = [
        module.register_forward_pre_hook(
            lambda module, args, kwargs: calls.append((module, args, kwargs)), with_kwargs=True
        )
        for module in model.modules()
        if isinstance(module, Attention)
    ]
    was_training = model.training
    model.eval()
    try:
        for part in getattr(model, "models", (model,)):
            part(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    shares = [_largest_share(module, args, kwargs) for module, args, kwargs in calls]
    model.train(was_training)
    mean = sum(shares) / len(shares) if shares else math.nan
    return round(mean, 4) if math.isfinite(mean) else None


def _largest_share(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> float:
    _, attn_weights = module(*args, **{**kwargs, "need_weights": True})
    sizes = attn_weights.abs()
    return (sizes.amax(-1) / sizes.sum(-1).clamp_min(torch.finfo(sizes.dtype).tiny)).mean().item()


def are_finite(metrics: Mapping[str, float]) -> bool:
    """Say whether an evaluation came to numbers; a training that has lost them has diverged.

    Args:
        metrics: Name to value.
    """
    return all(math.isfinite(value) for value in metrics.values())


def _train(
    task: Task, model: nn.Module, seed: int, on_step: OnStep
) -> tuple[dict[str, Any], int | None]:
    settings = task.settings
    optimizer = make_optimizer(model, settings)
    warmup_frac = settings.warmup_steps / settings.steps
    schedule = LambdaLR(optimizer, lambda step: warmup_cosine(step, settings.steps, warmup_frac))
    batches = task.batches(named_seed(seed, "batches"))
    curve: dict[str, list] = {"step": [], "train_loss_nats": []}
    evaluations: list[dict[str, float]] = []
    curve_every = max(1, settings.steps // NUM_CURVE_POINTS)
    evaluate_every = max(1, settings.steps // NUM_EVALUATIONS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(named_seed(seed, "dropout"))
        for step in range(1, settings.steps + 1):
            model.train()
            loss = training_step(task, model, optimizer, next(batches))
            schedule.step()
            if not math.isfinite(loss):
                return {"curve": curve, "evaluations": evaluations}, step
            if step % curve_every == 0 or step in (1, settings.steps):
                curve["step"].append(step)
                curve["train_loss_nats"].append(round(loss, 6))
            if step % evaluate_every == 0 and step < settings.steps:
                found = task.evaluate(model)
                if not are_finite(found):
                    return {"curve": curve, "evaluations": evaluations}, step
                evaluations.append({"step": step, **found})
            on_step()
    return {"curve": curve, "evaluations": evaluations}, None

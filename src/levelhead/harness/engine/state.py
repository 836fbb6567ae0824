"""All that a training's next step depends on, gathered from the ranks and given back to them.

Tensors are gathered whole, so that a training can go on on another number of devices.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.harness.engine.average import local_part
from levelhead.shapes import require
from levelhead.sharding import distribute_like, is_sharded

Tensors = dict[str, Tensor]


@torch.no_grad()
def gathered(tensors: Mapping[str, Tensor], is_wanted: bool = True) -> Tensors:
    """Bring tensors to the CPU, whole; every rank must call it with the same names.

    Args:
        tensors: Sharded or not.
        is_wanted: Whether this rank shall hold the result.

    Returns:
        Copies where a device or a shard was left, else the tensors; empty if not wanted.
    """
    found: Tensors = {}
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if is_sharded(tensor) else tensor  # pyright: ignore
        if is_wanted:
            found[name] = whole.detach().cpu()
    return found


def fill_model(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Write whole values into a model, sharded or not, bit by bit.

    Args:
        model: Its modules are told, as some of them start differently when nothing was loaded.
        values: By the names of its state dict; the same on every rank.

    Raises:
        ValueError: Other names, shapes or dtypes.
    """
    targets = model.state_dict()
    _check_fit(targets, values)
    placed = {name: distribute_like(value, targets[name]) for name, value in values.items()}
    model.load_state_dict(placed)


@torch.no_grad()
def fill(targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Write whole values into tensors, sharded or not, bit by bit.

    Args:
        targets: What is written to.
        values: Under the same names; the same on every rank.

    Raises:
        ValueError: Other names, shapes or dtypes.
    """
    _check_fit(targets, values)
    for name, target in targets.items():
        local_part(target).copy_(local_part(distribute_like(values[name], target)))


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """Name an optimiser's tensors by its parameters' names.

    Args:
        model: Whose parameters it moves.
        optimizer: After any number of steps.

    Returns:
        ``name of the parameter/name of the state`` to tensor.
    """
    return {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def optimizer_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return an optimiser's numbers, group by group.

    Args:
        optimizer: Any whose state is made of tensors.

    Returns:
        Plain values.
    """
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def fill_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    groups: list[dict[str, Any]],
) -> None:
    """Give an optimiser back what it had.

    Args:
        model: Whose parameters it moves.
        optimizer: Fresh.
        tensors: As ``optimizer_tensors`` named them, whole.
        groups: As ``optimizer_groups`` returned them.

    Raises:
        ValueError: State of parameters that do not exist, or another number of groups.
    """
    parameters = dict(model.named_parameters())
    unknown = sorted({name.rpartition("/")[0] for name in tensors} - set(parameters))
    require(not unknown, "an optimiser's state must be of this model's parameters", f"{unknown}")
    require(
        len(groups) == len(optimizer.param_groups),
        "an optimiser's state must have its groups",
        f"{len(groups)} for {len(optimizer.param_groups)}",
    )
    whole = optimizer.state_dict()
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    place = {id(parameter): number for number, parameter in enumerate(ordered)}
    states: dict[int, dict[str, Tensor]] = {}
    for full_name, value in tensors.items():
        name, _, key = full_name.rpartition("/")
        parameter = parameters[name]
        is_like = value.shape == parameter.shape
        placed = distribute_like(value, parameter) if is_like else value
        states.setdefault(place[id(parameter)], {})[key] = placed
    merged = [
        {**own, **{k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()}}
        for own, saved in zip(whole["param_groups"], groups, strict=True)
    ]
    optimizer.load_state_dict({"state": states, "param_groups": merged})


def _check_fit(targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    missing, unknown = sorted(set(targets) - set(values)), sorted(set(values) - set(targets))
    other = [
        name for name, target in targets.items()
        if name in values
        and (values[name].shape != target.shape or values[name].dtype != target.dtype)
    ]  # fmt: skip
    require(
        not (missing or unknown or other),
        "a checkpoint must hold the tensors of this model",
        f"missing {missing[:3]}, unknown {unknown[:3]}, of another shape or dtype {other[:3]}",
    )

"""Where the parameters of variants belong in an optimiser."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from levelhead.parts.base import Part


def no_weight_decay(model: nn.Module) -> set[str]:
    """Name the parameters of variants that weight decay should leave alone.

    Scores, scales, gains, norms and biases (everything with fewer than two axes): decaying them
    pulls towards a value that means nothing. ``W_a`` and ``W_g`` are matrices and decay like any.

    Args:
        model: A converted model, or one built from ``levelhead.Attention``.

    Returns:
        Full names, as in ``model.named_parameters()``.
    """
    return {name for name, parameter in _own_parameters(model) if parameter.ndim < 2}


def _own_parameters(model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    for prefix, module in model.named_modules():
        if isinstance(module, Part):
            yield from module.named_parameters(prefix=prefix)


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    decays: Callable[[str, nn.Parameter], bool] | None = None,
) -> list[dict[str, Any]]:
    """Put the trainable parameters of a model into two groups, with and without weight decay.

    Args:
        model: Any model.
        weight_decay: Of the first group; the second has none.
        decays: Whether a parameter of the host decays; by default those with two axes or more.

    Returns:
        Groups for ``torch.optim``; ``no_weight_decay(model)`` always goes into the second.
    """
    exempt = no_weight_decay(model)
    with_decay, without = [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decay = parameter.ndim >= 2 if decays is None else decays(name, parameter)
        (with_decay if decay and name not in exempt else without).append(parameter)
    return [
        {"params": with_decay, "weight_decay": weight_decay},
        {"params": without, "weight_decay": 0.0},
    ]

"""What the readers of the libraries share: refusing to guess, and saying what was seen."""

from collections.abc import Callable, Collection, Iterable
from typing import NoReturn

import torch
from torch import nn

from levelhead.sites.sites import AttentionSite

Reader = Callable[[str, nn.Module, nn.Module], AttentionSite | None]
"""``(name, module, model) -> site``, or None when the module is not an attention it knows."""

CONVERTED = "levelhead"
"""Name of the child that ``levelhead.convert`` adds; its parts change nothing of the layout."""

HOW_TO_READ = "write a reader for it (docs/own_module.md) and pass find_attention(readers=[...])"


def refuse(name: str, module: nn.Module, why: str) -> NoReturn:
    """Raise the error for an attention that cannot be described.

    Args:
        name: Dotted path in the model.
        module: The module.
        why: What is unknown about it.

    Raises:
        ValueError: Always.
    """
    children = ", ".join(f"{n} ({type(c).__name__})" for n, c in module.named_children())
    own = ", ".join(n for n, _ in module.named_parameters(recurse=False))
    raise ValueError(
        f"cannot read the attention {name!r} "
        f"({type(module).__module__}.{type(module).__qualname__}): {why}; "
        f"its modules: {children or 'none'}; its parameters: {own or 'none'}; {HOW_TO_READ}"
    )


def check_accounted(name: str, module: nn.Module, known: Collection[str]) -> None:
    """Refuse an attention with trainable parts that its reader does not know.

    A part nobody accounted for may change what the weights mean, so it is never skipped.

    Args:
        name: Dotted path in the model.
        module: The attention.
        known: Names of its children and own parameters that the reader understands.
    """
    children = [n for n, child in module.named_children() if has_tensors(child)]
    own = [n for n, _ in module.named_parameters(recurse=False)]
    unknown = sorted(set(children + own) - set(known) - {CONVERTED})
    if unknown:
        refuse(name, module, f"unknown parts: {', '.join(unknown)}")


def has_tensors(module: nn.Module) -> bool:
    """Whether a module holds any parameter.

    Args:
        module: Any module.
    """
    return next(module.parameters(), None) is not None


def real_scale(name: str, module: nn.Module, default: float | None = None) -> float:
    """Return the factor on the dot product that a module keeps, refusing to guess.

    Args:
        name: Dotted path in the model.
        module: The attention.
        default: The factor of a class that is known to keep none.

    Returns:
        The one value of its attributes ``scaling`` and ``scale``.
    """
    found = {n: getattr(module, n) for n in ("scaling", "scale") if hasattr(module, n)}
    numbers = {n: float(v) for n, v in found.items() if isinstance(v, (int, float))}
    if len(numbers) < len(found):
        strange = {n: type(v).__name__ for n, v in found.items() if n not in numbers}
        refuse(name, module, f"its scale is not a number: {strange}")
    if len(set(numbers.values())) > 1:
        refuse(name, module, f"it keeps two different scales: {numbers}")
    if not numbers and default is None:
        refuse(name, module, "it keeps no attribute scaling or scale")
    return next(iter(numbers.values()), default)  # type: ignore[return-value]


def real_norm(module: nn.Module, names: Iterable[str]) -> nn.Module | None:
    """Return the first of the named children that is there and does something.

    Args:
        module: The attention.
        names: What its norm may be called.

    Returns:
        The norm, or None.
    """
    for norm in (getattr(module, name, None) for name in names):
        if isinstance(norm, nn.Module) and not isinstance(norm, nn.Identity):
            return norm
    return None


def dropout_of(module: nn.Module, names: Iterable[str]) -> float:
    """Return the first of the named dropout probabilities, whether a number or a module.

    Args:
        module: The attention.
        names: What its dropout may be called.

    Returns:
        The probability, 0 where the module keeps none.
    """
    for found in (getattr(module, name, None) for name in names):
        if isinstance(found, nn.Dropout):
            return found.p
        if isinstance(found, float):
            return found
    return 0.0


def parent_of(name: str, model: nn.Module) -> nn.Module | None:
    """Return the module that holds the named one, None for the model itself.

    Args:
        name: Dotted path in the model.
        model: The model.
    """
    return model.get_submodule(name.rpartition(".")[0]) if name else None


def made_by(module: nn.Module, package: str) -> bool:
    """Whether a class of the module, or one it inherits from, lives in a package.

    Args:
        module: Any module.
        package: Name of the package ("timm"), or of a module in it.

    Returns:
        True also for a subclass written elsewhere.
    """
    homes = (cls.__module__ for cls in type(module).__mro__ if cls is not torch.nn.Module)
    return any(home == package or home.startswith(package + ".") for home in homes)

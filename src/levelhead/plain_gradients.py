"""Gradients by public operators, for functions whose own gradient is written by hand."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from levelhead.shapes import without_autocast


def needs_plain_gradients(grad: Tensor) -> bool:
    """Say whether a backward pass needs more of a gradient than its numbers.

    Read in part from a private part of torch; one without it is taken not to batch.

    Args:
        grad: Gradient of an output.

    Returns:
        True when the gradient shall have a gradient (``create_graph=True``), or many come at once
        (``is_grads_batched=True``).
    """
    functorch = getattr(torch._C, "_functorch", None)
    is_batched = getattr(functorch, "is_legacy_batchedtensor", lambda tensor: False)
    return torch.is_grad_enabled() or is_batched(grad)


def plain_gradients(
    plain: Callable[..., Tensor], inputs: Sequence[Tensor | None], grad: Tensor
) -> list[Tensor | None]:
    """Differentiate a function by its operators, which have gradients and may be batched.

    Args:
        plain: The function.
        inputs: What it takes.
        grad: Gradient of its output.

    Returns:
        The gradient of each input, None for one that needs none.
    """
    has_graph = torch.is_grad_enabled()
    with torch.enable_grad(), without_autocast(grad.device.type):
        # Views, for one may be made of another, or be the same: no gradient shall count twice.
        given = [t if t is None else t.view_as(t) for t in inputs]
        learning = [t for t in given if t is not None and t.requires_grad]
        found = iter(torch.autograd.grad(plain(*given), learning, grad, create_graph=has_graph))
    return [next(found) if t is not None and t.requires_grad else None for t in given]

"""Where q, k, v and o lie inside a host's tensors, whatever the host stores.

Every layout the libraries use (separate, fused, interleaved by head, transposed Conv1D, grouped)
is a view of a stored tensor whose leading axes are the rows of one logical matrix. Reading copies
the view out, writing copies into it, so the two are inverse to each other by construction.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from levelhead.shapes import require

Rows = Callable[[Tensor], Tensor]
"""From a stored tensor ``[out, in]`` or ``[out]`` to a view ``[..., in]`` or ``[...]`` of it."""


@dataclass
class ProjectionWeights:
    """The logical projections of one attention, as the papers write them (``hidden_states @ W``).

    Attributes:
        q_weight: ``[E, H D]``; head h owns columns ``h D .. (h + 1) D``.
        k_weight: ``[Ekv, Hkv D]``.
        v_weight: ``[Ekv, Hkv D]``.
        o_weight: ``[H D, E]``, or None where the host has no output projection.
        q_bias: ``[H D]`` or None where the host has none. Likewise the other three.
    """

    q_weight: Tensor
    k_weight: Tensor
    v_weight: Tensor
    o_weight: Tensor | None
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> "ProjectionWeights":
        """Return a copy with ``change`` applied to every tensor that is there.

        Args:
            change: A function from tensor to tensor.

        Returns:
            The new weights.
        """
        old = {field.name: getattr(self, field.name) for field in fields(self)}
        new: dict[str, Any] = {k: None if t is None else change(t) for k, t in old.items()}
        return ProjectionWeights(**new)


@dataclass(frozen=True)
class Stored:
    """One logical matrix or bias inside a parameter of the host.

    Attributes:
        owner: The module that holds the parameter.
        name: Its name there.
        rows: The view of it that holds this matrix, rows (outputs) first.
    """

    owner: nn.Module
    name: str
    rows: Rows

    @property
    def parameter(self) -> nn.Parameter:
        """The host's parameter, looked up now (it may have been replaced since).

        Raises:
            ValueError: The tensor is computed from others (a parametrization), quantised or on
                the meta device.
        """
        tensor = getattr(self.owner, self.name)
        where = f"{type(self.owner).__name__}.{self.name}"
        require(
            isinstance(tensor, nn.Parameter),
            f"{where} must be a parameter, so that writing to it changes the host",
            f"{type(tensor).__name__} (a parametrization or a weight norm computes it)",
            "remove the parametrization first",
        )
        require(
            tensor.is_floating_point(),
            f"{where} must hold floating-point numbers",
            f"dtype={tensor.dtype} (quantised weights cannot be read or written)",
        )
        return tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns as torch stores them, ``(out, in)``; a bias has one column."""
        parameter = self.parameter
        view = self.rows(parameter)
        columns = view.shape[-1] if parameter.ndim == 2 else 1
        return view.numel() // max(columns, 1), columns

    @torch.no_grad()
    def read(self) -> Shaped[Tensor, "..."]:
        """Copy out: ``[in, out]``, a bias ``[out]``.

        Raises:
            ValueError: The parameter has no values (meta device) or cannot be written.
        """
        parameter = self.parameter
        require(
            not parameter.is_meta,
            f"{type(self.owner).__name__}.{self.name} must have values",
            "a tensor on the meta device",
            "materialise the model first (to_empty and load, or from_pretrained)",
        )
        view = self.rows(parameter)
        if parameter.ndim == 1:
            return view.flatten().clone()
        return view.flatten(0, -2).mT.clone(memory_format=torch.contiguous_format)

    @torch.no_grad()
    def write(self, values: Tensor) -> None:
        """Copy in what ``read`` would return; the parameter stays the same object.

        Args:
            values: ``[in, out]``, a bias ``[out]``.
        """
        view = self.rows(self.parameter)
        view.copy_(values.mT.reshape(view.shape) if values.ndim == 2 else values.view(view.shape))


@dataclass(frozen=True)
class Projection:
    """A weight and its bias, None where the host has none."""

    weight: Stored
    bias: Stored | None = None


@dataclass(frozen=True)
class Layout:
    """The projections of one attention; ``o`` is None where the host has none.

    Example:
        >>> import torch
        >>> qkv, proj = torch.nn.Linear(48, 3 * 48), torch.nn.Linear(48, 48)
        >>> layout = Layout(*(linear(qkv, span(i * 48, 48)) for i in range(3)), linear(proj))
        >>> layout.read().k_weight.shape
        torch.Size([48, 48])
    """

    q: Projection
    k: Projection
    v: Projection
    o: Projection | None = None

    def stored(self) -> dict[str, Stored | None]:
        """Return what is stored under each field of ``ProjectionWeights``."""
        found: dict[str, Stored | None] = {}
        for letter in "qkvo":
            projection: Projection | None = getattr(self, letter)
            found[f"{letter}_weight"] = projection.weight if projection else None
            found[f"{letter}_bias"] = projection.bias if projection else None
        return found

    def read(self) -> ProjectionWeights:
        """Return copies of all weights in the logical layout, in the host's dtype and device."""
        read: dict[str, Any] = {name: at and at.read() for name, at in self.stored().items()}
        return ProjectionWeights(**read)

    def write(self, weights: ProjectionWeights) -> None:
        """Write all weights into the host, or none of them when one does not fit.

        Args:
            weights: As ``read`` returns them.

        Raises:
            ValueError: A tensor is missing, superfluous or of another shape.
        """
        stored = self.stored()
        for name, at in stored.items():
            _check_fits(name, at, getattr(weights, name))
        for name, at in stored.items():
            if at is not None:
                at.write(getattr(weights, name))

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that ``write`` changes, each once."""
        seen: set[int] = set()
        for at in self.stored().values():
            if at is not None and id(at.parameter) not in seen:
                seen.add(id(at.parameter))
                yield at.parameter


def _check_fits(name: str, at: Stored | None, values: Tensor | None) -> None:
    if at is None or values is None:
        require(
            at is None and values is None,
            f"{name} must be given where the host has one, and only there",
            f"{name}={'None' if values is None else list(values.shape)}",
            "None" if at is None else "a tensor",
        )
        return
    rows, columns = at.shape
    shape = (columns, rows) if name.endswith("weight") else (rows,)
    require(
        tuple(values.shape) == shape,
        f"{name} must have the host's shape",
        f"{name} of shape {list(values.shape)}",
        str(list(shape)),
    )


def whole(stored: Tensor) -> Tensor:
    """All rows: a projection with a tensor of its own.

    Args:
        stored: ``[out, ...]``.

    Returns:
        The tensor itself.
    """
    return stored


def span(start: int, length: int) -> Rows:
    """``length`` rows from ``start``: one of several matrices stored one after the other.

    Args:
        start: First row.
        length: How many.

    Returns:
        The view.
    """
    return partial(_span, start, length)


def _span(start: int, length: int, stored: Tensor) -> Tensor:
    return stored[start : start + length]


def interleaved(index: int, count: int, num_heads: int) -> Rows:
    """One of ``count`` matrices stored head by head: ``[num_heads, count, D, ...]``.

    Args:
        index: Which of the ``count``.
        count: How many matrices share the tensor.
        num_heads: Heads of each.

    Returns:
        The view.
    """
    return partial(_interleaved, index, count, num_heads)


def _interleaved(index: int, count: int, num_heads: int, stored: Tensor) -> Tensor:
    return stored.unflatten(0, (num_heads, count, -1))[:, index]


def _transposed(rows: Rows, stored: Tensor) -> Tensor:
    return rows(stored.mT)


def linear(owner: nn.Module, rows: Rows = whole) -> Projection:
    """The projection of an ``nn.Linear``, or of transformers' Conv1D, which stores the transpose.

    Args:
        owner: The layer; of an adapter around a layer (PEFT), the layer inside.
        rows: The part of its output that belongs to this projection.

    Returns:
        Where weight and bias lie.

    Raises:
        ValueError: A module of another kind.
    """
    owner = getattr(owner, "base_layer", owner)
    is_conv1d = any(c.__name__ == "Conv1D" and hasattr(owner, "nf") for c in type(owner).__mro__)
    require(
        isinstance(owner, nn.Linear) or is_conv1d,
        "a projection must be an nn.Linear or a transformers Conv1D",
        f"{type(owner).__module__}.{type(owner).__qualname__}",
        "describe any other tensor with Stored(owner, name, rows)",
    )
    bias = Stored(owner, "bias", rows) if getattr(owner, "bias", None) is not None else None
    if is_conv1d:
        return Projection(Stored(owner, "weight", partial(_transposed, rows)), bias)
    return Projection(Stored(owner, "weight", rows), bias)


def fused(owner: nn.Module, *widths: int) -> list[Projection]:
    """The projections stored one after the other in one layer, in its order.

    Args:
        owner: As for ``linear``.
        widths: Outputs of each; they need not be equal (grouped heads).

    Returns:
        One projection a width.
    """
    starts = [sum(widths[:i]) for i in range(len(widths))]
    return [linear(owner, span(start, width)) for start, width in zip(starts, widths, strict=True)]

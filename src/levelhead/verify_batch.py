"""One batch as the self-check sees it: which input holds tokens, and where they come out again."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.shapes import describe, require

SEQUENCES = (
    "decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds", "hidden_states",
    "tgt", "src", "query",
)  # fmt: skip
"""Inputs that hold one token a position; the first that is there is the one outputs belong to."""
PADDING_MASKS = {
    "attention_mask": ("input_ids", "inputs_embeds"),
    "src_key_padding_mask": ("src",),
}
"""Masks of padding tokens, and the inputs they speak of."""
TRUE_IS_PADDING = ("src_key_padding_mask",)


def run(model: nn.Module, batch: Any) -> Any:
    """Call a model with a batch.

    Args:
        model: Any model.
        batch: A mapping of keyword arguments, a tuple of positional ones, or the one argument.

    Returns:
        What the model returns.
    """
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def require_tokens(batch: Any) -> None:
    """Refuse a batch in which nothing can be changed and seen to move.

    Args:
        batch: Any batch.

    Raises:
        ValueError: A tensor of it is empty.
    """
    if isinstance(batch, Mapping):
        tensors = dict(batch)
    else:
        tensors = dict(enumerate(batch if isinstance(batch, tuple | list) else [batch]))
    for name, tensor in tensors.items():
        is_empty = isinstance(tensor, Tensor) and tensor.numel() == 0
        what = f"{name!r}" if isinstance(name, str) else f"argument {name}"
        require(
            not is_empty, "verify needs a batch of at least one sample of at least one token",
            f"{what} is empty: {describe(tensor)}" if is_empty else "",
        )  # fmt: skip


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors of an output, in order; caches are left out.

    Args:
        output: A tensor, a sequence or a mapping of them.
    """
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for name, value in output.items():
            if name not in ("past_key_values", "cache"):
                yield from tensors_in(value)
    elif isinstance(output, Sequence) and not isinstance(output, str):
        for value in output:
            yield from tensors_in(value)


def replaced(batch: Any, old: Tensor, new: Tensor) -> Any:
    """Return the batch with one tensor replaced wherever it stands.

    Args:
        batch: Any batch.
        old: The tensor to replace, by identity.
        new: What takes its place.

    Returns:
        A new batch.
    """
    if isinstance(batch, Mapping):
        return {name: new if value is old else value for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(new if value is old else value for value in batch)
    return new


@dataclass(frozen=True)
class Tokens:
    """The input whose positions show in the output.

    Attributes:
        batch: The batch it is part of.
        tensor: Token ids ``[B, T]`` or states ``[B, T, E]`` (``[T, B, E]`` where ``axis`` is 0).
        axis: The axis of positions.
    """

    batch: Any
    tensor: Tensor
    axis: int

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.tensor.shape[self.axis]

    def changed(self, positions: Tensor) -> Any:
        """Return the batch with other tokens at some positions.

        Args:
            positions: True = to change, ``[B, T]`` or ``[T]``.

        Returns:
            A new batch.
        """
        where = positions if self.axis == 1 or positions.ndim == 1 else positions.mT
        if positions.ndim == 1:
            where = positions[None, :] if self.axis == 1 else positions[:, None]
        tensor = self.tensor
        if tensor.ndim == 3:
            where = where.unsqueeze(-1)
        return replaced(self.batch, tensor, torch.where(where, _others(tensor), tensor))

    def positions_of(self, output: Any) -> Tensor | None:
        """Return the first tensor of an output that has one row for each token, batch first.

        Args:
            output: What the model returned.

        Returns:
            ``[B, T, ...]``, or None.
        """
        shape = self.tensor.shape[:2]
        for tensor in tensors_in(output):
            if tensor.ndim >= 3 and tensor.shape[:2] == shape:
                return tensor if self.axis == 1 else tensor.transpose(0, 1)
        return None


def _others(tensor: Tensor) -> Tensor:
    """Something else at every position: another id of the batch, or a state plus a ramp.

    A ramp, because a LayerNorm takes back what is the same in all coordinates.
    """
    if tensor.is_floating_point():
        ramp = torch.linspace(-1, 1, tensor.shape[-1], device=tensor.device, dtype=tensor.dtype)
        return tensor + (tensor.std() + 0.5) * ramp
    values = tensor.unique()
    if len(values) == 1:
        return torch.where(tensor == 0, 1, tensor - 1)
    rank = torch.searchsorted(values, tensor.contiguous())
    return values[(rank + 1) % len(values)]


def find_tokens(model: nn.Module, batch: Any) -> Tokens | None:
    """Find the input that holds tokens.

    Args:
        model: Says whether states come batch first (``nn.MultiheadAttention``).
        batch: Any batch.

    Returns:
        It, or None for a batch without one (images).
    """
    tensor = next(_candidates(batch), None)
    if tensor is None:
        return None
    is_ids = tensor.ndim == 2 and not tensor.is_floating_point()
    if not is_ids and not (tensor.ndim == 3 and tensor.is_floating_point()):
        return None
    heads = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    tokens_first = not is_ids and any(not head.batch_first for head in heads)
    return Tokens(batch, tensor, 0 if tokens_first else 1)


def _candidates(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Mapping):
        yield from (batch[name] for name in SEQUENCES if isinstance(batch.get(name), Tensor))
    elif isinstance(batch, tuple | list):
        yield from (value for value in batch[:1] if isinstance(value, Tensor))
    elif isinstance(batch, Tensor):
        yield batch


@dataclass(frozen=True)
class Padded:
    """A batch with padding.

    Attributes:
        tokens: The input that holds padding tokens.
        is_padding: ``[B, T]``.
        shares_positions: Whether outputs belong to the tokens of this very input.
    """

    tokens: Tokens
    is_padding: Tensor
    shares_positions: bool


def find_padding(model: nn.Module, batch: Any) -> Padded | None:
    """Find the padding of a batch, or pad the end of its first sequence where it has ids alone.

    Args:
        model: As for ``find_tokens``.
        batch: Any batch.

    Returns:
        The padded batch, or None where padding makes no sense.
    """
    tokens = find_tokens(model, batch)
    if tokens is None or not isinstance(batch, Mapping):
        return None
    for name, inputs in PADDING_MASKS.items():
        mask = batch.get(name)
        source = next((batch[i] for i in inputs if isinstance(batch.get(i), Tensor)), None)
        if source is None or mask is None and name != "attention_mask":
            continue
        axis = tokens.axis if source.ndim == 3 else 1
        if mask is None:
            mask = torch.ones(source.shape[:2], dtype=torch.long, device=source.device)
        if mask.ndim != 2:
            return None
        is_padding = mask.bool() if name in TRUE_IS_PADDING else mask == 0
        if not is_padding.any():
            is_padding = torch.zeros_like(is_padding)
            is_padding[0, -max(1, is_padding.shape[1] // 4) :] = True
        mask = (is_padding if name in TRUE_IS_PADDING else ~is_padding).to(mask.dtype)
        whole = {**batch, name: mask}
        return Padded(Tokens(whole, source, axis), is_padding, source is tokens.tensor)
    return None

"""Which queries of an attention call are tokens and not padding, and where its documents start.

A batch of unequal rows holds padding that says nothing about the model; its mask tells where.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from levelhead.sites.calls import AttentionCall
from levelhead.visible import real_queries


class TokenFinder:
    """Tells tokens from padding in the calls of a model, in the order in which they come.

    A self-attention says by its mask which of its queries are padding: those that nobody may
    attend to. The queries of a cross-attention are those of the self-attention before it.

    Args:
        batch: What the model is called with, if it is known: a tensor, a tuple or a mapping.
    """

    def __init__(self, batch: Any = None) -> None:
        self._last: Bool[Tensor, "B T"] | None = None
        self._ids = token_ids(batch)

    def ids_of(self, call: AttentionCall) -> Int[Tensor, "B T"] | None:
        """Return the token ids of a call's queries.

        Args:
            call: What its kernel saw.

        Returns:
            The ids of a causal self-attention over all tokens of the batch, else None.
        """
        num_batch, _, num_queries, _ = call.query.shape
        is_causal = call.site.kind == "self" and (call.site.is_causal or call.is_causal)
        if not is_causal or call.key.shape[2] != num_queries:
            return None
        shape = (num_batch, num_queries)
        return next((ids for ids in self._ids if tuple(ids.shape) == shape), None)

    @property
    def last(self) -> Bool[Tensor, "B T"] | None:
        """Tokens of the last self-attention; None where it masked nothing."""
        return self._last

    def tokens_of(self, call: AttentionCall) -> Bool[Tensor, "B T"] | None:
        """Return which queries of a call are tokens.

        Args:
            call: What its kernel saw.

        Returns:
            False for padding; None where nothing says so.
        """
        shape = (call.query.shape[0], call.query.shape[2])
        if call.site.kind == "self":
            found = real_queries(call.mask())
            self._last = None if found is None or found.all() else found.expand(shape).clone()
        last = self._last if call.site.kind in ("self", "cross") else None
        return last if last is not None and last.shape == shape else None


def token_ids(batch: Any) -> list[Int[Tensor, "B T"]]:
    """Find the token ids of a batch.

    Args:
        batch: A tensor, a tuple or list of positional arguments, or a mapping.

    Returns:
        Integer tensors ``[B, T]``, those of a decoder first.
    """
    if isinstance(batch, Mapping):
        named = {str(k): v for k, v in batch.items() if str(k).endswith(("input_ids", "tokens"))}
        parts = [named[name] for name in sorted(named, key=lambda name: "decoder" not in name)]
    else:
        parts = list(batch[:1]) if isinstance(batch, (tuple, list)) else [batch]
    return [
        part
        for part in parts
        if isinstance(part, Tensor) and part.ndim == 2 and part.dtype in (torch.int64, torch.int32)
    ]


def document_starts(
    call: AttentionCall, tokens: Bool[Tensor, "B T"] | None
) -> Bool[Tensor, "B S"] | None:
    """Mark the first token of each document, as the mask of a self-attention tells it.

    A token starts a document where it may not attend to the token before it.

    Args:
        call: What its kernel saw.
        tokens: False for padding.

    Returns:
        True at the first tokens; None where the mask is no more than padding and causality, which
        ``concentration`` reads by itself.
    """
    num_queries, num_keys = call.query.shape[2], call.key.shape[2]
    mask = call.mask()
    if call.site.kind != "self" or num_queries != num_keys or mask.is_key_padding:
        return None
    visible = mask.visible()
    assert visible is not None
    visible = visible.expand(call.query.shape[0], -1, num_queries, num_keys).any(1)
    starts = torch.ones_like(visible[:, 0])
    starts[:, 1:] = ~visible.diagonal(-1, 1, 2)
    return starts if tokens is None else starts & tokens


def key_tokens(
    call: AttentionCall, tokens: Bool[Tensor, "B T"] | None
) -> Bool[Tensor, "B S"] | None:
    """Return which keys of a call are tokens.

    Args:
        call: What its kernel saw.
        tokens: Which queries are.

    Returns:
        False for padding; None where nothing says so.
    """
    shape = (call.key.shape[0], call.key.shape[2])
    if call.site.kind == "self":
        return tokens if tokens is not None and tokens.shape == shape else None
    visible = call.mask().keys().visible() if call.site.kind == "cross" else None
    return None if visible is None else visible.any((1, 2)).expand(shape)


def without_padding(
    tensor: Float[Tensor, "B H T D"], tokens: Bool[Tensor, "B T"] | None
) -> Float[Tensor, "B H T D"]:
    """Put zeros where there is padding.

    Args:
        tensor: Queries or keys.
        tokens: False for padding, or None.

    Returns:
        The same, or a copy.
    """
    return tensor if tokens is None else tensor.masked_fill(~tokens[:, None, :, None], 0)

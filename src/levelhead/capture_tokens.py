"""Which queries of an attention call are tokens and not padding, and where its documents start.

A batch of unequal rows holds padding that says nothing about the model; its mask tells where.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from levelhead.sites.calls import AttentionCall
from levelhead.stages.masks import real_queries


class TokenFinder:
    """Tells tokens from padding in the calls of a model, in the order in which they come.

    A self-attention says by its mask which of its queries are padding: those that nobody may
    attend to. The queries of a cross-attention are those of the self-attention before it.
    """

    def __init__(self) -> None:
        self._last: Bool[Tensor, "B T"] | None = None

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

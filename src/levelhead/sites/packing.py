"""Documents packed into one row: let the host's own mask see where they begin.

transformers reads boundaries off restarting position ids, but only without a mask and without a
cache; with either, documents attend to each other.
"""

from typing import Any

import torch
from torch import Tensor, nn

CACHES = ("cache", "past_key_values")


def keep_documents_apart(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook: drop an all-ones mask and the cache where position ids restart.

    Compiled code cannot look at values, so there the call stays as it is.

    Args:
        model: The hooked model.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Returns:
        Changed arguments, or None where the row holds one document.

    Raises:
        ValueError: Documents are packed beside padding or over a cache, where their boundaries
            would not be seen. A mask that is 4-D already is taken at its word.
    """
    position_ids, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if torch.compiler.is_compiling() or not isinstance(position_ids, Tensor):
        return None
    is_prepared = mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2)
    if is_prepared or position_ids.ndim != 2:
        return None
    restarts = position_ids.diff(dim=-1) != 1
    if mask is not None:
        real = mask[:, -position_ids.shape[1] :].bool()
        restarts = restarts & real[:, 1:] & real[:, :-1]
    if not restarts.any():
        return None
    if mask is not None and not mask.bool().all():
        raise ValueError(
            "documents are packed (position_ids restart) beside padding: their boundaries would "
            "not be seen; pass rows without padding and no attention_mask, or a 4-D mask"
        )
    if any(kwargs.get(name) is not None for name in CACHES):
        raise ValueError(
            "documents are packed (position_ids restart) over a cache: their boundaries would "
            "not be seen; pass no cache"
        )
    return args, {**kwargs, "attention_mask": None, "use_cache": False}

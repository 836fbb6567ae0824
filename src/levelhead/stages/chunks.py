"""Plain attention over blocks of queries: for scores that no fused kernel can bend."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from levelhead.modes import is_transformed

BLOCK = 128
"""Queries at a time: a block of scores stays in the cache of a core up to some thousand keys."""


def map_query_blocks(
    function: Callable[[Tensor, int, int], Tensor], query: Tensor, block: int = BLOCK
) -> Tensor:
    """Apply a function to blocks of queries, forgetting each block's scores.

    In training each block is computed again in the backward pass, so that no more than one
    block of scores is alive at a time; the transforms of ``torch.func``, which refuse that, keep
    them. A compiled graph takes the whole at once, since a loop would be compiled anew for each
    length.

    Args:
        function: ``(query block, start, stop) -> output block``; deterministic but for dropout,
            whose random state is kept.
        query: ``[B, H, T, D]``.
        block: Queries at a time.

    Returns:
        ``[B, H, T, Dv]``.
    """
    num_queries = query.shape[2]
    if torch.compiler.is_compiling() or num_queries <= block:
        return function(query, 0, num_queries)
    outputs = []
    for start in range(0, num_queries, block):
        stop = min(start + block, num_queries)
        arguments = (query[:, :, start:stop], start, stop)
        if torch.is_grad_enabled() and not is_transformed():
            outputs.append(checkpoint(function, *arguments, use_reentrant=False))
        else:
            outputs.append(function(*arguments))
    return torch.cat(outputs, dim=2)

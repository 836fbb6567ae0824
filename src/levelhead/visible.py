"""What queries see under a mask: how many keys, the sum and the mean of their values."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from levelhead.modes import is_transformed
from levelhead.shapes import at_least_float32, without_autocast
from levelhead.stages.masks import AttentionMask

WINDOW_QUERIES = 128
"""So many rows of weights, shared by all heads, are a block (as in ``stages.chunks``) and no T x S
matrix."""


_RUN = 64
"""So many tokens are summed by one matrix product."""


def running_sum(rows: Float[Tensor, "B H S D"]) -> Float[Tensor, "B H S D"]:
    """Sum every row with all rows before it, as ``cumsum(dim=2)``.

        total[t] = sum_{s <= t} rows[s]

    On a CPU in runs of tokens with the heads side by side: a triangle of ones sums within a run,
    a cumulative sum of whole runs goes before it. Rows lie in memory as projections write them,
    and torch's own gradient of a cumulative sum takes ten times as long there. A compiler and
    ``torch.func`` get the operator itself.

    Args:
        rows: The rows, finite; no row changes a sum before it.

    Returns:
        The sums in the dtype of ``rows``.
    """
    if rows.device.type != "cpu" or torch.compiler.is_compiling() or is_transformed():
        return rows.cumsum(dim=2)
    return _RunningSum.apply(rows, False)  # pyright: ignore[reportReturnType]


class _RunningSum(torch.autograd.Function):
    """Sum every row with those before it, or, in its gradient, with those after it.

    Its own gradient, and in full precision too where the backward pass runs under autocast. By
    ``reshape`` alone, which ``torch.autograd.grad(is_grads_batched=True)`` takes.
    """

    @staticmethod
    def forward(ctx, rows, is_backwards):
        ctx.is_backwards = is_backwards
        batch, num_heads, num_rows, width = rows.shape
        side_by_side = rows.transpose(1, 2).reshape(batch, num_rows, num_heads * width)
        if num_rows % _RUN:
            side_by_side = F.pad(side_by_side, (0, 0, 0, -num_rows % _RUN))
        num_runs = side_by_side.shape[1] // _RUN
        runs = side_by_side.reshape(batch, num_runs, _RUN, num_heads * width)
        ones = runs.new_ones(_RUN, _RUN)
        with without_autocast("cpu"):
            total = (ones.triu_() if is_backwards else ones.tril_()) @ runs
        if is_backwards:
            total[:, :-1] += total[:, 1:, :1].flip(1).cumsum(dim=1).flip(1)
        else:
            total[:, 1:] += total[:, :-1, -1:].cumsum(dim=1)
        total = total.reshape(batch, num_runs * _RUN, num_heads, width)
        return total[:, :num_rows].transpose(1, 2)

    @staticmethod
    def backward(ctx, *grads):
        return _RunningSum.apply(grads[0], not ctx.is_backwards), None

    @staticmethod
    def jvp(ctx, tangent, _):
        return _RunningSum.apply(tangent, ctx.is_backwards)


def visible_sum(
    mask: AttentionMask, value: Float[Tensor, "B Hkv S Dv"]
) -> tuple[Float[Tensor, "B Hkv #T Dv"], Tensor]:
    """Sum the values every query may attend to, without a T x S matrix.

        total[t] = sum_{s visible to t} value[s],   count[t] = |{s visible to t}|

    Plain sums without causality, cumulative sums with it. Only for masks that are the same for
    all queries and heads but for causality (``mask.is_key_padding``).

    Args:
        mask: What is visible.
        value: Values.

    Returns:
        The sums, in float32 or wider (a bfloat16 cumulative sum loses .4 %), and the counts as
        floats ``[#B, 1, #T, 1]``; T is 1 where all queries see the same.
    """
    compute_dtype = at_least_float32(value.dtype)
    keys = mask.keys().visible()
    wide = value.to(compute_dtype)
    if keys is None:
        seen = torch.ones(1, 1, mask.num_keys, 1, dtype=compute_dtype, device=value.device)
    else:
        seen = keys.mT.to(compute_dtype)
        wide = wide * seen
    if not mask.is_causal or mask.num_queries == 1:
        count = seen.expand(-1, -1, mask.num_keys, -1).sum(dim=-2, keepdim=True)
        return wide.sum(dim=-2, keepdim=True), count
    count = seen.expand(-1, -1, mask.num_keys, -1).cumsum(dim=-2)
    first = mask.num_keys - mask.num_queries
    return running_sum(wide)[..., first:, :], count[..., first:, :]


def visible_count(mask: AttentionMask) -> Tensor:
    """Count the keys every query may attend to, under any mask.

    Args:
        mask: What is visible.

    Returns:
        Integers of shape ``[#B, #H, #T, 1]``.
    """
    visible = mask.visible()
    if visible is None:
        return torch.full((1, 1, 1, 1), mask.num_keys, device=mask.device)
    return visible.expand(-1, -1, -1, mask.num_keys).sum(dim=-1, keepdim=True)


def visible_mean(
    mask: AttentionMask, value: Float[Tensor, "B Hkv S Dv"], num_heads: int
) -> Float[Tensor, "B Hany T Dv"]:
    """Average the values every query may attend to, under any mask.

        mean[t] = sum_{s visible to t} value[s] / count[t] = attention(query = 0, key = 0, value)

    By attention with zero scores, fused; windows whose heads share a mask take one product.

    Args:
        mask: What is visible; not "everything".
        value: Values.
        num_heads: H.

    Returns:
        The means, per key/value head where the heads share one mask and per query head
        otherwise; zeros where a query may attend to nothing.
    """
    visible = mask.visible()
    assert visible is not None
    if visible.shape[1] == 1:
        if mask.num_queries <= WINDOW_QUERIES:
            return _shared_mean(visible.expand(-1, -1, mask.num_queries, mask.num_keys), value)
        num_heads = value.shape[1]
    query = value.new_zeros(value.shape[0], num_heads, mask.num_queries, value.shape[-1])
    key = torch.zeros_like(value)  # dense: an expanded zero would be left to the plain kernel
    return F.scaled_dot_product_attention(
        query, key, value, visible, enable_gqa=num_heads != value.shape[1]
    )


def _shared_mean(visible: Bool[Tensor, "#B 1 T S"], value: Tensor) -> Tensor:
    """Average over the keys with the heads side by side: one small matrix for all of them."""
    compute_dtype = at_least_float32(value.dtype)
    seen = visible[:, 0].to(compute_dtype)
    seen = seen / seen.sum(dim=-1, keepdim=True).clamp_min(1.0)
    side_by_side = value.transpose(1, 2).flatten(2).to(compute_dtype)
    mean = (seen @ side_by_side).unflatten(-1, (value.shape[1], -1)).transpose(1, 2)
    return mean.to(value.dtype)


def real_queries(mask: AttentionMask) -> Bool[Tensor, "#B T"] | None:
    """Guess which queries are tokens and not padding, in self-attention.

    A query is padding when it may attend to nothing, or when nobody may attend to its own key
    (key ``S - T + t`` belongs to query t; with fewer keys than queries no key does).

    Args:
        mask: What is visible.

    Returns:
        True = a real token; None when nothing is masked.
    """
    if mask.mask is None and mask.bias is None:
        return None
    if mask.is_key_padding:
        keys = mask.keys().visible()
        assert keys is not None
        seen = keys.expand(-1, -1, -1, mask.num_keys)[:, 0, 0]
        if mask.num_keys < mask.num_queries:
            return seen.any(dim=-1, keepdim=True).expand(-1, mask.num_queries)
        return seen[:, mask.num_keys - mask.num_queries :]
    visible = mask.visible()
    assert visible is not None
    visible = visible.expand(-1, -1, mask.num_queries, mask.num_keys).any(dim=1)
    attends = visible.any(dim=-1)
    if mask.num_keys < mask.num_queries:
        return attends
    attended = visible.any(dim=-2)[:, mask.num_keys - mask.num_queries :]
    return attends & attended

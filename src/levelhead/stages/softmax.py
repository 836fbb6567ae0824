"""Normalisers: softmax, and softmax with a sink that takes weight without giving a value."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from levelhead.kernels import SinkAttention, find_lse_kernel, warn_if_plain
from levelhead.kernels_mapped import Mapped, MappedAttention, Then, find_mapped_kernel

_HEAD_DIM_MULTIPLE = 8


def softmax_attention(
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B Hkv S D"],
    value: Float[Tensor, "B Hkv S Dv"],
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout_p: float = 0.0,
    then: Then | None = None,
) -> Float[Tensor, "B H T Dv"]:
    """Plain attention by torch's fused kernels, and a map of its output.

        attn_output = then(softmax(scale * query @ key^T + mask) @ value)

    Args:
        query: Queries.
        key: Keys; ``Hkv`` divides ``H``, nothing is expanded where the kernel can group.
        value: Values.
        attn_mask: Boolean (True = may attend) or float (added), or None.
        is_causal: Top-left causal, for as many keys as queries.
        scale: Factor on the dot product.
        dropout_p: Probability of dropping a weight.
        then: What is done to the output; where that saves memory, the result of a `Mapped` alone
            is kept for the backward pass.

    Returns:
        One output per query and head; zeros, before the map, where a query may attend to nothing.

    Source: Vaswani et al. 2017, eq. 1, through ``F.scaled_dot_product_attention``.
    """
    warn_if_plain(query, key, value, attn_mask, is_causal, dropout_p)
    kernel = None
    if isinstance(then, Mapped):
        kernel = find_mapped_kernel(query, key, value, attn_mask, dropout_p)
    if isinstance(then, Mapped) and kernel is not None:
        bias = added_mask(attn_mask, query)
        call = (bias, is_causal, scale, kernel, then.output_map, *then.tensors)
        return MappedAttention.apply(query, key, value, *call)  # pyright: ignore[reportReturnType]
    attn_output = F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return attn_output if then is None else then(attn_output)


def added_mask(attn_mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Turn a boolean mask into one that is added to the scores, as the kernels want it.

    Args:
        attn_mask: Boolean (True = may attend) or float, or None.
        query: For dtype and device.

    Returns:
        0 and -inf for a boolean mask, any other as it is.
    """
    if attn_mask is None or attn_mask.dtype != torch.bool:
        return attn_mask
    return torch.where(
        attn_mask, torch.zeros((), dtype=query.dtype, device=query.device), -torch.inf
    )


def sink_attention(
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B Hkv S D"],
    value: Float[Tensor, "B Hkv S Dv"],
    sink_score: Float[Tensor, " H"],
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout_p: float = 0.0,
) -> Float[Tensor, "B H T Dv"]:
    """Attention in which every head also holds one key without a value, fused.

        attn_output = SDPA(query, key, value) * sigmoid(lse - sink_score)

    By a kernel that hands back its log-sum-exp where there is one, else by an extra key
    (``extra_key_attention``): the same numbers.

    Args:
        query: Queries.
        key: Keys; ``Hkv`` divides ``H``.
        value: Values.
        sink_score: Unscaled score of the extra key; zero for "off by one".
        attn_mask: Boolean (True = may attend) or float (added, gets no gradient), or None.
        is_causal: Top-left causal, for as many keys as queries.
        scale: Factor on the dot product.
        dropout_p: Probability of dropping a weight.

    Returns:
        One output per query and head; zeros where a query may attend to nothing.

    Source: OpenAI 2025 (GPT-OSS); Miller 2023 (off by one). METHODS 8.
    """
    learns_mask = attn_mask is not None and attn_mask.requires_grad
    kernel = find_lse_kernel(query, key, value, attn_mask is not None)
    if kernel is None or dropout_p > 0 or learns_mask:
        return extra_key_attention(
            query, key, value, sink_score, attn_mask, is_causal, scale, dropout_p
        )
    attn_mask = added_mask(attn_mask, query)
    # Views, because one tensor may be all three, which Dynamo refuses in an autograd function.
    rows = (query, key.view_as(key), value.view_as(value))
    return SinkAttention.apply(*rows, sink_score, attn_mask, is_causal, scale, kernel)  # pyright: ignore[reportReturnType]


def extra_key_attention(
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B Hkv S D"],
    value: Float[Tensor, "B Hkv S Dv"],
    sink_score: Float[Tensor, " H"],
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout_p: float = 0.0,
) -> Float[Tensor, "B H T Dv"]:
    """Attention with a sink by public operators alone: a first key with a value of zero.

    One more coordinate carries the sink's score (one on every query, ``sink_score / scale`` on
    the extra key, zero on the others); one dummy query in front keeps a causal mask aligned.

    Args:
        query: Queries.
        key: Keys; expanded to H heads, since the sink differs by query head.
        value: Values.
        sink_score: Unscaled score of the extra key.
        attn_mask: Boolean (True = may attend) or float (added), or None.
        is_causal: Top-left causal, for as many keys as queries.
        scale: Factor on the dot product.
        dropout_p: Probability of dropping a weight.

    Returns:
        One output per query and head.
    """
    batch, num_heads, num_queries, head_dim = query.shape
    if scale == 0:
        query, scale = query * scale, 1.0
    num_groups = num_heads // key.shape[1]
    width = -(-(head_dim + 1) // _HEAD_DIM_MULTIPLE) * _HEAD_DIM_MULTIPLE
    key = key.repeat_interleave(num_groups, dim=1)
    value = value.repeat_interleave(num_groups, dim=1)
    sink = (sink_score / scale).to(key.dtype)[None, :, None, None]
    sink_key = F.pad(sink.expand(batch, -1, 1, 1), (head_dim, width - head_dim - 1))
    key = torch.cat([sink_key, F.pad(key, (0, width - head_dim))], dim=2)
    query = F.pad(F.pad(query, (0, 1), value=1.0), (0, width - head_dim - 1))
    same_width = value.shape[-1] == head_dim
    padded_value = F.pad(value, (0, width - head_dim if same_width else 0, 1, 0))
    if is_causal:
        query = F.pad(query, (0, 0, 1, 0))
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*attn_mask.shape[:-1], key.shape[2] - 1)
        attn_mask = F.pad(attn_mask, (1, 0), value=attn_mask.dtype == torch.bool)
    warn_if_plain(query, key, padded_value, attn_mask, is_causal, dropout_p)
    output = F.scaled_dot_product_attention(
        query, key, padded_value, attn_mask, dropout_p, is_causal, scale=scale
    )
    return output[..., output.shape[-2] - num_queries :, : value.shape[-1]]

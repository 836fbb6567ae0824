"""Mimetic initialisation: products of projections that look like those of trained models."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from levelhead.init.blocks import (
    check_grouping,
    check_projection,
    is_number,
    merge_heads,
    split_heads,
    standard_normal,
)
from levelhead.init.factors import balanced_factors, least_squares_queries, turned_factors
from levelhead.shapes import require

QK_NOISE, QK_IDENTITY = 0.7, 0.7
VO_NOISE, VO_IDENTITY = 0.4, -0.4
"""The paper's constants for vision Transformers (Trockman and Kolter 2023)."""


def mimetic_target(
    rows: int,
    columns: int,
    noise: float,
    identity: float,
    like: Tensor,
    generator: torch.Generator | None,
) -> Float[Tensor, "rows columns"]:
    """Draw the matrix that a product of projections shall look like.

        target = noise * Z + identity * I,    Z_ij ~ N(0, 1 / rows)

    Args:
        rows: E.
        columns: E of the other side.
        noise: Factor on the Gaussian part.
        identity: Factor on the identity, negative for values and outputs.
        like: Gives device and the least width of the dtype.
        generator: Random source; None uses torch's global one.

    Returns:
        The target, in float32 or wider.
    """
    require(
        is_number(noise) and is_number(identity),
        "the factors of noise and identity must be finite numbers",
        f"noise={noise!r}, identity={identity!r}",
    )
    target = standard_normal((rows, columns), like, generator) * (noise / math.sqrt(rows))
    target.diagonal().add_(identity)
    return target


@torch.no_grad()
def mimetic_qk(
    q_weight: Float[Tensor, "E HD"],
    k_weight: Float[Tensor, "Ekv HkvD"],
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    noise: float = QK_NOISE,
    identity: float = QK_IDENTITY,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Query and key projections whose product per head is near a multiple of the identity.

        W_Q^h W_K^h^T ~ noise * Z_h + identity * I,    truncated to rank D

    The truncation leaves a mean diagonal below ``identity`` (.12 for E = 768, D = 64). One target
    a layer is decomposed; the heads see its factors from independent random directions, which
    gives each head the law of a target of its own (`turned_factors` says what heads share). Under
    GQA the key is the right factor of the first query head's target, and every other query head
    of the group solves ``W_Q^h W_K^T ~ its own target`` by least squares.

    Args:
        q_weight: Gives shape, dtype and device; not changed.
        k_weight: Likewise.
        num_heads: Query heads.
        num_kv_heads: Key heads; None for as many as query heads.
        noise: Factor on Z, entries of variance 1 / E.
        identity: Factor on I.
        generator: Random source; None uses torch's global one.

    Returns:
        New q and k weights in float32 (float64 where the host is).

    Source: Trockman and Kolter, Mimetic Initialization of Self-Attention Layers, ICML 2023, arXiv
    2305.09828. Differs from it in: one decomposition a layer instead of one a head, and the rule
    for GQA, are ours.
    """
    num_kv_heads = check_grouping(num_heads, num_kv_heads)
    check_projection("q_weight", q_weight, num_heads, "num_heads")
    check_projection("k_weight", k_weight, num_kv_heads, "num_kv_heads")
    head_dim = q_weight.shape[1] // num_heads
    sizes = q_weight.shape[0], k_weight.shape[0]
    query_heads: list[Tensor] = []
    key_heads: list[Tensor] = []
    target = mimetic_target(*sizes, noise, identity, q_weight, generator)
    first = balanced_factors(target, head_dim, generator)
    others = num_heads // num_kv_heads - 1
    for left, right in turned_factors(*first, num_kv_heads, generator):
        query_heads += [left]
        query_heads += least_squares_queries(right, sizes[0], others, noise, identity, generator)
        key_heads.append(right.mT)
    return merge_heads(torch.stack(query_heads)), merge_heads(torch.stack(key_heads))


@torch.no_grad()
def mimetic_vo(
    v_weight: Float[Tensor, "Ekv HkvDv"],
    o_weight: Float[Tensor, "HDv E"],
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    noise: float = VO_NOISE,
    identity: float = VO_IDENTITY,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Value and output projections whose product over the layer is near a negative identity.

        sum_h W_V^h W_O^h = noise * Z + identity * I

    Exact where ``Hkv D >= E``, else truncated to rank ``Hkv D``. Under GQA the value and the sums
    of the output over each group come from one factorisation, and each head of a group gets its
    share, the sum divided by the group's size.

    Args:
        v_weight: Gives shape, dtype and device; not changed.
        o_weight: Likewise.
        num_heads: Query heads.
        num_kv_heads: Value heads; None for as many as query heads.
        noise: Factor on Z, entries of variance 1 / E.
        identity: Factor on I.
        generator: Random source; None uses torch's global one.

    Returns:
        New v and o weights in float32 (float64 where the host is).

    Source: as `mimetic_qk`.
    """
    num_kv_heads = check_grouping(num_heads, num_kv_heads)
    check_projection("v_weight", v_weight, num_kv_heads, "num_kv_heads")
    check_projection("o_weight transposed", o_weight.mT, num_heads, "num_heads")
    sizes = v_weight.shape[0], o_weight.shape[1]
    target = mimetic_target(*sizes, noise, identity, v_weight, generator)
    value, group_sums = balanced_factors(target, v_weight.shape[1], generator)
    del target
    group_size = num_heads // num_kv_heads
    shares = split_heads(group_sums.div_(group_size).mT, num_kv_heads)
    return value, merge_heads(shares.repeat_interleave(group_size, dim=0)).mT


@torch.no_grad()
def mimetic_(
    q_weight: Float[Tensor, "E HD"],
    k_weight: Float[Tensor, "Ekv HkvD"],
    v_weight: Float[Tensor, "Ekv HkvDv"],
    o_weight: Float[Tensor, "HDv E"],
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    qk_noise: float = QK_NOISE,
    qk_identity: float = QK_IDENTITY,
    vo_noise: float = VO_NOISE,
    vo_identity: float = VO_IDENTITY,
    generator: torch.Generator | None = None,
) -> None:
    """Fill the four projections in place as `mimetic_qk` and `mimetic_vo` say, each cast once.

    A ``nn.Linear`` stores the transpose: pass ``linear.weight.T``.

    Args:
        q_weight: Changed in place.
        k_weight: Changed in place.
        v_weight: Changed in place.
        o_weight: Changed in place.
        num_heads: Query heads.
        num_kv_heads: Key/value heads; None for as many as query heads.
        qk_noise: Factor on the Gaussian part of the query-key products.
        qk_identity: Factor on their identity.
        vo_noise: Factor on the Gaussian part of the value-output product.
        vo_identity: Factor on its identity.
        generator: Random source; None uses torch's global one.
    """
    common = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "generator": generator}
    q, k = mimetic_qk(q_weight, k_weight, noise=qk_noise, identity=qk_identity, **common)
    v, o = mimetic_vo(v_weight, o_weight, noise=vo_noise, identity=vo_identity, **common)
    for weight, fresh in zip((q_weight, k_weight, v_weight, o_weight), (q, k, v, o), strict=True):
        weight.copy_(fresh)

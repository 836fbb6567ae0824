"""Conditioned initialisation: q and k semi-orthogonal per head, v the identity."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from levelhead.init.blocks import apply_gain, check_grouping, check_projection
from levelhead.init.orthogonal import orthogonal
from levelhead.shapes import at_least_float32, require_known

ValueIdentity = Callable[[Tensor, int], Tensor]


def fused_identity(v_weight: Float[Tensor, "E HD"], num_kv_heads: int) -> Float[Tensor, "E HD"]:
    """The rectangular identity on the whole matrix: head h reads coordinates ``h D .. (h + 1) D``.

        X W_V = X        where Hkv D = E

    Args:
        v_weight: Gives shape, dtype and device.
        num_kv_heads: Not needed by this form.

    Returns:
        The identity; columns beyond E are zero.
    """
    rows, columns = v_weight.shape
    compute_dtype = at_least_float32(v_weight.dtype)
    return torch.eye(rows, columns, dtype=compute_dtype, device=v_weight.device)


def per_head_identity(v_weight: Float[Tensor, "E HD"], num_kv_heads: int) -> Float[Tensor, "E HD"]:
    """The rectangular identity in every head: all heads read the first D coordinates.

    Args:
        v_weight: Gives shape, dtype and device.
        num_kv_heads: How many heads share the columns.

    Returns:
        ``[I, I, ...]``, one ``E x D`` identity per head.
    """
    head_dim = v_weight.shape[1] // num_kv_heads
    return fused_identity(v_weight[:, :head_dim], 1).repeat(1, num_kv_heads)


VALUE_IDENTITIES: dict[str, ValueIdentity] = {
    "fused": fused_identity,
    "per_head": per_head_identity,
}


@torch.no_grad()
def conditioned(
    q_weight: Float[Tensor, "E HD"],
    k_weight: Float[Tensor, "Ekv HkvD"],
    v_weight: Float[Tensor, "Ekv HkvDv"],
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    value: str = "fused",
    gain: float | str = 1.0,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Projections under which each head's factors start with condition number 1.

        W_Q^T W_Q = I_D,    W_K^T W_K = I_D    per head, independent and uniform;    W_V = I

    With ``value="fused"``, ``Hkv D = E`` and no value bias, ``X W_V = X``. Biases and the output
    projection are not part of the method.

    Args:
        q_weight: Gives shape, dtype and device, and the norm under ``gain="match"``; not changed.
        k_weight: Likewise.
        v_weight: Likewise.
        num_heads: Query heads.
        num_kv_heads: Key/value heads; None for as many as query heads.
        value: "fused", one identity over all heads, or "per_head", one in each.
        gain: A positive factor on all three, or "match": each keeps its Frobenius norm, which
            separates conditioning from scale.
        generator: Random source; None uses torch's global one.

    Returns:
        New q, k and v weights in float32 (float64 where the host is).

    Source: Saratchandran and Lucey, Conditioned Initialization for Attention, ICLR 2026. Differs
    from it in: ``value="fused"`` and ``gain="match"`` are ours; the literal reading is
    ``value="per_head", gain=1``.
    """
    num_kv_heads = check_grouping(num_heads, num_kv_heads)
    require_known("value", value, VALUE_IDENTITIES)
    check_projection("v_weight", v_weight, num_kv_heads, "num_kv_heads")
    q = orthogonal(q_weight, num_heads=num_heads, gain=gain, generator=generator)
    k = orthogonal(k_weight, num_heads=num_kv_heads, gain=gain, generator=generator)
    v = apply_gain(VALUE_IDENTITIES[value](v_weight, num_kv_heads), v_weight, gain)
    return q, k, v


@torch.no_grad()
def conditioned_(
    q_weight: Float[Tensor, "E HD"],
    k_weight: Float[Tensor, "Ekv HkvD"],
    v_weight: Float[Tensor, "Ekv HkvDv"],
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    value: str = "fused",
    gain: float | str = 1.0,
    generator: torch.Generator | None = None,
) -> None:
    """Fill q, k and v weights in place as `conditioned` says, each cast once.

    A ``nn.Linear`` stores the transpose: pass ``linear.weight.T``.

    Args:
        q_weight: Changed in place.
        k_weight: Changed in place.
        v_weight: Changed in place.
        num_heads: Query heads.
        num_kv_heads: Key/value heads; None for as many as query heads.
        value: "fused" or "per_head".
        gain: A positive factor or "match".
        generator: Random source; None uses torch's global one.
    """
    fresh = conditioned(
        q_weight,
        k_weight,
        v_weight,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        value=value,
        gain=gain,
        generator=generator,
    )
    for weight, values in zip((q_weight, k_weight, v_weight), fresh, strict=True):
        weight.copy_(values)

"""The Lipschitz constant of attention at one input, enclosed: bound >= truth >= found."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from levelhead.measure.head import attention_head
from levelhead.measure.lipschitz import (
    block_rms_norm,
    finite_heads,
    lipschitz_bound,
    local_lipschitz_bound,
    split_bias,
)
from levelhead.measure.operators import FunctionJacobian
from levelhead.shapes import require

# Power iteration on one output token gains little after this many products.
_POWER_STEPS = 20


@dataclass(frozen=True)
class LipschitzInterval:
    """The local Lipschitz constant of a multi-head attention at one input, enclosed.

    Attributes:
        bound: Valid for every input whose tokens have at most this input's root mean square.
        local_bound: Valid at this input.
        found: A ratio that was reached at this input.
    """

    bound: float
    local_bound: float
    found: float


def lipschitz_found(
    function: Callable[[Tensor], Tensor],
    hidden_states: Float[Tensor, "T E"],
    steps: int = _POWER_STEPS,
) -> float:
    """A lower bound on the Lipschitz constant at one input, by power iteration for each token.

        for each output token i:   dx_j <- J_ij^T u / ||J_ij^T u||,   u <- J_i dX / ||J_i dX||

    The ratio never falls from step to step; the largest over i is returned.

    Args:
        function: Maps ``[T, E]`` to ``[T, E']`` in float64, deterministic.
        hidden_states: ``[T, E]``, finite.
        steps: Iterations a token, at least 1; two products with J each.

    Returns:
        A ratio that was reached, in the norm of `block_rms_norm`.
    """
    require(steps >= 1, "steps must be at least 1", f"steps={steps}")
    states = hidden_states.detach().to(torch.float64)
    operator = FunctionJacobian(function, [states])
    rows = len(states)
    width = operator.shape[0] // rows
    generator = torch.Generator().manual_seed(rows)
    directions = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    directions = directions.to(states.device)
    best = 0.0
    for _ in range(steps):
        cotangents = torch.diag_embed(directions.mT).movedim(0, 2).flatten(1)
        pulled = torch.func.vmap(operator.adjoint)(cotangents).unflatten(1, states.shape)
        tangents = torch.nn.functional.normalize(pulled, dim=2).flatten(1)
        moved = torch.func.vmap(operator.apply)(tangents).unflatten(1, (rows, width))
        directions = moved.diagonal(dim1=0, dim2=1).mT
        best = max(best, float(directions.norm(dim=1).max()))
    return best * (states.shape[1] / width) ** 0.5


def lipschitz_interval(
    hidden_states: Float[Tensor, "T E"],
    q_weight: Float[Tensor, "E HD"],
    k_weight: Float[Tensor, "E HkvD"],
    v_weight: Float[Tensor, "E HkvD"],
    o_weight: Float[Tensor, "HD E"],
    *,
    num_heads: int,
    scale: float,
    num_kv_heads: int | None = None,
    attn_mask: Bool[Tensor, "#T #T"] | None = None,
    is_causal: bool = False,
    q_bias: Float[Tensor, " HD"] | None = None,
    k_bias: Float[Tensor, " HkvD"] | None = None,
) -> LipschitzInterval:
    """Enclose the local Lipschitz constant of one multi-head attention.

    Args:
        hidden_states: ``[T, E]``, finite.
        q_weight: ``[E, H D]``. Likewise the other three.
        k_weight: ``[E, Hkv D]``.
        v_weight: ``[E, Hkv D]``.
        o_weight: ``[H D, E]``.
        num_heads: H.
        scale: Factor on the dot product, not zero.
        num_kv_heads: Hkv; H unless given.
        attn_mask: ``[T, T]``, True = may attend.
        is_causal: Hide later keys.
        q_bias: ``[H D]`` or None. Biases on v and o do not enter.
        k_bias: ``[Hkv D]`` or None.

    Returns:
        Bound, local bound and what power iteration found.
    """
    require(scale != 0, "scale must not be zero", f"scale={scale}")
    weights = (q_weight, k_weight, v_weight, o_weight)
    masks = {"attn_mask": attn_mask, "is_causal": is_causal}
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    local = local_lipschitz_bound(
        hidden_states, *weights, scale=scale, q_bias=q_bias, k_bias=k_bias, **heads, **masks
    )
    bound = lipschitz_bound(
        *weights,
        radius=float(block_rms_norm(hidden_states.to(torch.float64))),
        temperature=1 / abs(scale),
        q_bias=q_bias,
        **heads,
    )
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    by_head = zip(
        *finite_heads(*weights, num_heads, num_kv_heads),
        split_bias(q_bias, num_heads, 1),
        split_bias(k_bias, kv_heads, num_heads // kv_heads),
        strict=True,
    )
    plain = [
        (
            attention_head(
                hidden_states, query, key, value, scale=scale, q_bias=own_q, k_bias=own_k, **masks
            ),
            output,
        )
        for query, key, value, output, own_q, own_k in by_head
    ]

    def attention(states: Tensor) -> Tensor:
        outputs = [head.output_of_input(states) @ output for head, output in plain]
        return torch.stack(outputs).sum(0)

    return LipschitzInterval(bound, local, lipschitz_found(attention, hidden_states))

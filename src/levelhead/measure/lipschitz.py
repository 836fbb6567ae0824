"""How far multi-head attention can carry a small change of its input: bounds and what was found.

Distances are measured token by token, ``||X|| = max_i ||x_i||_2 / sqrt(E)``, so that no bound
grows with the number of tokens. Always read the three numbers together:

    bound (any input of this radius)  >=  local bound (this input)  >=  true  >=  found

`levelhead.measure.lipschitz_interval` puts the three side by side.

Source: Emadi 2026 (arXiv 2602.18849) for the bound's form. Differs from it in: the constant 2 of
Phi, derived here and nearly attained; half of it is violated.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from levelhead.linalg import spectral_norm
from levelhead.measure.head import AttentionHead, attention_head
from levelhead.measure.head_weights import split_heads
from levelhead.measure.linearise import linearise
from levelhead.measure.sensitivity import sensitivity
from levelhead.shapes import require, require_divides, require_float


def block_rms_norm(hidden_states: Float[Tensor, "*batch T E"]) -> Float[Tensor, "*batch"]:
    """The norm of the bounds: the largest root mean square of a token.

        ||X|| = max_i ||x_i||_2 / sqrt(E)

    Args:
        hidden_states: Tokens along the second axis from the end.

    Returns:
        Values in [0, inf).
    """
    require_float(hidden_states=hidden_states)
    came = f"hidden_states {list(hidden_states.shape)}"
    require(hidden_states.ndim >= 2, "hidden_states must be [..., T, E]", came)
    size = hidden_states.shape[-1]
    return torch.linalg.vector_norm(hidden_states, dim=-1).amax(-1) / size**0.5


@torch.no_grad()
def lipschitz_bound(
    q_weight: Float[Tensor, "E HD"],
    k_weight: Float[Tensor, "E HkvD"],
    v_weight: Float[Tensor, "E HkvD"],
    o_weight: Float[Tensor, "HD E"],
    *,
    num_heads: int,
    radius: float,
    temperature: float,
    theta: float | Float[Tensor, " H"] = 1.0,
    num_kv_heads: int | None = None,
    q_bias: Float[Tensor, " HD"] | None = None,
) -> float:
    """Bound on the Lipschitz constant of softmax attention, for any number of tokens and any mask.

        L <= ||W_O|| sum_h (||W_V^h|| + (theta_h / temperature) Phi_h)
        Phi_h = 2 E R^2 ||W_Q^h|| ||W_K^h|| ||W_V^h||   (+ sqrt(E) R ||b_Q^h|| ||W_K^h|| ||W_V^h||)

    Biases on k, v and o do not enter. Outside the bound: q and k norms, rotary embeddings apart
    from plain rotations, and weights that do not sum to one (affine), which may expand.

    Args:
        q_weight: ``[E, H D]``, acts as ``hidden_states @ q_weight``.
        k_weight: ``[E, Hkv D]``.
        v_weight: ``[E, Hkv D]``.
        o_weight: ``[H D, E]``.
        num_heads: H.
        radius: R, the largest root mean square of a token; behind a pre-LN at most
            ``||gamma||_inf + ||beta||_inf``.
        temperature: ``1 / scale``, positive.
        theta: Sensitivity of the softmax in [0, 1], one number or one a head: 1 for a bound over
            all inputs of the radius, the largest theta of a head's rows for a local one.
        num_kv_heads: Hkv; H unless given.
        q_bias: ``[H D]`` or None.

    Returns:
        The bound in the norm of `block_rms_norm`, in [0, inf).
    """
    require(radius >= 0, "radius must not be negative", f"radius={radius}")
    require(temperature > 0, "temperature must be positive", f"temperature={temperature}")
    weights = (q_weight, k_weight, v_weight, o_weight)
    queries, keys, values, outputs = finite_heads(*weights, num_heads, num_kv_heads)
    sensitivity_of_head = _checked_theta(theta, num_heads).to(queries.device)
    reach = q_weight.shape[0] ** 0.5 * radius
    query_norm, key_norm = spectral_norm(queries), spectral_norm(keys)
    value_norm = spectral_norm(values)
    query_reach = 2 * reach * query_norm
    if q_bias is not None:
        query_reach = query_reach + q_bias.to(queries).view(num_heads, -1).norm(dim=1)
    phi = reach * query_reach * key_norm * value_norm
    total = (value_norm + sensitivity_of_head / temperature * phi).sum()
    return float(spectral_norm(outputs.flatten(0, 1)) * total)


@torch.no_grad()
def local_lipschitz_bound(
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
) -> float:
    """Sharper bound on the norm of the Jacobian at one input, with each row's own sensitivity.

        L <= sum_h ||W_O^h|| (||W_V^h|| + max_i theta_i |scale| rad(V)
                              (||W_Q^h|| rad(K) + ||q_i|| ||W_K^h||))
        rad(Z) = max_j ||z_j - centre||,  of rows without bias, about their mean or about zero

    Args:
        hidden_states: ``[T, E]``, finite.
        q_weight: ``[E, H D]``. Likewise the other three.
        k_weight: ``[E, Hkv D]``.
        v_weight: ``[E, Hkv D]``.
        o_weight: ``[H D, E]``.
        num_heads: H.
        scale: Factor on the dot product.
        num_kv_heads: Hkv; H unless given.
        attn_mask: ``[T, T]``, True = may attend.
        is_causal: Hide later keys.
        q_bias: ``[H D]`` or None. Biases on v and o do not enter.
        k_bias: ``[Hkv D]`` or None.

    Returns:
        The bound in the norm of `block_rms_norm`, in [0, inf).
    """
    weights = finite_heads(q_weight, k_weight, v_weight, o_weight, num_heads, num_kv_heads)
    group = num_heads // (num_kv_heads or num_heads)
    q_biases = split_bias(q_bias, num_heads, 1)
    k_biases = split_bias(k_bias, num_heads // group, group)
    total = 0.0
    for query, key, value, output, own_q_bias, own_k_bias in zip(
        *weights, q_biases, k_biases, strict=True
    ):
        head = attention_head(
            hidden_states,
            query,
            key,
            value,
            scale=scale,
            attn_mask=attn_mask,
            is_causal=is_causal,
            q_bias=own_q_bias,
            k_bias=own_k_bias,
        )
        total += float(spectral_norm(output)) * _head_bound(head, query, key, value)
    return total


def _head_bound(head: AttentionHead, query: Tensor, key: Tensor, value: Tensor) -> float:
    """The bracket of `local_lipschitz_bound` for one head; the weights come without biases."""
    linear = linearise(head)
    seen = head.visible.any(1)
    theta = torch.zeros(len(seen), dtype=torch.float64, device=seen.device)
    if bool(seen.any()):
        theta[seen] = sensitivity(linear.probabilities[seen]).upper.to(theta)
    to_query = spectral_norm(query) * _radius(head.key_input[:, : len(key)] @ key)
    through_key = linear.query.norm(dim=1) * spectral_norm(key)
    steepest = (theta * abs(head.scale) * (to_query + through_key)).amax()
    return float(spectral_norm(value) + steepest * _radius(linear.value))


def _radius(rows: Float[Tensor, "S D"]) -> Tensor:
    """Largest distance of a row from the mean row or from the origin, whichever is less."""
    from_mean, from_origin = (rows - rows.mean(0)).norm(dim=1).amax(), rows.norm(dim=1).amax()
    return torch.minimum(from_mean, from_origin)


def finite_heads(
    q_weight: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    o_weight: Tensor,
    num_heads: int,
    num_kv_heads: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The weights by head, kv heads repeated for each query head they serve.

    Args:
        q_weight: ``[E, H D]``.
        k_weight: ``[E, Hkv D]``.
        v_weight: ``[E, Hkv D]``.
        o_weight: ``[H D, E]``.
        num_heads: H.
        num_kv_heads: Hkv; H unless given.

    Returns:
        q, k, v ``[H, E, D]`` and o ``[H, D, E]`` in float64.
    """
    heads = split_heads(q_weight, k_weight, v_weight, o_weight, num_heads, num_kv_heads)
    assert heads.output is not None
    weights = (heads.query, heads.repeated(heads.key), heads.repeated(heads.value), heads.output)
    finite = all(bool(weight.isfinite().all()) for weight in weights)
    require(finite, "weights must be finite", "a NaN or an infinity")
    same = q_weight.shape[0] == k_weight.shape[0] == v_weight.shape[0]
    came = f"q_weight {list(q_weight.shape)}, k_weight {list(k_weight.shape)}"
    require(same, "the bounds are for self-attention: weights must share E", came)
    return weights


def split_bias(bias: Tensor | None, count: int, group: int) -> list[Tensor | None]:
    """Take a bias apart by head.

    Args:
        bias: ``[count D]``, or None.
        count: Heads it is made of.
        group: Query heads that each of them serves.

    Returns:
        One bias a query head, or as many None.
    """
    if bias is None:
        return [None] * (count * group)
    require_divides("the number of heads", count, "the bias' length", len(bias))
    return list(bias.view(count, -1).repeat_interleave(group, dim=0))


def _checked_theta(theta: float | Tensor, num_heads: int) -> Tensor:
    """Theta of each head in float64."""
    values = torch.as_tensor(theta, dtype=torch.float64)
    came = f"theta {list(values.shape)}, num_heads={num_heads}"
    require(values.shape in {(), (num_heads,)}, "theta must be a number or one a head", came)
    inside = bool(((values >= 0) & (values <= 1)).all())
    require(inside, "theta must lie in [0, 1]", f"theta={theta}")
    return values.expand(num_heads)

"""What the papers compare the Jacobian's kappa with, and the bound that holds.

    surrogate = kappa(X)^3 kappa(Lambda(P)) kappa(W_V) (kappa(W_Q) + kappa(W_K))
                + kappa(X) kappa(P)

Read literally the right side is infinite, since Lambda(P) is singular; over the non-zero singular
values, as here, it is not a bound: kappa(J) exceeds it in about one random case in ten, by up to
four orders of magnitude, because kappa(J) depends on the scale of W_V and the surrogate does not.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from levelhead.linalg import condition_number, singular_values, symmetric_eigenvalues
from levelhead.measure.gram import same_products
from levelhead.measure.head import HeadForm, attention_head
from levelhead.measure.linearise import LinearisedHead, linearise


@dataclass(frozen=True)
class JacobianSurrogate:
    """The papers' expression and its factors, each kappa over the non-zero singular values.

    Attributes:
        value: The expression. Not a bound on kappa(J).
        kappa_input: kappa(X).
        kappa_softmax: kappa(Lambda(P)), of the block-diagonal matrix of all rows' softmax
            Jacobians; inf where all of them vanish (one visible key everywhere).
        kappa_attn: kappa(P).
        kappa_q_weight: kappa(W_Q).
        kappa_k_weight: kappa(W_K).
        kappa_v_weight: kappa(W_V).
        label: What to print beside the value.
    """

    value: float
    kappa_input: float
    kappa_softmax: float
    kappa_attn: float
    kappa_q_weight: float
    kappa_k_weight: float
    kappa_v_weight: float
    label: str = "the papers' surrogate, not a bound"


@dataclass(frozen=True)
class JacobianBound:
    """An upper bound on kappa(J) that holds.

    Attributes:
        kappa: Upper bound, inf where ``P X`` lacks full row rank (always for T > E).
        sigma_max: Upper bound on the largest singular value, always valid.
        sigma_min: Lower bound on the smallest of all T Dv singular values; 0 where none is known.
    """

    kappa: float
    sigma_max: float
    sigma_min: float

    @property
    def exists(self) -> bool:
        """Whether the bound says anything."""
        return self.sigma_min > 0


@torch.no_grad()
def jacobian_surrogate(
    hidden_states: Float[Tensor, "T E"],
    q_weight: Float[Tensor, "E D"],
    k_weight: Float[Tensor, "E D"],
    v_weight: Float[Tensor, "E Dv"],
    *,
    scale: float,
    attn_mask: Bool[Tensor, "#T #S"] | None = None,
    is_causal: bool = False,
) -> JacobianSurrogate:
    """The papers' expression for kappa of the Jacobian of one plain head.

    Args:
        hidden_states: ``[T, E]``.
        q_weight: ``[E, D]``, acts as ``hidden_states @ q_weight``; with spectral conditioning the
            conditioned weight. Likewise the other two.
        k_weight: ``[E, D]``.
        v_weight: ``[E, Dv]``.
        scale: Factor on the dot product.
        attn_mask: ``[T, S]``, True = may attend.
        is_causal: Hide later keys, aligned bottom-right.

    Returns:
        The expression with every factor.

    Source: Saratchandran & Lucey 2025 (arXiv 2603.07162). Differs from it in: kappa over the
    non-zero singular values, because Lambda(P) always has a zero one.
    """
    options = {"attn_mask": attn_mask, "is_causal": is_causal}
    head = attention_head(hidden_states, q_weight, k_weight, v_weight, scale=scale, **options)
    attn_weights = linearise(head).probabilities
    kappa_input, kappa_attn = _kappa(head.query_input), _kappa(attn_weights)
    weights = (head.q_weight, head.k_weight, head.v_weight)
    kappa_q, kappa_k, kappa_v = (_kappa(weight) for weight in weights)
    kappa_softmax = _kappa_of_softmax_jacobian(attn_weights)
    value = kappa_input**3 * kappa_softmax * kappa_v * (kappa_q + kappa_k)
    return JacobianSurrogate(
        value=value + kappa_input * kappa_attn,
        kappa_input=kappa_input,
        kappa_softmax=kappa_softmax,
        kappa_attn=kappa_attn,
        kappa_q_weight=kappa_q,
        kappa_k_weight=kappa_k,
        kappa_v_weight=kappa_v,
    )


@torch.no_grad()
def jacobian_bound(
    hidden_states: Float[Tensor, "T E"],
    q_weight: Float[Tensor, "E D"],
    k_weight: Float[Tensor, "Ekv D"],
    v_weight: Float[Tensor, "Ekv Dv"],
    *,
    scale: float,
    attn_mask: Bool[Tensor, "#T #S"] | None = None,
    form: HeadForm | None = None,
    **options,
) -> JacobianBound:
    """An upper bound on kappa of the Jacobian of one head to its weights.

        kappa(J) <= sqrt(||U||^2 max ||O_i||^2 + ||X||^2 max ||M_i||^2 + ||Q||^2 max ||R_i||^2)
                    / (sigma_min(U) min sigma_min(O_i)),      U = P X

    with M_i, R_i, O_i, U of `levelhead.measure.linearise` (O_i = I for a plain head); with a key
    map ``||R_i||`` is replaced by ``||spread_i|| ||X|| max_j ||Fk_j||``. It exists where U has
    full row rank, which needs T <= E.

    Args:
        hidden_states: ``[T, E]``.
        q_weight: ``[E, D]``, acts as ``hidden_states @ q_weight``. Likewise the other two.
        k_weight: ``[E, D]``.
        v_weight: ``[E, Dv]``.
        scale: Factor on the dot product.
        attn_mask: ``[T, S]``, True = may attend.
        form: How the head differs from plain softmax attention.
        options: The biases, ``attn_bias``, ``is_causal`` and ``key_value_states`` of
            `levelhead.measure.head.attention_head`.

    Returns:
        The bound; ``exists`` says whether it says anything.
    """
    options |= {"scale": scale, "attn_mask": attn_mask, "form": form}
    linear = linearise(attention_head(hidden_states, q_weight, k_weight, v_weight, **options))
    head, output_jacobian = linear.head, linear.output_jacobian
    mixed = singular_values(linear.mixed_input)
    full_rank = int(mixed.rank) == len(linear.mixed_input)
    lowest, highest = 1.0, 1.0
    if output_jacobian is not None:
        values = singular_values(output_jacobian)
        full_rank = full_rank and bool((values.rank == output_jacobian.shape[-1]).all())
        lowest, highest = float(values.values[:, -1].min()), float(values.values.max())
    value_term = float(mixed.values[0]) * highest
    query_term = _norm(head.query_input) * _norm(linear.query_part())
    sigma_max = (value_term**2 + query_term**2 + _key_term(linear) ** 2) ** 0.5
    sigma_min = float(mixed.values[-1]) * lowest if full_rank else 0.0
    kappa = sigma_max / sigma_min if sigma_min > 0 else float("inf")
    return JacobianBound(kappa, sigma_max, sigma_min)


def _kappa(matrix: Tensor) -> float:
    return float(condition_number(matrix).kappa_nonzero)


def _norm(matrices: Tensor) -> float:
    """The largest spectral norm of a batch of matrices."""
    return float(singular_values(matrices).values.max())


def _key_term(linear: LinearisedHead) -> float:
    """Bound on the norm of the Jacobian to the key weight."""
    key_input, query_norm = linear.head.key_input, _norm(linear.query)
    if linear.key_jacobian is None:
        return query_norm * _norm(linear.spread @ same_products(key_input))
    map_norm = _norm(linear.key_jacobian)
    return query_norm * _norm(linear.spread) * _norm(key_input) * map_norm


def _kappa_of_softmax_jacobian(attn_weights: Float[Tensor, "T S"]) -> float:
    """kappa of the block-diagonal matrix with one ``diag(p) - p p^T`` a row."""
    outer = attn_weights[:, :, None] * attn_weights[:, None, :]
    values = symmetric_eigenvalues(torch.diag_embed(attn_weights) - outer).values
    largest = values.max()
    eps = torch.finfo(attn_weights.dtype).eps
    nonzero = values[values > attn_weights.numel() * eps * largest]
    return float(largest / nonzero.min()) if len(nonzero) else float("inf")

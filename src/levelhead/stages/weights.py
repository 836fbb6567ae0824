"""Affine-scaled attention: weights scaled and shifted per query, without a T x S matrix."""

import torch
from jaxtyping import Float
from torch import Tensor

from levelhead.rows import row_norms
from levelhead.shapes import at_least_float32

CLIPPING_SLOPE = 0.1
CLIPPING_OFFSET = 0.5


def linear_clipping(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Map any number into [0, 1], with 0 at the middle.

        phi(x) = clamp(0.1 x + 0.5, 0, 1)

    Args:
        x: Anything.

    Returns:
        Values in [0, 1].

    Source: Bae et al. 2026, arXiv 2602.23057 (constants as there).
    """
    return (CLIPPING_SLOPE * x + CLIPPING_OFFSET).clamp(0.0, 1.0)


def affine_output(
    attn_output: Float[Tensor, "B H T Dv"],
    alpha: Float[Tensor, "B H T 1"],
    shift: Float[Tensor, "B H T 1"],
    visible: Float[Tensor, "B Hany #T Dv"],
) -> Float[Tensor, "B H T Dv"]:
    """Scale and shift the attention weights, on the output.

        [alpha * attn_weights + beta] @ value = alpha * attn_output + shift * visible

    where ``shift * visible`` is ``beta`` times the sum of the visible values: ``visible`` is
    their sum and ``shift = beta``, or their mean and ``shift = beta * count``.

    Args:
        attn_output: Output of attention with the unscaled weights.
        alpha: Factor per query and head.
        shift: Factor on ``visible`` per query and head.
        visible: Sum or mean of the visible values, per query head or key/value head; one row
            where all queries see the same.

    Returns:
        Output in the dtype of ``attn_output``, computed in float32 or wider.

    Source: Bae et al. 2026, arXiv 2602.23057.
    """
    compute_dtype = at_least_float32(attn_output.dtype, alpha.dtype)
    scaled, shift = alpha.to(compute_dtype) * attn_output, shift.to(compute_dtype)
    num_groups = shift.shape[1] // visible.shape[1]
    if num_groups == 1:
        return torch.addcmul(scaled, shift, visible).to(attn_output.dtype)
    # A key/value head is not repeated for its query heads.
    grouped, shift = (rows.unflatten(1, (-1, num_groups)) for rows in (scaled, shift))
    shifted = torch.addcmul(grouped, shift, visible.unsqueeze(2))
    return shifted.flatten(1, 2).to(attn_output.dtype)


LEAST_ALPHA = 2.0**-20
LARGEST_SHIFT = 4.0
"""Rows scaled by less, or shifted by more times their own length, are remembered: taking the shift
off again would cost them more than two or three bits."""


class AffineOutput:
    """``affine_output`` as a map that can be undone."""

    def apply(self, attn_output: Tensor, alpha: Tensor, shift: Tensor, visible: Tensor) -> Tensor:
        """Return the scaled and shifted output."""
        return affine_output(attn_output, alpha, shift, visible)

    def remember(
        self, attn_output: Tensor, alpha: Tensor, shift: Tensor, visible: Tensor
    ) -> tuple[Tensor, ...]:
        """Return which rows would lose digits, and these rows."""
        shifted = row_norms(visible)
        shifted = shifted.repeat_interleave(shift.shape[1] // visible.shape[1], dim=1) * shift
        length = row_norms(attn_output) * alpha
        is_lost = (shifted.abs() <= LARGEST_SHIFT * length).logical_not_() | (alpha < LEAST_ALPHA)
        is_lost = is_lost.squeeze(-1)
        return is_lost, attn_output[is_lost]

    def undo(
        self, result: Tensor, remembered: tuple[Tensor, ...], alpha: Tensor, shift: Tensor,
        visible: Tensor,
    ) -> Tensor:  # fmt: skip
        """Return the output before."""
        is_lost, lost_rows = remembered
        attn_output = affine_output(result, alpha.reciprocal(), -shift / alpha, visible)
        attn_output[is_lost] = lost_rows
        return attn_output


def affine_weights(
    attn_weights: Float[Tensor, "B H T S"],
    alpha: Float[Tensor, "B H T 1"],
    alpha_mean: Float[Tensor, "#H 1 1"],
    visible: Tensor | None,
    keys_counted: int | None = None,
) -> Float[Tensor, "B H T S"]:
    """Scale and shift the attention weights themselves: the equation, plain.

        weights[t, s] = alpha[t] * attn_weights[t, s] + (alpha_mean - alpha[t]) / N,  s visible

    Args:
        attn_weights: Weights before, zero where masked.
        alpha: Factor per query and head.
        alpha_mean: Running mean of alpha.
        visible: True = may attend, broadcastable, or None for all.
        keys_counted: N; None counts the keys visible to each query.

    Returns:
        Weights that may be negative (alpha .8, alpha_mean .4 and weights (.1, .9) give
        (-.12, .52)), with a row sum of ``alpha_mean`` if N counts the visible keys; zero where
        masked. The 1-norm of a row can reach 1.5.

    Source: Bae et al. 2026, arXiv 2602.23057; N is open there (METHODS 1).
    """
    seen = torch.ones_like(attn_weights) if visible is None else visible.to(attn_weights.dtype)
    seen = seen.expand_as(attn_weights)
    count = seen.sum(dim=-1, keepdim=True).clamp_min(1.0)
    divisor = count if keys_counted is None else keys_counted
    shift = ((alpha_mean - alpha) / divisor).to(attn_weights.dtype)
    return alpha.to(attn_weights.dtype) * attn_weights + shift * seen

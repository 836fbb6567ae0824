"""Outputs: what happens to the attention output of each head before heads are merged."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from levelhead.rows import ROW_EPS, inverse_row_norm, row_norms, unit_rows
from levelhead.shapes import complaint, describe


def equilibrate_rows(
    attn_output: Float[Tensor, "B H T Dv"], eps: float = ROW_EPS, detach: bool = False
) -> Float[Tensor, "B H T Dv"]:
    """Divide each head's output rows by their norms: a diagonal preconditioner.

        attn_output = C A,   C = diag(1 / ||A_t||_2)

    Row equilibration is within sqrt(T) of the best diagonal row scaling for the 2-norm
    condition number (van der Sluis 1969); it helps where row norms vary, and can still worsen a
    given matrix.

    Args:
        attn_output: Output of attention per head.
        eps: Norm below which a row is divided by this instead.
        detach: Treat C as a constant in the gradient.

    Returns:
        Rows of norm one; a zero row stays zero with a zero gradient.

    Source: Saratchandran 2026, arXiv 2603.27153, best reading (METHODS 4).
    """
    if not detach:
        return unit_rows(attn_output, eps)
    return (attn_output * inverse_row_norm(attn_output.detach(), eps)).to(attn_output.dtype)


@dataclass(frozen=True)
class EquilibrateRows:
    """``equilibrate_rows`` as a map that can be undone.

    Attributes:
        eps: As there.
        detach: As there.
    """

    eps: float
    detach: bool

    def apply(self, attn_output: Tensor) -> Tensor:
        """Return rows of norm one."""
        return equilibrate_rows(attn_output, self.eps, self.detach)

    def remember(self, attn_output: Tensor) -> tuple[Tensor, ...]:
        """Return what the rows were divided by."""
        norm = row_norms(attn_output)
        return (norm.clamp_(self.eps, torch.finfo(norm.dtype).max),)

    def undo(self, result: Tensor, remembered: tuple[Tensor, ...]) -> Tensor:
        """Return the rows."""
        return result * remembered[0]


def gate_output(
    attn_output: Float[Tensor, "B H T Dv"], gate_logits: Float[Tensor, "B T HD"]
) -> Float[Tensor, "B H T Dv"]:
    """Multiply each head's output by a gate computed from the hidden states.

        attn_output = attn_output * sigmoid(gate_logits)

    Args:
        attn_output: Output of attention per head.
        gate_logits: One number per head (``HD = H``) or per coordinate of each head
            (``HD = H * Dv``).

    Returns:
        Gated output, same dtype.

    Raises:
        ValueError: Logits for other heads, or for heads of another width.

    Source: Qiu et al. 2025 (NeurIPS), position G1. Differs from it in: nothing.
    """
    num_heads, width = attn_output.shape[1], attn_output.shape[3]
    if gate_logits.shape[-1] not in (num_heads, num_heads * width):
        rule = "a gate must hold one number per head, or per coordinate of each head's output"
        came = f"gate_logits={describe(gate_logits)}, attn_output={describe(attn_output)}"
        raise ValueError(complaint(rule, came))
    gate = torch.sigmoid(gate_logits).unflatten(-1, (attn_output.shape[1], -1))
    return attn_output * gate.transpose(1, 2).to(attn_output.dtype)

"""Projections: corrections to ``hidden_states @ W`` that leave W and its key alone."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from levelhead.lanczos import largest_eigenpair
from levelhead.shapes import at_least_float32, require, without_autocast

SMALL = 128
"""Up to this many rows or columns a full decomposition is the quicker way."""
PAIR_TOLERANCE, PAIR_STEPS = 1e-6, 300
"""Relative residual on ``W^T W`` to stop at, and the products after which a full decomposition is
the quicker way. The norm errs by the square of the residual over the gap to the next one."""


def add_identity(
    projected: Float[Tensor, "*batch HD"],
    hidden_states: Float[Tensor, "*batch E"],
    strength: float,
) -> Float[Tensor, "*batch HD"]:
    """Add a multiple of the rectangular identity to a projection matrix, on its output.

        hidden_states @ (W + strength * I) = projected + strength * hidden_states[..., :k]

    with ``k = min(E, H D)``: head h reads coordinates ``h D .. (h + 1) D``; heads beyond
    coordinate E get nothing.

    Args:
        projected: ``hidden_states @ W``, with or without a bias.
        hidden_states: What was projected.
        strength: lambda of the paper (10 there).

    Returns:
        The corrected projection, in the dtype of ``projected``.

    Source: Saratchandran & Lucey 2025, arXiv 2603.07162, identity form, fused layout.
    """
    missing = projected.shape[-1] - hidden_states.shape[-1]
    read = F.pad(hidden_states, (0, missing)) if missing else hidden_states
    return torch.add(projected, read, alpha=strength).to(projected.dtype)  # one pass


def add_identity_per_head(
    projected: Float[Tensor, "*batch HD"],
    hidden_states: Float[Tensor, "*batch E"],
    strength: float,
    num_heads: int,
) -> Float[Tensor, "*batch HD"]:
    """Add a multiple of the identity to each head's block of a projection matrix.

        W_h + strength * I  for every head: all heads read the first D coordinates

    Args:
        projected: ``hidden_states @ W``, with or without a bias.
        hidden_states: What was projected.
        strength: lambda of the paper.
        num_heads: Heads in ``projected`` (Hkv for keys and values).

    Returns:
        The corrected projection, in the dtype of ``projected``.

    Source: Saratchandran & Lucey 2025, arXiv 2603.07162, per-head reading.
    """
    heads = projected.unflatten(-1, (num_heads, -1))
    first = hidden_states[..., : heads.shape[-1]].unsqueeze(-2)
    return add_identity(heads, first, strength).flatten(-2)


def spectral_correction(weight: Float[Tensor, "*batch E D"]) -> Float[Tensor, "*batch E D"]:
    """Return the matrix whose addition conditions a weight, by its singular value decomposition.

        C = U diag(sigma_max) V^T,   kappa(W + C) = 2 sigma_max / (sigma_max + sigma_min) <= 2

    Args:
        weight: W, acting as ``hidden_states @ W``; a leading axis holds separate heads.

    Returns:
        C in the dtype of ``weight``, computed in float32 or wider.

    Raises:
        ValueError: W is not finite.

    Source: Saratchandran & Lucey 2025, arXiv 2603.07162, theorem of the svd form.
    """
    wide = weight.detach().to(at_least_float32(weight.dtype))
    require(
        wide.is_meta or bool(wide.isfinite().all()),
        "a weight that is corrected by its singular vectors must be finite",
        f"a weight of shape {list(weight.shape)} that is not",
    )
    with without_autocast(weight.device.type):
        u, sigma, vh = torch.linalg.svd(wide, full_matrices=False)
        return (sigma[..., :1, None] * (u @ vh)).to(weight.dtype)


def power_iteration(
    weight: Float[Tensor, "N M"], left: Float[Tensor, " N"]
) -> tuple[Float[Tensor, " N"], Float[Tensor, " M"]]:
    """Take one step of power iteration towards the leading singular vectors.

        right = W^T left / ||W^T left||,   left = W right / ||W right||

    Args:
        weight: W, as torch stores it; no gradient is taken.
        left: Unit vector of the step before.

    Returns:
        The new unit vectors ``left`` and ``right``.
    """
    wide = weight.detach().to(left.dtype)
    with without_autocast(weight.device.type):
        right = F.normalize(wide.mT @ left, dim=0)
        return F.normalize(wide @ right, dim=0), right


@torch.no_grad()
def leading_pair(
    weight: Float[Tensor, "N M"],
) -> tuple[Float[Tensor, " N"], Float[Tensor, " M"]]:
    """Return the leading singular vectors, without the others where a matrix is large.

        left^T W right = ||W||_2,   by Lanczos on W^T W (W W^T where W is wide)

    Args:
        weight: W; finite, not zero.

    Returns:
        Unit vectors ``left`` and ``right``, float32 or wider.

    Raises:
        ValueError: W has no direction that it stretches most.
    """
    wide = weight.detach().to(at_least_float32(weight.dtype))
    if wide.shape[0] < wide.shape[1]:
        right, left = leading_pair(wide.mT)
        return left, right
    require(
        wide.is_meta or bool(wide.isfinite().all() and wide.any()),
        "a weight whose spectral norm is divided by must be finite and not zero",
        f"a weight of shape {list(weight.shape)} that is not",
    )
    wide = wide / wide.abs().max()
    with without_autocast(weight.device.type):
        right = None if wide.shape[1] <= SMALL else _leading_right(wide)
        if right is None:
            u, _, vh = torch.linalg.svd(wide, full_matrices=False)
            return u[:, 0], vh[0]
        return F.normalize(wide @ right, dim=0), right


def _leading_right(weight: Tensor) -> Tensor | None:
    """The right vector, or None where Lanczos did not come to an end."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(weight.shape[1], generator=generator).to(weight)
    pair = largest_eigenpair(
        lambda vector: (weight @ vector) @ weight,
        start,
        tolerance=PAIR_TOLERANCE,
        max_steps=PAIR_STEPS,
    )
    return pair.vector if pair.residual <= PAIR_TOLERANCE else None

"""Projections: corrections to ``hidden_states @ W`` that leave W and its key alone."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from levelhead.shapes import at_least_float32, without_autocast


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
    width = min(projected.shape[-1], hidden_states.shape[-1])
    added = strength * hidden_states[..., :width]
    return projected + F.pad(added, (0, projected.shape[-1] - width)).to(projected.dtype)


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

    Source: Saratchandran & Lucey 2025, arXiv 2603.07162, theorem of the svd form.
    """
    wide = weight.detach().to(at_least_float32(weight.dtype))
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

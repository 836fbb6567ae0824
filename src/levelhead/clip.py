"""QK-clip: scale queries and keys back where a head's largest score exceeds a threshold."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from levelhead.shapes import require
from levelhead.sites.find import find_attention
from levelhead.sites.layout import ProjectionWeights
from levelhead.sites.reading import Reader
from levelhead.sites.sites import AttentionSite

KIMI_TAU = 100.0
"""Threshold of Kimi K2 (arXiv 2507.20534)."""


@torch.no_grad()
def clip_qk_(
    model: nn.Module,
    score_max: Mapping[str, Sequence[float]],
    threshold: float = KIMI_TAU,
    *,
    readers: Sequence[Reader] = (),
) -> dict[str, list[float]]:
    """Scale W_Q and W_K (and their biases) so that no head's largest score exceeds a threshold.

        gamma_h = min(1, threshold / score_max_h)        of each query head
        gamma_g = min over the heads h that share key head g of gamma_h
        W_K^g <- sqrt(gamma_g) W_K^g,    W_Q^h <- gamma_h / sqrt(gamma_g) W_Q^h

    Every head's scores are multiplied by its own gamma: a key head is clipped once, and a head
    below the threshold keeps its scores although it shares the key head of one above.

    Args:
        model: Any model with attention, changed in place.
        score_max: Site to the largest score of each head; sites left out stay as they are.
        threshold: Positive, same unit as scores.
        readers: As in ``find_attention``.

    Returns:
        Site to gamma of each head; 1 where nothing changed.

    Raises:
        ValueError: An unknown site, a number of heads that does not fit, a NaN, or a host whose
            q and k norms undo any scaling of the weights.

    Source: Kimi K2 2025, arXiv 2507.20534, MuonClip with alpha = 1/2. Differs from it in: heads
    that share a key head.
    """
    require(threshold > 0, "threshold must be positive", f"threshold={threshold}")
    sites = {site.name: site for site in find_attention(model, readers=readers)}
    strangers = sorted(set(score_max) - set(sites))
    require(not strangers, "score_max must name sites of the model", f"{strangers}", f"{[*sites]}")
    gammas = {name: _gamma(sites[name], largest, threshold) for name, largest in score_max.items()}
    for name, gamma in gammas.items():
        if bool((gamma < 1).any()):
            _scale_(sites[name], gamma)
    return {name: gamma.tolist() for name, gamma in gammas.items()}


def _gamma(site: AttentionSite, score_max: Sequence[float], threshold: float) -> Tensor:
    largest = torch.as_tensor(score_max, dtype=torch.float64)
    came = f"{len(largest)} numbers for {site.num_heads} heads of {site.name}"
    require(largest.shape == (site.num_heads,), "score_max must hold one number a head", came)
    require(not bool(largest.isnan().any()), "score_max must not be NaN", f"at {site.name}")
    is_linear = site.q_norm is None and site.k_norm is None and not site.is_cosine
    require(is_linear, "QK-clip needs scores that are bilinear in W_Q and W_K",
            f"q and k norms at {site.name}")  # fmt: skip
    # A largest score below zero is no reason to scale, and would give a negative factor.
    return torch.where(largest > threshold, threshold / largest.clamp(min=threshold), 1.0)


def _scale_(site: AttentionSite, gamma: Float[Tensor, " H"]) -> None:
    of_key = gamma.view(site.num_kv_heads, -1).amin(-1)
    of_query = gamma / of_key.sqrt().repeat_interleave(site.num_heads // site.num_kv_heads)
    weights: ProjectionWeights = site.read()
    weights.q_weight = _by_head(weights.q_weight, of_query)
    weights.k_weight = _by_head(weights.k_weight, of_key.sqrt())
    if weights.q_bias is not None:
        weights.q_bias = _by_head(weights.q_bias, of_query)
    if weights.k_bias is not None:
        weights.k_bias = _by_head(weights.k_bias, of_key.sqrt())
    site.write(weights)


def _by_head(tensor: Tensor, factor: Float[Tensor, " heads"]) -> Tensor:
    """Multiply the columns of each head by its factor."""
    by_head = tensor.unflatten(-1, (len(factor), -1))
    return (by_head * factor.to(tensor)[:, None]).flatten(-2)

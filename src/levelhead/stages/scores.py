"""Scores: what happens to queries and keys before their dot product, and to the product."""

import torch
from jaxtyping import Float
from torch import Tensor

from levelhead.rows import ROW_EPS, unit_rows


def normalize_keys(
    key: Float[Tensor, "B Hkv S D"], eps: float = ROW_EPS
) -> Float[Tensor, "B Hkv S D"]:
    """Bring every key to unit length (QUEST), so that no key shouts.

        key_bar[s] = key[s] / ||key[s]||_2,   scores = query @ key_bar^T   (scale 1)

    The score of a query is then at most its own norm.

    Args:
        key: Keys.
        eps: Norm below which a key is divided by this instead.

    Returns:
        Keys of norm one (zero keys stay zero).

    Source: Govindarajan et al. 2026, arXiv 2604.00199. Differs from it in: nothing.
    """
    return unit_rows(key, eps)


def normalize_and_scale_heads(
    query: Float[Tensor, "B H T D"], gain: Float[Tensor, " H"], eps: float = ROW_EPS
) -> Float[Tensor, "B H T D"]:
    """Bring every query to the length of its head's gain, which scales the head's scores.

        query[h] = gain[h] * query[h] / ||query[h]||_2

    Args:
        query: Queries.
        gain: One factor per head.
        eps: Norm below which a query is divided by this instead.

    Returns:
        Queries in their own dtype.
    """
    return unit_rows(query, eps, gain[:, None, None])


def normalize_and_scale_dimensions(
    rows: Float[Tensor, "B Hany N D"], gain: Float[Tensor, " D"], eps: float = ROW_EPS
) -> Float[Tensor, "B Hany N D"]:
    """Bring queries or keys to unit length, and multiply each coordinate by its own number.

        rows[d] = gain[d] * rows[d] / ||rows||_2

    Args:
        rows: Queries or keys.
        gain: One factor per coordinate, shared by the heads.
        eps: Norm below which a row is divided by this instead.

    Returns:
        Rows in their own dtype.
    """
    return unit_rows(rows, eps, gain)


def cap_scores(scores: Float[Tensor, "B H T S"], soft_cap: float) -> Float[Tensor, "B H T S"]:
    """Bend the scores smoothly into a band.

        scores = soft_cap * tanh(scores / soft_cap)

    Args:
        scores: Scaled scores, before the mask.
        soft_cap: Half-width of the band, same unit as the scores; positive.

    Returns:
        Scores in (-soft_cap, soft_cap).

    Source: Gemma Team 2024 (Gemma 2). Differs from it in: nothing.
    """
    return soft_cap * torch.tanh(scores / soft_cap)

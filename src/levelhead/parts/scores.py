"""Parts of the scores: norms of queries and keys, and the cap."""

import torch
from torch import Tensor, nn

from levelhead.parts.base import AttentionShape, Part
from levelhead.rows import ROW_EPS, unit_rows
from levelhead.shapes import require
from levelhead.stages.scores import (
    cap_scores,
    normalize_and_scale_dimensions,
    normalize_and_scale_heads,
    normalize_keys,
)


class DotProduct(Part):
    """Queries and keys as they are, scaled by the host's factor."""

    def prepare(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys as the dot product shall see them."""
        return self.prepare_query(query), self.prepare_key(key)

    def prepare_query(self, query: Tensor) -> Tensor:
        """Return queries as the dot product shall see them."""
        return query

    def prepare_key(self, key: Tensor) -> Tensor:
        """Return keys as the dot product shall see them."""
        return key

    def score_scale(self, scale: float) -> float:
        """Return the factor on the dot product, given the host's."""
        return scale


class UnscaledNorm(DotProduct):
    """A norm on queries or keys that replaces the host's factor by one."""

    def __init__(self, eps: float = ROW_EPS):
        super().__init__()
        require(eps > 0, "eps must be positive", f"eps={eps}")
        self.eps = eps

    def score_scale(self, scale: float) -> float:
        return 1.0


class Quest(UnscaledNorm):
    """Unit keys, raw queries."""

    def prepare_key(self, key: Tensor) -> Tensor:
        return normalize_keys(key, self.eps)


class QueryNorm(UnscaledNorm):
    """Unit queries, raw keys."""

    def prepare_query(self, query: Tensor) -> Tensor:
        return unit_rows(query, self.eps)


class QueryKeyNorm(UnscaledNorm):
    """Unit queries and unit keys: every score in [-1, 1]."""

    def prepare_query(self, query: Tensor) -> Tensor:
        return unit_rows(query, self.eps)

    def prepare_key(self, key: Tensor) -> Tensor:
        return unit_rows(key, self.eps)


class QueryKeyNormHeadScale(QueryKeyNorm):
    """Unit queries and keys, times one learned factor per head that starts at sqrt(D)."""

    def __init__(self, shape: AttentionShape, eps: float = ROW_EPS):
        super().__init__(eps)
        self.start = shape.head_dim**0.5
        self.head_scale = nn.Parameter(torch.empty(shape.num_heads, **shape.factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.head_scale, self.start)

    def prepare_query(self, query: Tensor) -> Tensor:
        return normalize_and_scale_heads(query, self.head_scale, self.eps)


class QueryKeyNormDimensionScale(QueryKeyNorm):
    """Unit queries and keys, each times learned factors per coordinate, starting at D^(1/4)."""

    def __init__(self, shape: AttentionShape, eps: float = ROW_EPS):
        super().__init__(eps)
        self.start = shape.head_dim**0.25
        self.q_scale = nn.Parameter(torch.empty(shape.head_dim, **shape.factory))
        self.k_scale = nn.Parameter(torch.empty(shape.head_dim, **shape.factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.q_scale, self.start)
        nn.init.constant_(self.k_scale, self.start)

    def prepare_query(self, query: Tensor) -> Tensor:
        return normalize_and_scale_dimensions(query, self.q_scale, self.eps)

    def prepare_key(self, key: Tensor) -> Tensor:
        return normalize_and_scale_dimensions(key, self.k_scale, self.eps)


class SoftCap(Part):
    """A smooth bound on the scores."""

    def __init__(self, cap: float):
        super().__init__()
        require(cap > 0, "cap must be positive", f"cap={cap}")
        self.soft_cap = float(cap)

    def cap(self, scores: Tensor) -> Tensor:
        """Return the scores bent into (-soft_cap, soft_cap)."""
        return cap_scores(scores, self.soft_cap)

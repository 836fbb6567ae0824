"""How concentrated an attention is: one pass over blocks of queries, no T x S matrix.

``concentration`` gathers every measure asked for in the same pass; the result says which queries
were looked at and how many rows were left out, and why.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from levelhead.measure.row_block import MEASURES, RowBlock
from levelhead.measure.streaming import DEFAULT_QUERIES, AttentionScores
from levelhead.shapes import complaint, require_known
from levelhead.stages.masks import resolve_mask


@dataclass(frozen=True)
class Concentration:
    """Measures of the rows that were looked at.

    Attributes:
        rows: Name to ``[B, H, N]``; NaN marks a row that was left out or has no such value.
        query_idx: ``[N]`` the queries looked at, of ``num_queries``.
        num_queries: T.
        num_empty: Rows left out because the query may attend to nothing.
        num_nonfinite: Rows left out because a score is NaN or +inf.
        num_padding: Rows left out because ``real_queries`` calls them padding.
    """

    rows: dict[str, Float[Tensor, "B H N"]]
    query_idx: Int[Tensor, " N"]
    num_queries: int
    num_empty: int
    num_nonfinite: int
    num_padding: int

    @property
    def is_sample(self) -> bool:
        """Whether some queries were not looked at."""
        return len(self.query_idx) < self.num_queries

    def mean(self, name: str) -> Float[Tensor, " H"]:
        """Average a measure over samples and queries.

        Args:
            name: A measure that was asked for.

        Returns:
            One number a head; NaN without any row.

        Raises:
            ValueError: The measure was not asked for.
        """
        return self._by_head(name).nanmean(-1)

    def maximum(self, name: str) -> Float[Tensor, " H"]:
        """Return the largest value of a measure.

        Over micro-batches: ``running = torch.fmax(running, now.maximum(name))``, which ignores
        NaN; whoever keeps ``running`` resets it.

        Args:
            name: A measure that was asked for.

        Returns:
            One number a head; NaN without any row.

        Raises:
            ValueError: The measure was not asked for.
        """
        values = self._by_head(name)
        largest = values.nan_to_num(-torch.inf).amax(-1)
        return largest.masked_fill(values.isnan().all(-1), torch.nan)

    def quantile(self, name: str, levels: Iterable[float]) -> Float[Tensor, "Q H"]:
        """Return quantiles of a measure over samples and queries.

        Args:
            name: A measure that was asked for.
            levels: In [0, 1].

        Returns:
            One row for each level, interpolated linearly; NaN without any row.

        Raises:
            ValueError: The measure was not asked for, or a level outside [0, 1].
        """
        return row_quantiles(self._by_head(name), levels)

    def _by_head(self, name: str) -> Float[Tensor, "H R"]:
        require_known("measure", name, self.rows)
        return self.rows[name].transpose(0, 1).flatten(1)


def concentration(
    scores: AttentionScores,
    measures: Iterable[str] = tuple(MEASURES),
    *,
    num_queries: int | None = DEFAULT_QUERIES,
    first_tokens: Bool[Tensor, "B S"] | None = None,
    real_queries: Bool[Tensor, "B T"] | None = None,
    affine: tuple[Float[Tensor, "B H T"], Float[Tensor, "B H T"]] | None = None,
) -> Concentration:
    """Measure how concentrated the rows of an attention are, without holding its weights.

    With ``p`` the row's weights on the keys and ``s`` the weight of a learned sink (if any)::

        entropy_nats        -sum p ln p - s ln s
        normalized_entropy  entropy_nats / ln(visible keys, and 1 for a sink); NaN for ln 1
        p_max               max p
        effective_keys      (sum p)^2 / sum p^2
        sink_mass           s; without a learned sink the weight on first tokens
        first_token_mass    the weight on the first token of each document
        row_mass            sum p;  alpha sum p + beta (visible keys) for affine weights
        negative_mass       sum max(0, -(alpha p + beta)) over visible keys
        score_max           the largest score        score_std  standard deviation of the visible

    Args:
        scores: Queries, keys, scale and masks.
        measures: Names of the table above.
        num_queries: How many queries to look at, evenly spaced; None for all.
        first_tokens: First real token of each document, see ``streaming.first_tokens``. By default
            the first key that a padding mask leaves visible, and key 0 under any other mask.
        real_queries: False for queries that are padding; they are left out.
        affine: ``alpha`` and ``beta`` of affine weights ``alpha p + beta``.

    Returns:
        The measures in float32 (float64 for float64 inputs), with what was left out.

    Raises:
        ValueError: An unknown measure, less than one query, or a shape that does not fit.
    """
    names = list(measures)
    for name in names:
        require_known("measure", name, MEASURES)
    first_tokens = _first_tokens(scores) if first_tokens is None else first_tokens
    _check_shapes(scores, first_tokens, real_queries, affine)
    scores, query_idx = scores.detached(), scores.sample(num_queries)
    shape = (*scores.query.shape[:2], len(query_idx))
    options = {"dtype": scores.compute_dtype, "device": scores.query.device}
    values = {name: torch.full(shape, torch.nan, **options) for name in names}
    is_real = torch.ones(shape, dtype=torch.bool, device=scores.query.device)
    if real_queries is not None:
        is_real &= real_queries[:, None, query_idx]
    num_empty = num_nonfinite = 0
    with torch.no_grad():
        for block in scores.blocks(query_idx):
            rows = RowBlock(block, scores.sink_score, first_tokens, affine)
            where = (block.batch, block.heads, block.columns)
            is_empty = rows.num_visible == 0
            counts = is_real[where] & ~is_empty & rows.is_finite
            num_empty += int((is_real[where] & is_empty).sum())
            num_nonfinite += int((is_real[where] & ~is_empty & ~rows.is_finite).sum())
            for name in names:
                values[name][where] = MEASURES[name](rows).masked_fill(~counts, torch.nan)
    num_padding = int((~is_real).sum())
    return Concentration(
        values, query_idx, scores.num_queries, num_empty, num_nonfinite, num_padding
    )


def row_quantiles(
    values: Float[Tensor, "*heads R"], levels: Iterable[float]
) -> Float[Tensor, "Q *heads"]:
    """Return quantiles along the last axis without the NaNs; any number of rows.

    Args:
        values: Rows' values, NaN where a row was left out.
        levels: In [0, 1].

    Returns:
        One entry for each level, interpolated linearly; NaN where nothing is left.

    Raises:
        ValueError: A level outside [0, 1].
    """
    wanted = list(levels)
    if not all(0 <= level <= 1 for level in wanted):
        raise ValueError(complaint("levels must lie in [0, 1]", f"levels={wanted}"))
    ordered = values.sort(-1).values  # NaN comes last
    count = (~values.isnan()).sum(-1)
    shares = torch.tensor(wanted, dtype=torch.float64, device=values.device)
    position = shares.view(-1, *[1] * count.ndim) * (count - 1).clamp(min=0)
    below = position.floor().long()
    above = torch.minimum(below + 1, (count - 1).clamp(min=0))
    ordered = ordered.expand(len(wanted), *ordered.shape)
    low, high = (ordered.gather(-1, at[..., None])[..., 0] for at in (below, above))
    return low + (high - low) * (position - below).to(values.dtype)


def _first_tokens(scores: AttentionScores) -> Bool[Tensor, "B S"]:
    """Key 0, or under a padding mask the first key that is visible."""
    num_batch, num_keys = scores.query.shape[0], scores.num_keys
    is_real = torch.ones(num_batch, num_keys, dtype=torch.bool, device=scores.query.device)
    parts = [part for part in (scores.attn_mask, scores.attn_bias) if part is not None]
    if all(part.ndim == 4 and part.shape[1] == part.shape[2] == 1 for part in parts):
        mask = resolve_mask(scores.query, scores.key, scores.attn_mask, scores.attn_bias)
        visible = mask.visible()
        if visible is not None:
            is_real = visible[:, 0, 0].expand(num_batch, num_keys)
    return is_real & (is_real.cumsum(-1) == 1)


def _check_shapes(
    scores: AttentionScores,
    first_tokens: Tensor,
    real_queries: Tensor | None,
    affine: tuple[Tensor, Tensor] | None,
) -> None:
    num_batch, num_heads, num_queries, _ = scores.query.shape
    wanted = [("first_tokens", first_tokens, [num_batch, scores.num_keys], torch.bool)]
    if real_queries is not None:
        wanted.append(("real_queries", real_queries, [num_batch, num_queries], torch.bool))
    for name, part in zip(("alpha", "beta"), affine or (), strict=False):
        wanted.append((name, part, [num_batch, num_heads, num_queries], part.dtype))
    for name, tensor, shape, dtype in wanted:
        if list(tensor.shape) != shape or tensor.dtype != dtype:
            came = f"{name} {list(tensor.shape)} of {tensor.dtype}"
            raise ValueError(complaint(f"{name} must be {shape} of {dtype}", came))

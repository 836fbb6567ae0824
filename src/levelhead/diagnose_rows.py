"""What the attention calls of one site say: rows of weights, scores, outputs, hidden states.

Each call is reduced while it happens; only numbers a row are kept.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from levelhead.capture_tokens import TokenFinder, document_starts, key_tokens, without_padding
from levelhead.diagnose_calls import (
    FirstTokens,
    block_outputs,
    broken_heads,
    first_tokens_of,
    head_output_weights,
    scores_of,
    weight_blocks,
)
from levelhead.diagnosis import WHOLE_LAYER, Record
from levelhead.measure.attention_rows import attention_head_similarity, attention_sensitivity
from levelhead.measure.concentration import concentration, row_quantiles
from levelhead.measure.induction import induction_weights
from levelhead.measure.lipschitz import block_rms_norm
from levelhead.measure.softmax_norm import softmax_jacobian_norm
from levelhead.measure.streaming import AttentionScores
from levelhead.sites.calls import AttentionCall
from levelhead.sites.sites import AttentionSite

ROWS: dict[str, tuple[str, ...]] = {
    "entropy_nats": ("mean", "q10", "q50", "q90"),
    "normalized_entropy": ("mean", "q10", "q50", "q90"),
    "p_max": ("mean", "q50", "q90"),
    "effective_keys": ("q10", "q50", "q90"),
    "sink_mass": ("mean", "q90"),
    "first_token_mass": ("mean",),
    "row_mass": ("mean",),
    "score_max": ("q50", "q99", "max"),
    "score_std": ("q50", "q90"),
}
"""Measures of ``concentration``, and what is taken over the rows."""

CHOICE = ("entropy_nats", "normalized_entropy", "p_max", "effective_keys", "sink_mass",
          "first_token_mass", "score_std", "theta_lower", "theta_upper",
          "softmax_norm")  # fmt: skip
"""Measures that say nothing about a row with a single visible key; such rows are left out."""

FEW_REPEATED = 16
"""Fewer rows whose token came before say nothing about induction."""
TAKEN = ROWS | {"induction": ("mean",)}
THETA = ("q10", "q50", "q90", "q99")
THETA_TOL = 1e-3
"""Width of the bounds on theta: quantiles to three decimals."""

OUTLIER_SIZE, OUTLIER_TOKENS = 6.0, 0.06
"""A channel is an outlier where it reaches 6.0 in 6 % of the tokens (LLM.int8, section 3.2)."""


class SiteRows:
    """Reduces the calls of one site.

    Args:
        site: Where.
        num_queries: Queries looked at in each call; None for all.
        num_first: Tokens of the first sample to keep for a Jacobian.
        finder: Tells tokens from padding; one for all sites of a model.
    """

    def __init__(
        self,
        site: AttentionSite,
        num_queries: int | None,
        num_first: int = 0,
        finder: TokenFinder | None = None,
    ):
        self.site, self.num_queries, self.num_first = site, num_queries, num_first
        self.finder = finder or TokenFinder()
        self.rows: dict[str, list[Tensor]] = {}
        self.raw_score_max = torch.full((site.num_heads,), -torch.inf, dtype=torch.float64)
        self.similarity: list[Tensor] = []
        self.output_square = torch.zeros(site.num_heads, dtype=torch.float64)
        self.num_empty = self.num_nonfinite = self.num_padding = self.num_calls = 0
        self.num_tokens = self.num_looked_at = self.num_keys = 0
        self.radius, self.hidden_max = 0.0, 0.0
        self.outliers: set[int] = set()
        self.dtype, self.device = "", ""
        self.first: FirstTokens | None = None
        self.broken_heads: set[int] = set()
        self.not_measured: set[str] = set()

    @torch.no_grad()
    def add(self, call: AttentionCall) -> None:
        """Take in a call.

        Args:
            call: What its kernel saw.
        """
        scores = scores_of(call)
        self.num_calls += 1
        self.dtype = str(call.query.dtype).removeprefix("torch.")
        self.device = call.query.device.type
        tokens = self.finder.tokens_of(call)
        keys = key_tokens(call, tokens)
        num_keys = scores.num_keys if keys is None else int(keys.sum(1).max())
        self.num_keys = max(self.num_keys, num_keys)
        self._add_hidden(call.hidden_states, tokens)
        if self.first is None and self.num_first and call.hidden_states is not None:
            self.first = first_tokens_of(call, call.hidden_states, self.num_first, tokens)
        found = concentration(
            scores, ROWS, num_queries=self.num_queries,
            first_tokens=document_starts(call, tokens), real_queries=tokens,
        )  # fmt: skip
        num_all = found.num_queries * len(call.query)
        num_padding = 0 if tokens is None else int((~tokens).sum())
        num_looked_at = len(found.query_idx) * len(call.query)
        if tokens is not None:
            num_looked_at = int(tokens[:, found.query_idx].sum())
        self.num_tokens += num_all - num_padding
        self.num_padding += num_padding
        self.num_looked_at += num_looked_at
        self.num_empty += found.num_empty
        self.num_nonfinite += found.num_nonfinite
        has_choice = ~found.rows["normalized_entropy"].isnan()
        for name, values in found.rows.items():
            kept = values.masked_fill(~has_choice, torch.nan) if name in CHOICE else values
            self._keep(name, kept)
        self._add_raw_scores(call, scores, tokens)
        broken = broken_heads(call, tokens)
        self.broken_heads |= broken
        if found.num_nonfinite or broken:
            self.not_measured.add("theta, head similarity and output share: scores or values "
                                  "are not finite")  # fmt: skip
            return
        self._add_weights(call, scores, tokens, has_choice)

    def _add_weights(
        self,
        call: AttentionCall,
        scores: AttentionScores,
        tokens: Bool[Tensor, "B T"] | None,
        has_choice: Bool[Tensor, "B H N"],
    ) -> None:
        looked_at = {"num_queries": self.num_queries, "real_queries": tokens}
        ids = self.finder.ids_of(call)
        if ids is not None:
            self._keep("induction", induction_weights(scores, ids, **looked_at)[0])
        bounds, query_idx = attention_sensitivity(scores, tol=THETA_TOL, **looked_at)
        self._keep("theta_lower", bounds.lower.masked_fill(~has_choice, torch.nan))
        self._keep("theta_upper", bounds.upper.masked_fill(~has_choice, torch.nan))
        if scores.num_heads > 1:
            self.similarity.append(attention_head_similarity(scores, **looked_at).nanmean(0).cpu())
        group = scores.num_heads // call.value.shape[1]
        norms = torch.full_like(bounds.lower, torch.nan)
        o_weight = head_output_weights(self.site)
        for block, weights in weight_blocks(scores, query_idx, tokens):
            if scores.sink_score is None:
                norms[block.batch, block.heads, block.columns] = softmax_jacobian_norm(weights)
            outputs = block_outputs(block, weights, call.value, group)
            if o_weight is not None and outputs.shape[-1] == o_weight.shape[1]:
                outputs = outputs @ o_weight[block.heads].to(outputs)
            square = outputs.double().square().sum((0, 2, 3))
            self.output_square[block.heads] += square.cpu()
        if scores.sink_score is None:
            self._keep("softmax_norm", norms.masked_fill(~has_choice, torch.nan))

    def _add_raw_scores(
        self, call: AttentionCall, scores: AttentionScores, tokens: Bool[Tensor, "B T"] | None
    ) -> None:
        query = without_padding(call.query, tokens)
        raw = AttentionScores(query, without_padding(call.key, key_tokens(call, tokens)), 1.0)
        for block in raw.blocks(scores.sample(self.num_queries)):
            largest = block.scores.abs().amax((0, 2, 3)).double().cpu()
            self.raw_score_max[block.heads] = torch.fmax(self.raw_score_max[block.heads], largest)

    def _add_hidden(
        self, hidden_states: Float[Tensor, "B T E"] | None, tokens: Bool[Tensor, "B T"] | None
    ) -> None:
        if hidden_states is None or not hidden_states.is_floating_point():
            return
        if tokens is not None and tokens.shape == hidden_states.shape[:2]:
            hidden_states = hidden_states[tokens][None]
        self.radius = max(self.radius, float(block_rms_norm(hidden_states.float()).max()))
        sizes = hidden_states.abs().flatten(0, 1)
        self.hidden_max = max(self.hidden_max, float(sizes.max()))
        share = (sizes >= OUTLIER_SIZE).float().mean(0)
        self.outliers |= set((share >= OUTLIER_TOKENS).nonzero()[:, 0].tolist())

    def _keep(self, name: str, values: Float[Tensor, "B H N"]) -> None:
        self.rows.setdefault(name, []).append(values.transpose(0, 1).flatten(1).cpu())

    def records(self) -> Iterator[Record]:
        """Yield the numbers of all calls together."""
        looked = f"rows of {self.num_looked_at} of {self.num_tokens} queries"
        for name, parts in self.rows.items():
            values = torch.cat(parts, 1)
            values = values[:, ~values.isnan().all(0)]
            where = f"{looked} with two visible keys or more" if name in CHOICE else looked
            if name == "induction":
                where = f"{values.shape[1]} rows whose token came before"
                if values.shape[1] < FEW_REPEATED:
                    continue
            for statistic in TAKEN.get(name, THETA):
                for head, value in enumerate(reduce_rows(values, statistic)):
                    words = f"{STATISTICS[statistic]} over {where}"
                    yield self._record(head, f"{name}_{statistic}", value, words)
        yield from self._other_records(looked)

    def _other_records(self, looked: str) -> Iterator[Record]:
        words = "largest |query . key| before the scale, " + looked
        for head, value in enumerate(self.raw_score_max.tolist()):
            yield self._record(head, "raw_score_max", value, words)
        if self.similarity:
            mean = torch.stack(self.similarity).mean(0)
            others = mean.masked_fill(torch.eye(len(mean), dtype=torch.bool), -torch.inf).amax(-1)
            for head, value in enumerate(others.tolist()):
                words = "mean cosine of its rows with those of the most similar other head"
                yield self._record(head, "head_similarity_max", value, words)
        total = float(self.output_square.mean()) ** 0.5
        for head, square in enumerate(self.output_square.tolist() if total > 0 else []):
            words = ("root mean square of what the head adds to the output (softmax, values, "
                     "output projection), over that of the layer's heads")  # fmt: skip
            yield self._record(head, "output_share", square**0.5 / total, words)
        for head in sorted(self.broken_heads):
            words = "1 where query, key or value of the head holds NaN or infinity"
            yield self._record(head, "nonfinite_qkv", 1.0, words)
        counts = {
            "num_keys": (self.num_keys, "most keys of a call"),
            "nonfinite_rows": (self.num_nonfinite, f"rows with a NaN or +inf score, {looked}"),
            "empty_rows": (self.num_empty, f"rows that may attend to nothing, {looked}"),
            "hidden_abs_max": (self.hidden_max, "largest entry of what the queries read"),
            "outlier_channels": (len(self.outliers), "channels at 6.0 or more in 6 % of tokens"),
            "scale": (self.site.scale, "factor on query . key that the host uses"),
        }
        for metric, (value, words) in counts.items():
            yield self._record(WHOLE_LAYER, metric, float(value), words)

    def _record(self, head: int, metric: str, value: float, words: str) -> Record:
        return Record(self.site.name, self.site.layer_idx, head, metric, value, words)


STATISTICS = {
    "mean": "mean",
    "max": "maximum",
    "q10": "10 % quantile",
    "q50": "median",
    "q90": "90 % quantile",
    "q99": "99 % quantile",
}


def reduce_rows(values: Float[Tensor, "H R"], statistic: str) -> list[float]:
    """Take one statistic over the rows of each head.

    Args:
        values: NaN where a row was left out.
        statistic: A key of ``STATISTICS``.

    Returns:
        One number a head; NaN without any row.
    """
    if values.shape[1] == 0:
        return [float("nan")] * len(values)
    if statistic == "mean":
        return values.nanmean(-1).tolist()
    if statistic == "max":
        largest = values.nan_to_num(-torch.inf, posinf=torch.inf, neginf=-torch.inf).amax(-1)
        return largest.masked_fill(values.isnan().all(-1), torch.nan).tolist()
    return row_quantiles(values, [int(statistic[1:]) / 100])[0].tolist()

"""The measures of concentration as formulas over a block of scores."""

from collections.abc import Callable
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from levelhead.measure.streaming import ScoreBlock


class RowBlock:
    """Softmax of a block of scores, in pieces, each computed when first asked for.

    The weights of the keys among themselves are ``exps / exps_sum``; a learned sink leaves them
    ``key_mass`` of the row. The block's memory is taken over: it holds ``shifted`` afterwards.
    """

    def __init__(
        self,
        block: ScoreBlock,
        sink_score: Float[Tensor, " H"] | None,
        first_tokens: Bool[Tensor, "B S"],
        affine: tuple[Float[Tensor, "B H T"], Float[Tensor, "B H T"]] | None,
    ):
        scores = block.scores
        tail = scores[..., block.open_keys :]
        is_hidden = tail == -torch.inf
        self.num_visible = scores.shape[-1] - is_hidden.sum(-1)
        self.score_max = scores.amax(-1)
        self.is_finite = self.score_max.abs() < torch.inf
        finite_max = torch.where(self.is_finite, self.score_max, 0)
        self.shifted = scores.sub_(finite_max[..., None])
        self.exps = self.shifted.exp()
        self.shifted[..., block.open_keys :].masked_fill_(is_hidden, 0)
        self.open_keys, self.is_hidden = block.open_keys, is_hidden
        self.lse = finite_max + self.exps_sum.log()
        self.sink = None
        if sink_score is not None:
            self.sink = sink_score[block.heads].to(scores.dtype)[:, None]
        self.first_tokens = first_tokens[block.batch, : scores.shape[-1]]
        self.affine = affine and tuple(
            part[block.batch, block.heads][:, :, block.query_idx].to(scores.dtype)
            for part in affine
        )

    @cached_property
    def exps_sum(self) -> Tensor:
        return self.exps.sum(-1)

    @cached_property
    def log_masses(self) -> tuple[Tensor, Tensor]:
        """Log of the share of the keys and of the sink."""
        if self.sink is None:
            return torch.zeros_like(self.lse), torch.full_like(self.lse, -torch.inf)
        total = torch.logaddexp(self.lse, self.sink)
        return self.lse - total, self.sink - total

    @cached_property
    def key_mass(self) -> Tensor:
        return self.log_masses[0].exp()

    @cached_property
    def first_token_mass(self) -> Tensor:
        first = self.first_tokens.to(self.exps.dtype)[:, None, :, None]
        return self.key_mass * (self.exps @ first)[..., 0] / self.exps_sum

    @cached_property
    def entropy_nats(self) -> Tensor:
        """Entropy of keys and sink together."""
        keys = self.exps_sum.log() - (self.exps * self.shifted).sum(-1) / self.exps_sum
        choice = sum(-log.exp() * log.clamp(min=-1e30) for log in self.log_masses)
        return self.key_mass * keys + choice

    def normalized_entropy(self) -> Tensor:
        outcomes = self.num_visible + (self.sink is not None)
        most = outcomes.clamp(min=2).to(self.lse.dtype).log()
        return (self.entropy_nats / most).masked_fill(outcomes < 2, torch.nan)

    def effective_keys(self) -> Tensor:
        return self.exps_sum.square() / self.exps.square().sum(-1)

    def sink_mass(self) -> Tensor:
        return self.first_token_mass if self.sink is None else self.log_masses[1].exp()

    def row_mass(self) -> Tensor:
        if self.affine is None:
            return self.key_mass
        alpha, beta = self.affine
        return alpha * self.key_mass + beta * self.num_visible

    def negative_mass(self) -> Tensor:
        if self.affine is None:
            return torch.zeros_like(self.lse)
        alpha, beta = self.affine
        factor = alpha * self.key_mass / self.exps_sum
        negative = (-beta[..., None] - factor[..., None] * self.exps).clamp(min=0)
        negative[..., self.open_keys :].masked_fill_(self.is_hidden, 0)
        return negative.sum(-1)

    def score_std(self) -> Tensor:
        mean = self.shifted.sum(-1) / self.num_visible
        square = self.shifted.square().sum(-1) / self.num_visible
        return (square - mean.square()).clamp(min=0).sqrt()


MEASURES: dict[str, Callable[[RowBlock], Tensor]] = {
    "entropy_nats": lambda rows: rows.entropy_nats,
    "normalized_entropy": RowBlock.normalized_entropy,
    "p_max": lambda rows: rows.key_mass / rows.exps_sum,
    "effective_keys": RowBlock.effective_keys,
    "sink_mass": RowBlock.sink_mass,
    "first_token_mass": lambda rows: rows.first_token_mass,
    "row_mass": RowBlock.row_mass,
    "negative_mass": RowBlock.negative_mass,
    "score_max": lambda rows: rows.score_max,
    "score_std": RowBlock.score_std,
}
"""Name to formula. A measure is a function of a ``RowBlock``, one number for each row."""

"""What a monitor gathers in one step: sums, counts and maxima of every site and head."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from levelhead.capture_tokens import TokenFinder, document_starts
from levelhead.diagnose_calls import broken_heads, scores_of
from levelhead.measure.concentration import Concentration, concentration
from levelhead.sites.calls import AttentionCall
from levelhead.sites.sites import AttentionSite

LARGEST = ("score_max",)
"""Metrics of which a head's number is the largest over its rows; of all others it is the mean."""

Statistics = dict[str, dict[str, list[float]]]
"""Site, metric, one number a head."""


@dataclass(frozen=True)
class Broken:
    """The first place where numbers stopped being finite.

    Attributes:
        layer: The site's name.
        head: Which head; -1 where all its inputs are finite but a score is not.
    """

    layer: str
    head: int


class StepSums:
    """Adds up the calls of one step, over micro-batches.

    Args:
        sites: The sites watched.
        metrics: Names of ``measure.concentration``.
        num_queries: Queries looked at in each sample; None for all.
    """

    def __init__(
        self, sites: Sequence[AttentionSite], metrics: Sequence[str], num_queries: int | None
    ):
        self.sites, self.metrics, self.num_queries = list(sites), list(metrics), num_queries
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        shapes = {site.name: (len(self.metrics), site.num_heads) for site in self.sites}
        self.sums = {name: _filled(shape, 0.0) for name, shape in shapes.items()}
        self.counts = {name: _filled(shape, 0.0) for name, shape in shapes.items()}
        self.largest = {name: _filled(shape, -torch.inf) for name, shape in shapes.items()}
        heads = {name: shape[1] for name, shape in shapes.items()}
        self.raw_share = {name: _filled((count,), -torch.inf) for name, count in heads.items()}
        # One more than heads: a score that is not finite although queries, keys and values are.
        self.broken = {name: _filled((count + 1,), 0.0) for name, count in heads.items()}
        self.order: list[str] = []
        self.num_calls = 0
        self.finder = TokenFinder()

    @torch.no_grad()
    def add(self, call: AttentionCall) -> None:
        """Take in a call.

        Args:
            call: What its kernel saw.
        """
        name = call.site.name
        tokens = self.finder.tokens_of(call)
        found = concentration(
            scores_of(call), self.metrics, num_queries=self.num_queries,
            first_tokens=document_starts(call, tokens), real_queries=tokens,
        )  # fmt: skip
        self.num_calls += 1
        if self.metrics:
            self._add_rows(name, call, found)
        heads = sorted(broken_heads(call, tokens))
        self.broken[name][heads] += 1
        self.broken[name][-1] += found.num_nonfinite > 0 and not heads
        if name not in self.order:
            self.order.append(name)

    def _add_rows(self, name: str, call: AttentionCall, found: Concentration) -> None:
        rows = torch.stack([found.rows[metric] for metric in self.metrics]).double()
        values = rows.transpose(1, 2).flatten(2)
        is_known = ~values.isnan()
        self.sums[name] += values.nansum(-1).cpu()
        self.counts[name] += is_known.sum(-1).cpu()
        largest = values.masked_fill_(~is_known, -torch.inf).amax(-1).cpu()
        self.largest[name] = torch.maximum(self.largest[name], largest)
        if "score_max" in self.metrics and call.attn_bias is None and call.soft_cap is None:
            score_max = largest[self.metrics.index("score_max")]
            share = score_max / call.scale / torch.finfo(call.query.dtype).max
            self.raw_share[name] = torch.maximum(self.raw_share[name], share)

    def first_broken(self) -> Broken | None:
        """Return the first site, as they were called, whose numbers are not finite."""
        for name in self.order:
            places = self.broken[name].nonzero()[:, 0].tolist()
            if places:
                num_heads = len(self.broken[name]) - 1
                return Broken(name, places[0] if places[0] < num_heads else -1)
        return None

    def reduce(self, device: torch.device, largest: Tensor, added: Tensor) -> None:
        """Bring the ranks together: one MAX and one SUM, whatever the number of layers.

        Args:
            device: Where the process group wants its tensors.
            largest: More numbers to take the largest of, replaced in place.
            added: More numbers to add up, replaced in place.
        """
        if num_processes() == 1:
            return
        tensors = [*self.largest.values(), *self.raw_share.values(), largest]
        _all_reduce(tensors, dist.ReduceOp.MAX, device)
        tensors = [*self.sums.values(), *self.counts.values(), *self.broken.values(), added]
        _all_reduce(tensors, dist.ReduceOp.SUM, device)

    def statistics(self) -> Statistics:
        """Return one number a head.

        Returns:
            NaN where no row was seen.
        """
        found: Statistics = {}
        for site in self.sites:
            means = self.sums[site.name] / self.counts[site.name]
            largest = self.largest[site.name]
            largest = largest.masked_fill(self.counts[site.name] == 0, torch.nan)
            found[site.name] = {
                metric: (largest if metric in LARGEST else means)[row].tolist()
                for row, metric in enumerate(self.metrics)
            }
        return found


def num_processes() -> int:
    """Return the size of the process group, 1 without any."""
    is_ready = dist.is_available() and dist.is_initialized()
    return dist.get_world_size() if is_ready else 1


def _filled(shape: tuple[int, ...], value: float) -> Tensor:
    return torch.full(shape, value, dtype=torch.float64)


def _all_reduce(tensors: Sequence[Tensor], how: Any, device: torch.device) -> None:
    packed = torch.cat([tensor.flatten() for tensor in tensors]).to(device)
    dist.all_reduce(packed, how)
    start = 0
    for tensor in tensors:
        tensor.copy_(packed[start : start + tensor.numel()].view_as(tensor))
        start += tensor.numel()


def scalars(statistics: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Name the numbers ``attn/{layer}/{head|mean|max|q99}/{metric}``.

    Args:
        statistics: Site, metric, one number a head.

    Returns:
        Name to value; mean, max and q99 are over the heads.
    """
    named: dict[str, float] = {}
    for layer, metrics in statistics.items():
        if not metrics:
            continue
        values = torch.tensor(list(metrics.values()), dtype=torch.float64)
        over_heads = {
            "mean": values.nanmean(1).tolist(),
            "max": values.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(1).tolist(),
            "q99": values.nanquantile(0.99, dim=1).tolist(),
        }
        for row, (metric, by_head) in enumerate(metrics.items()):
            numbers = {str(head): value for head, value in enumerate(by_head)}
            numbers |= {which: values[row] for which, values in over_heads.items()}
            for which, value in numbers.items():
                named[f"attn/{layer or 'root'}/{which}/{metric}"] = value
    return named

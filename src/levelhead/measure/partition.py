"""How evenly can the weights of a row be split in two: the question behind sensitivity.

    imbalance(p) = min over S of |p(S) - p(S^c)| = min over signs of |sum_i sign_i p_i|

The answer is exact, or a proof that the imbalance is at most ``resolution``. The proof rests on
one idea. Call a set of signed sums *dense* on [low, high] if both ends are sums that some signs
really reach and neighbouring sums are at most ``2 resolution`` apart. Then

1. adding an atom p (with either sign) to a dense set gives a dense set on [low - p, high + p] if
   ``2 p <= high - low + 2 resolution``, and always if ``p <= resolution``;
2. dense sets that overlap, or leave a hole of at most ``2 resolution``, join into one dense set;
3. M atoms whose sorted neighbours differ by at most ``resolution``, i of them positive, have sums
   dense between their smallest and largest such sum: swapping neighbours moves the sum by at most
   ``2 resolution``;
4. if 0 lies in a dense set, the imbalance is at most ``resolution``; if it lies in none, the
   imbalance is the smallest distance of an end from 0, exactly.

So a row is read as a *head* (atoms before the last wide gap, largest first), a *bulk* (atoms
without wide gaps, rule 3) and a *tail* (atoms at most ``resolution``, rule 1).
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

EXACT_KEYS = 18  # rows with at most so many positive weights are enumerated: 2^9 x 2^8 sums
_FREE_SIGNS = 12  # signs tried for rows whose head no greedy sum settles: 2^6 x 2^6 sums
_SHORT_ROW = 128  # atoms above the resolution up to which that is tried
_REACH_ROWS = 128  # rows whose dense sets are followed together


def imbalance(
    rows: Float[Tensor, "R S"], total: Float[Tensor, " R"], resolution: float
) -> tuple[Float[Tensor, " R"], Float[Tensor, " R"]]:
    """Bound the imbalance of sorted rows, each divided by its sum, from below and above.

    Args:
        rows: Ascending, non-negative, float32 or float64.
        total: Their sums, positive, float64.
        resolution: Where the bounds differ, they are 0 and this.

    Returns:
        Lower and upper bound, equal for rows of at most ``EXACT_KEYS`` positive weights and
        wherever the imbalance exceeds ``resolution``. Rounding adds at most ``2 S eps`` to either.
    """
    low, high = total.new_zeros(len(rows)), total.new_full((len(rows),), resolution)
    num_keys = rows.shape[1]
    few = total > 0
    if num_keys > EXACT_KEYS:
        few = rows[:, num_keys - EXACT_KEYS - 1] == 0
    low[few] = high[few] = _enumerate(_largest(rows[few], total[few], EXACT_KEYS))
    rest = (~few).nonzero()[:, 0]
    if len(rest):
        layout = _Layout.of(rows[rest], total[rest], resolution)
        exact = _distance_to_zero(layout, resolution)
        apart = exact > 0
        low[rest[apart]] = high[rest[apart]] = exact[apart]
    return low, high


def sort_rows(rows: Float[Tensor, "R N"]) -> Float[Tensor, "R N"]:
    """Sort each row upwards; on a CPU by numpy, whose sort without indices is far faster.

    Args:
        rows: float32 or float64.

    Returns:
        A new tensor with ascending rows.
    """
    if rows.device.type == "cpu":
        return torch.from_numpy(np.sort(rows.numpy(), axis=-1))
    return rows.sort(-1).values


def _largest(
    rows: Float[Tensor, "R S"], total: Float[Tensor, " R"], count: int
) -> Float[Tensor, "R N"]:
    """The ``count`` largest weights of ascending rows, descending, as shares of the sum."""
    return rows[:, max(0, rows.shape[1] - count) :].flip(-1).double() / total[:, None]


@dataclass
class _Layout:
    """Rows cut into head, bulk and tail.

    Attributes:
        atoms: ``[R, K]`` the largest weights, descending; those of the tail may follow.
        up_to: ``[R, K + 1]`` at index g: the mass of the g largest weights.
        head_end: ``[R]`` number of atoms in the head.
        bulk_end: ``[R]`` number of atoms in head and bulk; all later ones are at most the
            resolution.
    """

    atoms: Float[Tensor, "R K"]
    up_to: Float[Tensor, "R K1"]
    head_end: Int[Tensor, " R"]
    bulk_end: Int[Tensor, " R"]

    @classmethod
    def of(
        cls, rows: Float[Tensor, "R S"], total: Float[Tensor, " R"], resolution: float
    ) -> "_Layout":
        num_keys = rows.shape[1]
        # A little lower, so that rounding to the rows' dtype cannot lift it above the resolution.
        threshold = (resolution * (1 - 1e-6) * total).to(rows.dtype)
        bulk_end = num_keys - torch.searchsorted(rows, threshold[:, None], right=True)[:, 0]
        atoms = _largest(rows, total, max(1, int(bulk_end.max())))
        up_to = torch.nn.functional.pad(atoms.cumsum(-1), (1, 0))
        row, before = (atoms[:, :-1] - atoms[:, 1:] > resolution).nonzero(as_tuple=True)
        head_end = torch.zeros_like(bulk_end)
        inside = before + 1 < bulk_end[row]
        head_end.scatter_reduce_(0, row[inside], before[inside] + 1, "amax")
        return cls(atoms, up_to, head_end, bulk_end)

    def rows(self, which: Tensor) -> "_Layout":
        return _Layout(
            self.atoms[which], self.up_to[which], self.head_end[which], self.bulk_end[which]
        )

    def mass_up_to(self, index: Int[Tensor, "R N"]) -> Float[Tensor, "R N"]:
        return self.up_to.gather(1, index.clamp(0, self.up_to.shape[1] - 1))


def _distance_to_zero(layout: _Layout, resolution: float) -> Float[Tensor, " R"]:
    """The exact imbalance, or 0 where it is proved to be at most the resolution."""
    head_sum = _greedy_sum(layout, layout.head_end)[:, None]
    distance = _close(layout, head_sum, head_sum)
    short = ((distance > 0) & (layout.head_end > 1) & (layout.bulk_end <= _SHORT_ROW)).nonzero()
    short = short[:, 0]
    if len(short):
        distance[short[_last_signs_reach_zero(layout.rows(short), resolution)]] = 0
    open_rows = ((distance > 0) & (layout.head_end > 1)).nonzero()[:, 0]
    open_rows = open_rows[layout.head_end[open_rows].argsort()]
    for rows in open_rows.split(_REACH_ROWS) if len(open_rows) else ():
        distance[rows] = _follow_head(layout.rows(rows), resolution)
    return distance


def _greedy_sum(layout: _Layout, end: Int[Tensor, " R"]) -> Float[Tensor, " R"]:
    """One signed sum of the atoms before ``end``: each pulls the sum back over zero."""
    depth = int(end.max())
    columns = layout.atoms[:, :depth].t().contiguous()
    total = torch.zeros_like(layout.up_to[:, 0])
    for index in range(depth):
        total = torch.where(index < end, (total - columns[index]).abs(), total)
    return total


def _last_signs_reach_zero(layout: _Layout, resolution: float) -> Bool[Tensor, " R"]:
    """Sign the larger atoms greedily and try all signs of the last ones of the bulk.

    A sum within the resolution stays there: the tail only pulls it towards zero. For a row
    without structure this nearly always succeeds; where it fails nothing is concluded.
    """
    start = (layout.bulk_end - _FREE_SIGNS).clamp(min=0)
    index = start[:, None] + torch.arange(_FREE_SIGNS, device=start.device)
    inside = index < layout.bulk_end[:, None]
    last = layout.atoms.gather(1, index.clamp(max=layout.atoms.shape[1] - 1)) * inside
    target = _greedy_sum(layout, start)
    return _closest(last[:, 0::2], last[:, 1::2], target) <= resolution


def _close(
    layout: _Layout, low: Float[Tensor, "R N"], high: Float[Tensor, "R N"]
) -> Float[Tensor, " R"]:
    """Add bulk and tail to dense sets [low, high] (+inf: none); the distance of the result from 0.

    With the bulk's largest atoms positive up to index g its sum is ``largest(g) = 2 up_to[g] -
    up_to[head_end] - up_to[bulk_end]``; with as many positive, the smallest sum is
    ``-largest(head_end + bulk_end - g)``. Both grow with g, so the first g whose largest sum
    reaches the target decides.
    """
    first_end, last_end = layout.head_end[:, None], layout.bulk_end[:, None]
    last_mass = layout.mass_up_to(last_end)
    offset = layout.mass_up_to(first_end) + last_mass
    tail = (1 - last_mass).clamp(min=0)
    target_low, target_high = -high - tail, tail - low
    first = torch.searchsorted(layout.up_to, (target_low + offset) / 2)
    first = torch.maximum(first, first_end)
    smallest = offset - 2 * layout.mass_up_to(first_end + last_end - first)
    above = (smallest - target_high).clamp(min=0).masked_fill(first > last_end, torch.inf)
    largest = 2 * layout.mass_up_to(torch.minimum(first, last_end + 1) - 1) - offset
    below = (target_low - largest).masked_fill(first <= first_end, torch.inf)
    return torch.minimum(above, below).masked_fill(low == torch.inf, torch.inf).amin(-1)


def _follow_head(layout: _Layout, resolution: float) -> Float[Tensor, " R"]:
    """Follow all dense sets of the head, atom by atom; rows come with ascending ``head_end``.

    The first atom is positive: the other half of the sums is its mirror image.
    """
    distance = torch.full_like(layout.up_to[:, 0], torch.inf)
    rows = torch.arange(len(distance), device=distance.device)
    low = high = layout.atoms[:, :1]
    for index in range(1, int(layout.head_end[-1]) + 1):
        ended = layout.head_end == index
        if ended.any():
            closed = _close(layout.rows(ended), low[ended], high[ended])
            distance[rows[ended]] = torch.minimum(distance[rows[ended]], closed)
            layout, rows, low, high = layout.rows(~ended), rows[~ended], low[~ended], high[~ended]
        if not len(rows):
            break
        low, high = _add_atom(low, high, layout.atoms[:, index, None], 2 * resolution)
        low, high, missed = _prune(low, high, 1 - layout.up_to[:, index + 1, None])
        distance[rows] = torch.minimum(distance[rows], missed)
        following = layout.atoms[:, index + 1, None]
        settled = (high - low + 2 * resolution >= 2 * following).any(-1)
        settled &= layout.head_end > index + 1
        settled |= distance[rows] <= resolution
        distance[rows[settled]] = 0
        keep = ~settled
        layout, rows, low, high = layout.rows(keep), rows[keep], low[keep], high[keep]
    return distance


def _add_atom(
    low: Float[Tensor, "R N"], high: Float[Tensor, "R N"], atom: Float[Tensor, "R 1"], hole: float
) -> tuple[Float[Tensor, "R M"], Float[Tensor, "R M"]]:
    """Shift every dense set both ways and join those that meet (+inf fills up).

    Of a union of intervals, sorted starts and sorted ends say where it is interrupted: after the
    i-th end if the next start lies further on.
    """
    low = sort_rows(torch.cat([low - atom, low + atom], -1))
    high = sort_rows(torch.cat([high - atom, high + atom], -1))
    interrupted = low[:, 1:] > high[:, :-1] + hole
    low[:, 1:].masked_fill_(~interrupted, torch.inf)
    high[:, :-1].masked_fill_(~interrupted, torch.inf)
    return sort_rows(low), sort_rows(high)


def _prune(
    low: Float[Tensor, "R N"], high: Float[Tensor, "R N"], remaining: Float[Tensor, "R 1"]
) -> tuple[Float[Tensor, "R M"], Float[Tensor, "R M"], Float[Tensor, " R"]]:
    """Drop dense sets that can no longer reach 0; what the best of them misses is exact."""
    missing = torch.maximum(low - remaining, -high - remaining)
    gone: Bool[Tensor, "R N"] = missing > 0
    missed = missing.masked_fill(~gone | (low == torch.inf), torch.inf).amin(-1)
    low, high = low.masked_fill(gone, torch.inf), high.masked_fill(gone, torch.inf)
    used = (low < torch.inf).any(0).nonzero()[:, 0]
    if not len(used):
        return low[:, :1], high[:, :1], missed
    columns = slice(int(used[0]), int(used[-1]) + 1)
    return low[:, columns], high[:, columns], missed


def _enumerate(atoms: Float[Tensor, "R S"]) -> Float[Tensor, " R"]:
    """The imbalance of at most ``EXACT_KEYS`` atoms."""
    return _closest(atoms[:, 2::2], atoms[:, 1::2], atoms[:, 0])


def _closest(
    left: Float[Tensor, "R M"], right: Float[Tensor, "R N"], target: Float[Tensor, " R"]
) -> Float[Tensor, " R"]:
    """The smallest |target + signed sum of left + signed sum of right|, met in the middle."""
    wanted = target[:, None] + _signed_sums(left)
    sums = sort_rows(_signed_sums(right))
    after = torch.searchsorted(sums, wanted).clamp(max=sums.shape[1] - 1)
    nearest = [(wanted - sums.gather(1, at)).abs() for at in (after, (after - 1).clamp(min=0))]
    return torch.cat(nearest, -1).amin(-1)


def _signed_sums(atoms: Float[Tensor, "R N"]) -> Float[Tensor, "R M"]:
    """The sums under all 2^N signs."""
    sums = atoms.new_zeros(len(atoms), 1)
    for atom in atoms.unbind(-1):
        sums = torch.stack([sums + atom[:, None], sums - atom[:, None]], -1).flatten(1)
    return sums

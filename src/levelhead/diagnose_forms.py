"""How the heads of a site differ from plain attention, as functions a Jacobian can be taken of.

Norms are read off the host's modules, a rotation (RoPE) off what it did to the queries and keys.
Nothing is believed unseen: the maps must give back what the kernel saw, or the reason is said.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from levelhead.diagnose_calls import FirstTokens
from levelhead.measure.head import HeadForm, RowMap
from levelhead.sites.layout import ProjectionWeights
from levelhead.sites.own_calls import inner_of
from levelhead.sites.sites import AttentionSite

KNOWN_TERMS = frozenset({"softmax", "off_by_one", "sink", "soft_cap"})
"""Terms of a variant that are no more than a sink score or a cap."""
LEAST_TOLERANCE = 1e-4
"""Relative to the largest number: float32 projections of a few hundred inputs stay below it."""


def head_forms(
    site: AttentionSite, weights: ProjectionWeights, first: FirstTokens
) -> list[HeadForm]:
    """Say how each head of a site differs from plain attention.

    Args:
        site: A self-attention.
        weights: Its projections.
        first: Tokens, and what the kernel saw of them.

    Returns:
        One form a head.

    Raises:
        ValueError: Why it cannot be said.
    """
    inner = inner_of(site.module)
    terms = set() if inner is None else {term.name for term in inner.variant.terms}
    if not terms <= KNOWN_TERMS:
        raise ValueError(f"a variant's own stages ({', '.join(sorted(terms - KNOWN_TERMS))})")
    if site.norm_spans_heads or site.is_cosine or site.head_scale is not None:
        raise ValueError("q and k norms over all heads, or a learned factor a head")
    query = _heads(first.hidden_states, weights.q_weight, weights.q_bias, site.num_heads)
    key = _heads(first.hidden_states, weights.k_weight, weights.k_bias, site.num_kv_heads)
    seen = (first.query * (first.scale / site.scale), first.key)
    tolerance = max(LEAST_TOLERANCE, 8 * torch.finfo(first.dtype).eps)
    norms = [_norm_map(site.q_norm, query), _norm_map(site.k_norm, key)]
    pairs = zip(norms, (query, key), strict=True)
    normed = [rows if norm is None else norm(rows) for norm, rows in pairs]
    turn = None
    if not all(_are_close(*pair, tolerance) for pair in zip(normed, seen, strict=True)):
        turn = _turn_between(normed, seen, tolerance)
    maps = [_chain(norm, turn) for norm in norms]
    sinks = [None] * site.num_heads if first.sink_score is None else first.sink_score.tolist()
    cap = first.soft_cap
    return [
        HeadForm(query_map=maps[0], key_map=maps[1], soft_cap=cap, sink_score=s) for s in sinks
    ]


def _are_close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    return float((found - expected).abs().max()) <= tolerance * float(expected.abs().max())


def _heads(
    states: Float[Tensor, "N E"], weight: Tensor, bias: Tensor | None, count: int
) -> Float[Tensor, "heads N D"]:
    projected = states @ weight.double()
    projected = projected if bias is None else projected + bias.double()
    return projected.unflatten(-1, (count, -1)).transpose(0, 1)


def _chain(*maps: RowMap | None) -> RowMap | None:
    used = [map_ for map_ in maps if map_ is not None]
    if not used:
        return None

    def chained(rows: Tensor) -> Tensor:
        for map_ in used:
            rows = map_(rows)
        return rows

    return chained


def _norm_map(norm: nn.Module | None, rows: Tensor) -> RowMap | None:
    """The host's norm as a function in float64, proven on the rows it is for.

    Raises:
        ValueError: Its formula is not known.
    """
    if norm is None:
        return None
    weight, bias = (getattr(norm, name, None) for name in ("weight", "bias"))
    weight = torch.ones(()) if weight is None else weight.detach()
    eps = next((getattr(norm, n) for n in ("eps", "variance_epsilon") if hasattr(norm, n)), 0.0)
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    bias = 0.0 if bias is None else bias.detach().double()
    sample = rows.float()
    with torch.no_grad():
        expected = norm(sample.to(weight.dtype)).double()

    def rms(gain: Tensor) -> RowMap:
        gain = gain.double()
        return lambda x: x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * gain + bias

    def centred(gain: Tensor) -> RowMap:
        return lambda x: rms(gain)(x - x.mean(-1, keepdim=True))

    for candidate in (rms(weight), rms(1 + weight), centred(weight)):
        found = candidate(sample.double())
        if found.shape == expected.shape and torch.allclose(found, expected, 1e-3, 1e-4):
            return candidate
    raise ValueError(f"a norm whose formula is not known ({type(norm).__name__})")


def _turn_between(before: list[Tensor], after: tuple[Tensor, Tensor], tolerance: float) -> RowMap:
    """Read a rotary embedding off queries and keys before and after it.

    A rotation (and stretch) of pairs of channels is a product with one complex number for each
    token and pair, the same for all heads; the last channels may stay as they are.

    Raises:
        ValueError: It is something else.
    """
    old, new = torch.cat(before), torch.cat(after)
    size = old.shape[-1]
    same = ((old - new).abs() <= tolerance * new.abs().max()).all(0).all(0)
    moved = same.logical_not().nonzero()[:, 0]
    least = 2 * math.ceil((int(moved[-1]) + 1) / 2) if len(moved) else 0
    for width in (size, *range(least, size, 2)):
        for split in (_halves, _neighbours):
            turn = _turn(old, new, width, split)
            if all(_are_close(turn(b), a, tolerance) for b, a in zip(before, after, strict=True)):
                return turn
    raise ValueError(
        "what the host did to queries and keys between projection and kernel could not be read "
        "back as a rotation"
    )


Split = Callable[[Tensor], Tensor]


def _halves(rows: Tensor) -> Tensor:
    """Pairs (i, i + width / 2) as complex numbers."""
    return torch.complex(*rows.chunk(2, -1))


def _neighbours(rows: Tensor) -> Tensor:
    """Pairs (2 i, 2 i + 1) as complex numbers."""
    return torch.complex(rows[..., ::2], rows[..., 1::2])


def _turn(old: Tensor, new: Tensor, width: int, split: Split) -> RowMap:
    source, target = split(old[..., :width]), split(new[..., :width])
    size = source.abs().square().sum(0).clamp(min=torch.finfo(torch.float64).tiny)
    factor = (source.conj() * target).sum(0) / size

    def turn(rows: Tensor) -> Tensor:
        turned = split(rows[..., :width]) * factor
        parts = (turned.real, turned.imag)
        joined = torch.cat(parts, -1) if split is _halves else torch.stack(parts, -1).flatten(-2)
        return torch.cat([joined, rows[..., width:]], -1)

    return turn

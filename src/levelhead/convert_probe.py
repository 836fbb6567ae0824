"""By how much a conversion moves the output of one attention, without running the model."""

import copy

import torch
from torch import Tensor, nn

from levelhead.inner import InnerAttention
from levelhead.parts.base import AttentionShape
from levelhead.parts.projections import WHICH, Projections
from levelhead.parts.scores import DotProduct
from levelhead.shapes import at_least_float32
from levelhead.sites.build import HostSink
from levelhead.sites.host import Installed
from levelhead.sites.layout import ProjectionWeights
from levelhead.sites.sites import AttentionSite
from levelhead.variants import make_parts, parse_variant

PROBE_BATCH, PROBE_TOKENS = 2, 17
PROBED_KINDS = ("self", "cross", "window")


@torch.no_grad()
def moved_by(site: AttentionSite, installed: Installed, factor: float) -> float | None:
    """Compare an attention with the host's on random hidden states of unit variance.

    The hidden states go through the layer's own projections and norms; positions (rotation, bias)
    and windows are left out, a causal mask is not. In float32 or wider.

    Args:
        site: Where.
        installed: What will run there; copied, never changed.
        factor: What the output is multiplied by, for a host that makes up for a neutral start.

    Returns:
        ``||after - before|| / ||before||``, or None for a kind that cannot be probed alone.
    """
    if site.kind not in PROBED_KINDS or site.q_norm is not None and site.norm_spans_heads:
        return None
    weights = site.read()
    dtype = at_least_float32(weights.q_weight.dtype)
    weights = weights.map(lambda weight: weight.to(dtype))
    after = _copied(installed).to(dtype).eval()
    plain = _plain(site, after)
    hidden = _hidden_states(site, weights)
    before = _run(site, plain, Projections(), weights, hidden)
    new = _run(site, after.inner, after.projections, weights, hidden, after.early_norm) * factor
    return float((new - before).norm() / before.norm().clamp_min(torch.finfo(dtype).tiny))


def _copied(installed: Installed) -> Installed:
    """Copy what was built, but not the host its sink may look at."""
    sink = installed.inner.normaliser
    memo = {id(sink.owner[0]): sink.owner[0]} if isinstance(sink, HostSink) else {}
    return copy.deepcopy(installed, memo)


def _plain(site: AttentionSite, installed: Installed) -> InnerAttention:
    """The host's attention: softmax with the host's own cap and sink."""
    softmax, shape = parse_variant("softmax"), installed.inner.shape
    parts = make_parts(softmax, AttentionShape(**{**vars(shape), "factory": {}}))
    del parts["projections"]
    if site.soft_cap is not None:
        parts["cap"] = installed.inner.cap
    if isinstance(installed.inner.normaliser, HostSink):
        parts["normaliser"] = installed.inner.normaliser
    return InnerAttention.from_parts(softmax, shape, parts, site.scale).eval()


def _hidden_states(site: AttentionSite, weights: ProjectionWeights) -> tuple[Tensor, Tensor]:
    like, generator = weights.q_weight, torch.Generator().manual_seed(0)
    query_side = torch.randn(PROBE_BATCH, PROBE_TOKENS, site.embed_dim, generator=generator)
    query_side = query_side.to(like.device, like.dtype)
    if site.kv_embed_dim == site.embed_dim and site.kind != "cross":
        return query_side, query_side
    key_side = torch.randn(PROBE_BATCH, PROBE_TOKENS, site.kv_embed_dim, generator=generator)
    return query_side, key_side.to(like.device, like.dtype)


def _run(
    site: AttentionSite,
    inner: InnerAttention,
    part: Projections,
    weights: ProjectionWeights,
    hidden: tuple[Tensor, Tensor],
    early_norm: DotProduct | None = None,
) -> Tensor:
    rows: dict[str, Tensor] = {}
    for which in WHICH:
        weight, bias = getattr(weights, f"{which}_weight").mT, getattr(weights, f"{which}_bias")
        projected = part.project(which, hidden[which != "q"], weight, bias)
        heads = site.num_heads if which == "q" else site.num_kv_heads
        rows[which] = projected.unflatten(-1, (heads, -1)).transpose(1, 2)
    query, key = _host_norms(site, rows["q"], rows["k"])
    if early_norm is not None:
        query, key = early_norm.prepare(query, key)
    if site.head_scale is not None:
        query = query * site.head_scale().to(query.dtype)
    attn_output = inner(query, key, rows["v"], hidden[0], is_causal=site.is_causal)
    merged = attn_output.transpose(1, 2).flatten(2)
    return merged if weights.o_weight is None else merged @ weights.o_weight


def _host_norms(site: AttentionSite, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    if site.is_cosine:
        query, key = nn.functional.normalize(query, dim=-1), nn.functional.normalize(key, dim=-1)
    for norm, side in ((site.q_norm, "q"), (site.k_norm, "k")):
        if norm is not None:
            wide = copy.deepcopy(norm).to(query.dtype)
            query, key = (wide(query), key) if side == "q" else (query, wide(key))
    return query, key

"""By how much a conversion moves the output of one attention, without running the model."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from levelhead.inner import InnerAttention
from levelhead.parts.projections import WHICH, Projections
from levelhead.parts.scores import DotProduct
from levelhead.shapes import at_least_float32
from levelhead.sites.build import HostSink
from levelhead.sites.host import Installed
from levelhead.sites.layout import Projection
from levelhead.sites.projection_hooks import logical_bias, logical_weight
from levelhead.sites.sites import AttentionSite
from levelhead.variants import make_parts, parse_variant

PROBE_TOKENS = 17
WIDE = (torch.float32, torch.float64)
PROBED_KINDS = ("self", "cross", "window")


@torch.no_grad()
def moved_by(site: AttentionSite, installed: Installed, factor: float) -> float | None:
    """Compare an attention with the host's on random hidden states of unit variance.

    The hidden states go through the layer's own projections and norms; positions (rotation, bias)
    and windows are left out, a causal mask is not. In float32 or wider.

    Args:
        site: Where.
        installed: What will run there; never changed.
        factor: What the output is multiplied by, for a host that makes up for a neutral start.

    Returns:
        ``||after - before|| / ||before||``, or None for a kind that cannot be probed alone.
    """
    if site.kind not in PROBED_KINDS or site.q_norm is not None and site.norm_spans_heads:
        return None
    is_wide = site.layout.q.weight.parameter.dtype in WIDE
    with _evaluating(installed if is_wide else _copied(installed).float()) as after:
        hidden = _hidden_states(site)
        rows = {which: _project(site, which, hidden) for which in WHICH}
        before = _attend(site, _plain(site, after), rows, hidden)
        if after.variant.has_projections:
            rows = {w: _project(site, w, hidden, after.projections) for w in WHICH}
        new = _attend(site, after.inner, rows, hidden, after.early_norm) * factor
        difference, before = _merge(site, new - before), _merge(site, before)
    return float(difference.norm() / before.norm().clamp_min(torch.finfo(before.dtype).tiny))


@contextmanager
def _evaluating(installed: Installed) -> Iterator[Installed]:
    """Run in evaluation mode, where no state moves, and go back to the modes that were."""
    modes = [(module, module.training) for module in installed.modules()]
    try:
        yield installed.eval()
    finally:
        for module, mode in modes:
            module.training = mode


def _copied(installed: Installed) -> Installed:
    """Copy what was built, but not the host its sink may look at."""
    sink = installed.inner.normaliser
    memo = {id(sink.owner[0]): sink.owner[0]} if isinstance(sink, HostSink) else {}
    return copy.deepcopy(installed, memo)


def _plain(site: AttentionSite, installed: Installed) -> InnerAttention:
    """The host's attention: softmax with the host's own cap and sink."""
    softmax, shape = parse_variant("softmax"), installed.inner.shape
    parts = make_parts(softmax, shape)
    del parts["projections"]
    if site.soft_cap is not None:
        parts["cap"] = installed.inner.cap
    if isinstance(installed.inner.normaliser, HostSink):
        parts["normaliser"] = installed.inner.normaliser
    return InnerAttention.from_parts(softmax, shape, parts, site.scale).eval()


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(at_least_float32(tensor.dtype))


def _hidden_states(site: AttentionSite) -> tuple[Tensor, Tensor]:
    """What queries are made of, and what keys and values are made of."""
    like, generator = _wide(site.layout.q.weight.parameter), torch.Generator().manual_seed(0)
    query_side = torch.randn(1, PROBE_TOKENS, site.embed_dim, generator=generator)
    query_side = query_side.to(like.device, like.dtype)
    if site.kv_embed_dim == site.embed_dim and site.kind != "cross":
        return query_side, query_side
    key_side = torch.randn(1, PROBE_TOKENS, site.kv_embed_dim, generator=generator)
    return query_side, key_side.to(like.device, like.dtype)


_AS_THEY_ARE = Projections()


def _project(
    site: AttentionSite,
    which: str,
    hidden: tuple[Tensor, Tensor],
    part: Projections = _AS_THEY_ARE,
) -> Tensor:
    projection: Projection = getattr(site.layout, which)
    weight, bias = _wide(logical_weight(projection)), logical_bias(projection)
    bias = None if bias is None else _wide(bias)
    projected = part.project(which, hidden[which != "q"], weight, bias)
    heads = site.num_heads if which == "q" else site.num_kv_heads
    return projected.unflatten(-1, (heads, -1)).transpose(1, 2)


def _attend(
    site: AttentionSite,
    inner: InnerAttention,
    rows: dict[str, Tensor],
    hidden: tuple[Tensor, Tensor],
    early_norm: DotProduct | None = None,
) -> Tensor:
    query, key = _host_norms(site, rows["q"], rows["k"])
    if early_norm is not None:
        query, key = early_norm.prepare(query, key)
    if site.head_scale is not None:
        query = query * site.head_scale().to(query.dtype)
    return inner(query, key, rows["v"], hidden[0], is_causal=site.is_causal)


def _merge(site: AttentionSite, attn_output: Tensor) -> Tensor:
    """Through the output projection, without its bias, which no variant moves."""
    merged = attn_output.transpose(1, 2).flatten(2)
    o = site.layout.o
    return merged if o is None else merged @ _wide(logical_weight(o)).mT


def _host_norms(site: AttentionSite, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    if site.is_cosine:
        query, key = nn.functional.normalize(query, dim=-1), nn.functional.normalize(key, dim=-1)
    for norm, side in ((site.q_norm, "q"), (site.k_norm, "k")):
        if norm is not None:
            wide = copy.deepcopy(norm).to(query.dtype)
            query, key = (wide(query), key) if side == "q" else (query, wide(key))
    return query, key

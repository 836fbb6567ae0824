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
from levelhead.sites.find import find_attention
from levelhead.sites.host import Installed, host_of
from levelhead.sites.layout import Projection
from levelhead.sites.projection_hooks import (
    add_hooks,
    logical_bias,
    logical_weight,
    needs_hooks,
)
from levelhead.sites.sites import AttentionSite
from levelhead.sites.timm_host_channels import attend_over_channels
from levelhead.variants import make_parts, parse_variant

PROBE_TOKENS = 17
WIDE = (torch.float32, torch.float64)
Hidden = tuple[Tensor, Tensor, Tensor]
"""Inputs of the projections of q, k and v."""
OVER_CHANNELS = ("cross_covariance", "channel")
"""Kinds whose queries and keys are the channels of a head."""


@torch.no_grad()
def moved_by(site: AttentionSite, installed: Installed, factor: float) -> float:
    """Compare an attention with the host's on random hidden states of unit variance.

    The hidden states go through the layer's own projections and norms; positions (rotation, bias)
    and windows are left out, a causal mask is not. In float32 or wider. Where the host's maths is
    no inner attention (landmarks), a copy of its module runs both.

    Args:
        site: Where.
        installed: What will run there; never changed.
        factor: What the output is multiplied by, for a host that makes up for a neutral start.

    Returns:
        ``||after - before|| / ||before||`` of the attention's output.
    """
    if site.kind == "landmark":
        before, after = _by_the_host(site, installed)
        return _relative(after * factor - before, before)
    is_wide = site.layout.q.weight.parameter.dtype in WIDE
    with _evaluating(installed if is_wide else _copied(installed).float()) as after:
        hidden = _hidden_states(site)
        rows = {which: _project(site, which, hidden) for which in WHICH}
        before = _attend(site, _plain(site, after), rows, hidden)
        if after.variant.has_projections:
            rows = {w: _project(site, w, hidden, after.projections) for w in WHICH}
        new = _attend(site, after.inner, rows, hidden, after.early_norm) * factor
        difference, before = _merge(site, new - before), _merge(site, before)
    return _relative(difference, before)


def _relative(difference: Tensor, before: Tensor) -> float:
    return float(difference.norm() / before.norm().clamp_min(torch.finfo(before.dtype).tiny))


def _by_the_host(site: AttentionSite, installed: Installed) -> tuple[Tensor, Tensor]:
    """Run a copy of the host's module, stock and converted."""
    twin = copy.deepcopy(site.module).eval()
    twin = twin if site.layout.q.weight.parameter.dtype in WIDE else twin.float()
    copied = _copied(installed).to(next(twin.parameters()).dtype).eval()
    (there,) = find_attention(twin)
    host = host_of(there)
    assert host is not None
    hidden = _hidden_states(site, host.probe_tokens(site) or PROBE_TOKENS)[0]
    before = twin(hidden)[0]
    host.install(there, copied)
    if needs_hooks(copied):
        add_hooks(there, copied)
    return before, twin(hidden)[0]


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


def _hidden_states(site: AttentionSite, num_tokens: int = PROBE_TOKENS) -> Hidden:
    """What queries, keys and values are made of."""
    like, generator = _wide(site.layout.q.weight.parameter), torch.Generator().manual_seed(0)

    def draw(length: int, width: int) -> Tensor:
        return torch.randn(1, length, width, generator=generator).to(like.device, like.dtype)

    query_side = draw(num_tokens, site.embed_dim)
    if site.kind == "class":
        return query_side[:, :1], query_side, query_side
    key_side = query_side
    if site.kv_embed_dim != site.embed_dim or site.kind == "cross":
        key_side = draw(PROBE_TOKENS, site.kv_embed_dim)
    if site.v_embed_dim == site.kv_embed_dim:
        return query_side, key_side, key_side
    return query_side, key_side, draw(key_side.shape[1], site.v_embed_dim)


_AS_THEY_ARE = Projections()


def _project(
    site: AttentionSite,
    which: str,
    hidden: Hidden,
    part: Projections = _AS_THEY_ARE,
) -> Tensor:
    projection: Projection = getattr(site.layout, which)
    weight, bias = _wide(logical_weight(projection)), logical_bias(projection)
    bias = None if bias is None else _wide(bias)
    projected = part.project(which, hidden[WHICH.index(which)], weight, bias)
    heads = site.num_heads if which == "q" else site.num_kv_heads
    return projected.unflatten(-1, (heads, -1)).transpose(1, 2)


def _attend(
    site: AttentionSite,
    inner: InnerAttention,
    rows: dict[str, Tensor],
    hidden: Hidden,
    early_norm: DotProduct | None = None,
) -> Tensor:
    query, key = _host_norms(site, rows["q"], rows["k"])
    if early_norm is not None:
        query, key = early_norm.prepare(query, key)
    if site.head_scale is not None:
        query = query * site.head_scale().to(query.dtype)
    if site.kind in OVER_CHANNELS:
        return attend_over_channels(inner, query, key, rows["v"], hidden[0])
    return inner(query, key, rows["v"], hidden[0], is_causal=site.is_causal)


def _merge(site: AttentionSite, attn_output: Tensor) -> Tensor:
    """Through the output projection, without its bias, which no variant moves."""
    merged = attn_output.transpose(1, 2).flatten(2)
    o = site.layout.o
    return merged if o is None else merged @ _wide(logical_weight(o)).mT


def _host_norms(site: AttentionSite, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    if site.is_cosine:
        axis = -2 if site.kind in OVER_CHANNELS else -1
        query, key = (nn.functional.normalize(rows, dim=axis) for rows in (query, key))
    return _normed(site, site.q_norm, query), _normed(site, site.k_norm, key)


def _normed(site: AttentionSite, norm: nn.Module | None, rows: Tensor) -> Tensor:
    if norm is None:
        return rows
    wide = copy.deepcopy(norm).to(rows.dtype)
    if not site.norm_spans_heads:
        return wide(rows)
    by_token = rows.transpose(1, 2)
    if getattr(norm, "weight").ndim == 2:  # noqa: B009  gains for each head
        return wide(by_token).transpose(1, 2)
    return wide(by_token.flatten(2)).unflatten(-1, (rows.shape[1], -1)).transpose(1, 2)

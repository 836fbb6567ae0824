"""Which kernel a converted attention runs on, in evaluation and while training."""

import torch

from levelhead.capped import fits_capped_attention
from levelhead.compiled import find_compiler
from levelhead.convert_probe import OVER_CHANNELS
from levelhead.kernels import attention_backend, find_lse_kernel
from levelhead.parts.normalisers import OffByOne
from levelhead.sites.host import Installed
from levelhead.sites.sites import AttentionSite
from levelhead.sites.timm_host_class import mixes_tokens_first
from levelhead.stages.masks import AttentionMask
from levelhead.stages.score_matrix import is_smaller_than_queries

TOKENS = 128
PLAIN = ("math", "plain")
"""Kernels that build the T x S matrix."""
_ONE_QUERY = "plain, for one query, before the value projection"
_BLOCKS = "plain, over blocks of queries"


def kernel_in_words(site: AttentionSite, installed: Installed) -> str:
    """Name the kernel for the sizes, dtype and device of a site, without a mask.

    Args:
        site: Where.
        installed: What will run there.

    Returns:
        For example "flash", or "flash; while training math (dropout_p=0.1 on cpu), which builds
        the T x S matrix".
    """
    if site.kind == "landmark":
        return "the host's own, through landmarks"
    if site.kind == "class" and mixes_tokens_first(site.module, installed):
        return _ONE_QUERY
    if installed.inner.cap is not None:
        return _capped(site, installed.inner.cap.soft_cap)
    evaluating, training = (_name(site, installed, p) for p in (0.0, site.dropout_p))
    why = f"dropout_p={site.dropout_p:g}"
    device = site.layout.q.weight.parameter.device.type
    if site.has_position_bias and device == "cpu":
        training, why = "plain", "a position bias that learns"
    words = evaluating
    if training != evaluating:
        words += f"; while training {training} ({why} on {device})"
    builds_scores = evaluating.startswith(PLAIN) or training.startswith(PLAIN)
    return f"{words}, which builds the T x S matrix" if builds_scores else words


def _capped(site: AttentionSite, soft_cap: float) -> str:
    weight = site.layout.q.weight.parameter
    query = weight.new_empty(1, 1, 1, 1)
    if not fits_capped_attention(query, AttentionMask(1, 1, query.device), 0.0, soft_cap):
        return f"{_BLOCKS} (soft cap)"
    words = "tiles of scores (soft cap)"
    if site.has_position_bias:
        return f"{words}; while training {_BLOCKS} (a position bias that learns)"
    if weight.dtype == torch.float32 and find_compiler() is not None:
        words = f"compiled {words}"
    if site.dropout_p > 0:
        return f"{words}; while training {_BLOCKS} (dropout_p={site.dropout_p:g})"
    return words


def _name(site: AttentionSite, installed: Installed, dropout_p: float) -> str:
    weight = site.layout.q.weight.parameter
    rows, width, value_width = TOKENS, site.head_dim, site.v_head_dim
    if site.kind in OVER_CHANNELS:
        rows, width, value_width = site.head_dim, TOKENS, TOKENS
    query, key, value = (
        torch.empty(1, heads, rows, columns, dtype=weight.dtype, device=weight.device)
        for heads, columns in (
            (site.num_heads, width),
            (site.num_kv_heads, width),
            (site.num_kv_heads, value_width),
        )
    )
    if site.kind in OVER_CHANNELS and is_smaller_than_queries(query, key):
        return "plain"
    is_causal = site.is_causal and site.kind != "cross"
    backend = attention_backend(query, key, value, None, is_causal, dropout_p)
    if not isinstance(installed.inner.normaliser, OffByOne):
        return backend
    if dropout_p == 0 and find_lse_kernel(query, key, value, has_mask=False) is not None:
        return "flash, with its log-sum-exp"
    return f"{backend} with an extra key"

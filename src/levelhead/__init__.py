"""Stable, well-conditioned, visible attention for Transformers in PyTorch."""

from levelhead.attention import Attention, InnerAttention
from levelhead.capture import capture
from levelhead.init.report import InitReport
from levelhead.init.table import initializers
from levelhead.initialize import initialize_
from levelhead.reference import reference_attention
from levelhead.sites.find import find_attention
from levelhead.stages.masks import causal_mask, sliding_window_mask
from levelhead.steps import track_steps
from levelhead.variants import parse_variant, variants

__all__ = [
    "Attention",
    "InitReport",
    "InnerAttention",
    "capture",
    "causal_mask",
    "find_attention",
    "initialize_",
    "initializers",
    "parse_variant",
    "reference_attention",
    "sliding_window_mask",
    "track_steps",
    "variants",
]

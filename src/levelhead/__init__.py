"""Stable, well-conditioned, visible attention for Transformers in PyTorch."""

from levelhead import init, measure
from levelhead.attention import Attention
from levelhead.capture import capture
from levelhead.clip import clip_qk_
from levelhead.convert import convert, restore
from levelhead.convert_groups import no_weight_decay, parameter_groups
from levelhead.convert_merge import Merge, merge_
from levelhead.convert_report import Conversion
from levelhead.diagnose import diagnose
from levelhead.diagnosis import Diagnosis
from levelhead.init.report import InitReport
from levelhead.init.table import initializers
from levelhead.initialize import initialize_
from levelhead.inner import InnerAttention
from levelhead.monitor import Monitor
from levelhead.reference import reference_attention
from levelhead.register import register
from levelhead.sites.combining import combinations
from levelhead.sites.find import find_attention
from levelhead.stages.masks import causal_mask, sliding_window_mask
from levelhead.steps import track_steps
from levelhead.store import from_pretrained, load, save
from levelhead.variants import parse_variant, variants
from levelhead.verify import verify
from levelhead.verify_report import Verification, VerificationError

__all__ = [
    "Attention",
    "Conversion",
    "Diagnosis",
    "InitReport",
    "InnerAttention",
    "Merge",
    "Monitor",
    "Verification",
    "VerificationError",
    "capture",
    "causal_mask",
    "clip_qk_",
    "combinations",
    "convert",
    "diagnose",
    "find_attention",
    "from_pretrained",
    "init",
    "initialize_",
    "initializers",
    "load",
    "measure",
    "merge_",
    "no_weight_decay",
    "parameter_groups",
    "parse_variant",
    "reference_attention",
    "register",
    "restore",
    "save",
    "sliding_window_mask",
    "track_steps",
    "variants",
    "verify",
]

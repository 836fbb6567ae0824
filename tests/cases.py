"""The inputs that many tests share: variants, masks, prime sizes."""

import itertools

import torch

from levelhead.stages.masks import sliding_window_mask
from levelhead.variants import SLOTS, VARIANTS

# All different, all prime; GQA groups two query heads per key head where a test asks for it.
BATCH, NUM_QUERIES, NUM_KEYS, HEAD_DIM, EMBED_DIM = 2, 7, 11, 5, 13

REQUIRED = {"soft_cap": "soft_cap(cap=1.7)"}
"""Terms whose option has no default."""

OPTIONS = [
    "affine(count='keys')",
    "affine(moving_average='per_layer', phi='sigmoid')",
    "affine(warm_start=True, rho=0.5)",
    "gate(granularity='headwise')",
    "gate(bias=True)",
    "precondition(detach=True)",
    "sink(start=-1.5)",
    "spectral(strength=0.5)",
    "spectral(layout='per_head', strength=0.5)",
    "spectral(form='svd')",
    "spectral(form='svd', layout='per_head')",
]


def written(name: str) -> str:
    """Return a term with the options it must have."""
    return REQUIRED.get(name, name)


def all_terms() -> list[str]:
    """Return every term of the table, ready to parse."""
    return [written(name) for name in VARIANTS]


def inner_terms() -> list[str]:
    """Return every term an inner attention can take."""
    return [written(name) for name, info in VARIANTS.items() if info.stage != "projections"]


def is_refused(first: str, second: str) -> bool:
    """Whether the design refuses a pair: one slot, or a sink that precondition cancels."""
    infos = [VARIANTS[name] for name in (first, second)]
    if infos[0].slot == infos[1].slot:
        return True
    return {info.name for info in infos} in (
        {"precondition", "sink"},
        {"precondition", "off_by_one"},
    )


def legal_pairs() -> list[str]:
    """Return every pair of different terms that may be combined, "softmax" left out."""
    names = [name for name in VARIANTS if name != "softmax"]
    return [
        f"{written(a)} + {written(b)}"
        for a, b in itertools.combinations(names, 2)
        if not is_refused(a, b)
    ]


def refused_pairs() -> list[tuple[str, str]]:
    """Return every pair of different terms that the design refuses."""
    return [(a, b) for a, b in itertools.combinations(VARIANTS, 2) if is_refused(a, b)]


def full_house() -> str:
    """Return a variant with a term in as many slots as may be filled at once."""
    chosen: dict[str, str] = {}
    for name, info in VARIANTS.items():
        if name not in ("softmax", "precondition"):
            chosen.setdefault(info.slot, written(name))
    return " + ".join(chosen[slot] for slot in SLOTS if slot in chosen)


def masks(num_queries: int, num_keys: int, batch: int = BATCH, num_heads: int = 6) -> dict:
    """Return keyword arguments of every kind of visibility, empty rows included."""
    generator = torch.Generator().manual_seed(11)

    def coin(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator) > 0.4

    padding = torch.ones(batch, 1, 1, num_keys, dtype=torch.bool)
    padding[0, ..., max(num_keys - 3, 0) :] = False
    left_padding = padding.flip(-1)
    dense = coin(batch, num_heads, num_queries, num_keys)
    dense[0, -1, num_queries // 2] = False
    shared = coin(1, 1, num_queries, num_keys)
    shared[..., num_queries // 2, :] = False
    bias = torch.randn(1, num_heads, num_queries, num_keys, generator=generator)
    lowest = torch.finfo(bias.dtype).min
    found = {
        "everything": {},
        "padding": {"attn_mask": padding},
        "dense": {"attn_mask": dense},
        "two_axes": {"attn_mask": shared[0, 0]},
        "bias": {"attn_bias": bias},
        "bias_and_mask": {"attn_bias": bias, "attn_mask": shared},
        "bias_minimum": {"attn_bias": bias.masked_fill(~dense[:1], lowest)},
        "bias_padding": {"attn_bias": torch.zeros(padding.shape).masked_fill(~padding, lowest)},
    }
    if num_queries <= num_keys:
        found |= {
            "causal": {"is_causal": True},
            "window": {"attn_mask": sliding_window_mask(num_queries, num_keys, 3)},
            "causal_padding": {"attn_mask": left_padding, "is_causal": True},
            "causal_dense": {"attn_mask": dense, "is_causal": True},
            "causal_bias": {"attn_bias": bias, "is_causal": True},
        }
    return found

"""Sensitivity against a sort, concentration against the attention itself: time and memory."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from levelhead.bench.timing import compare_times, peak_extra_bytes, ratios
from levelhead.measure.concentration import concentration
from levelhead.measure.sensitivity import sensitivity
from levelhead.measure.streaming import DEFAULT_QUERIES, AttentionScores

NUM_HEADS, HEAD_DIM = 12, 64
# What the figures must stay below; rows of nearly equal weights are as hard as uniform ones.
SORT_BAR, UNIFORM_SORT_BAR = 1.2, 6.0
NEARLY_UNIFORM_STD = 0.1
SOFTMAX_BAR, SAMPLE_BAR, MEMORY_BAR = 1.5, 0.1, 0.1
_WIDTH_BAR = 1e-6
_MOST_HARD_KEYS = 999  # equal weights of 1e-3 and less need no sorting


def sensitivity_rows(num_rows: int, num_keys: int, device: str) -> dict[str, Tensor]:
    """Return softmax rows of the kinds that occur, float32.

    Args:
        num_rows: Rows of each kind.
        num_keys: Keys of each row; a causal row sees 1 .. ``num_keys`` of them.
        device: Where to put them.

    Returns:
        Name to ``[num_rows, num_keys]``.
    """
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(num_rows, num_keys, generator=generator).to(device)
    rows = torch.arange(num_rows, device=device)[:, None]
    later = torch.arange(num_keys, device=device) > rows % num_keys
    kinds = {f"std {std}": (std * scores).softmax(-1) for std in (1, 2, 4)}
    for std in (1, 4, NEARLY_UNIFORM_STD):
        kind = "causal, nearly uniform" if std == NEARLY_UNIFORM_STD else "causal"
        kinds[f"{kind}, std {std}"] = (std * scores).masked_fill(later, -torch.inf).softmax(-1)
    kinds["uniform"] = torch.full_like(scores, 1 / num_keys)
    kinds["causal, uniform"] = (0 * scores).masked_fill(later, -torch.inf).softmax(-1)
    num_odd = (min(num_keys, _MOST_HARD_KEYS) - 1) // 2 * 2 + 1
    beyond = torch.arange(num_keys, device=device) >= num_odd
    kinds["uniform, odd"] = (0 * scores).masked_fill(beyond, -torch.inf).softmax(-1)
    return kinds


def measure_sensitivity(num_rows: int, num_keys: int, repeats: int, device: str) -> list[dict]:
    """Time ``sensitivity`` against ``torch.sort`` of the same tensor.

    Args:
        num_rows: Rows of each kind.
        num_keys: Keys of each row.
        repeats: Rounds.
        device: Where to run.

    Returns:
        A record for each kind of row: the ratio, its bar, the largest width of the bounds.
    """
    records = []
    for kind, rows in sensitivity_rows(num_rows, num_keys, device).items():
        calls: dict[str, Callable[[], object]] = {
            "torch.sort": lambda rows=rows: torch.sort(rows),
            "sensitivity": lambda rows=rows: sensitivity(rows),
        }
        found = ratios(compare_times(calls, repeats), "torch.sort")
        bounds = sensitivity(rows)
        width = (bounds.upper - bounds.lower).max().item()
        bar = UNIFORM_SORT_BAR if "uniform" in kind else SORT_BAR
        name = f"sensitivity / torch.sort, {kind}"
        records.append(record(name, found["sensitivity"], bar, largest_width=width))
        records[-1]["holds"] &= width <= _WIDTH_BAR
    return records


def measure_concentration(num_tokens: int, repeats: int, device: str) -> list[dict]:
    """Time ``concentration`` (all measures) against the attention it looks at, and its memory.

    Args:
        num_tokens: T = S.
        repeats: Rounds.
        device: Where to run.

    Returns:
        Records: all queries against the plain softmax, head by head; the default sample against
        fused attention; extra memory against one T x S float32 matrix.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (3, 1, NUM_HEADS, num_tokens, HEAD_DIM)
    query, key, value = torch.randn(shape, generator=generator).to(device)
    scores = AttentionScores(query, key)
    causal = AttentionScores(query, key, is_causal=True)

    def plain() -> None:
        for head in range(NUM_HEADS):
            (query[:, head] @ key[:, head].mT * HEAD_DIM**-0.5).softmax(-1)

    def all_queries() -> object:
        return concentration(scores, num_queries=None)

    records = []
    found = ratios(compare_times({"plain": plain, "all": all_queries}, repeats), "plain")
    records.append(record("concentration, all queries / softmax", found["all"], SOFTMAX_BAR))
    for name, which, is_causal in (("", scores, False), ("causal, ", causal, True)):
        calls: dict[str, Callable[[], object]] = {
            "fused": lambda is_causal=is_causal: F.scaled_dot_product_attention(
                query, key, value, is_causal=is_causal
            ),
            "sample": lambda which=which: concentration(which),
        }
        found = ratios(compare_times(calls, repeats), "fused")["sample"]
        name = f"concentration, {name}{DEFAULT_QUERIES} queries / fused attention"
        records.append(record(name, found, SAMPLE_BAR))
    matrix = num_tokens**2 * torch.finfo(torch.float32).bits // 8
    for name, which in (("", scores), ("causal, ", causal)):
        peak = peak_extra_bytes(lambda which=which: concentration(which), device)
        ratio = {"ratio": peak / matrix, "peak_mib": peak / 2**20}
        name = f"concentration, {name}extra memory / one T x S matrix"
        records.append(record(name, ratio, MEMORY_BAR))
    return records


def record(name: str, found: dict[str, float], bar: float, **more: float) -> dict:
    """Put a figure beside its bar.

    Args:
        name: What was measured.
        found: ``ratio`` and what belongs to it.
        bar: What the ratio must not exceed.
        more: Further numbers to keep.

    Returns:
        All of it, with the verdict ``holds``.
    """
    return {"name": name, "bar": bar, "holds": found["ratio"] <= bar, **found, **more}

"""Certified theta of every attention layer, as a number among the others of an evaluation."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from levelhead.capture import capture
from levelhead.diagnose_calls import scores_of
from levelhead.measure.attention_rows import attention_sensitivity
from levelhead.measure.concentration import concentration
from levelhead.sites.calls import AttentionCall
from levelhead.sites.find import find_attention

DOMINANT = 0.5  # from here on one key holds the row, and theta is 4 p (1 - p) exactly


@torch.no_grad()
def theta_by_layer(
    model: nn.Module, run: Callable[[], object], batch_size: int, num_rows: int
) -> dict[str, float]:
    """Measure how sensitive the softmax of each layer is to its scores.

    The lower bound of each row is certified: theta is at least that.

    Args:
        model: In the mode to be measured.
        run: Calls it once.
        batch_size: Samples in that call.
        num_rows: Rows looked at in each layer, over samples, heads and evenly spaced queries.

    Returns:
        ``theta_median_layer_00`` and so on, in [0, 1]; ``theta_median`` and
        ``theta_above_0.9_pct`` over all rows; ``dominant_pct``, the share of rows in which one
        key holds half of the weight or more.

    Source: Emadi 2026, arXiv 2602.18849.
    """
    sites = find_attention(model)
    theta: dict[str, Tensor] = {}
    largest: list[Tensor] = []

    def measure(call: AttentionCall) -> None:
        scores = scores_of(call)
        num_queries = max(1, num_rows // (batch_size * scores.num_heads))
        bounds, _ = attention_sensitivity(scores, num_queries=num_queries)
        theta[call.site.name] = bounds.lower[~bounds.is_empty].flatten().cpu()
        found = concentration(scores, ("p_max",), num_queries=num_queries)
        largest.append(found.rows["p_max"].flatten().double().cpu())

    with capture(model, measure, sites=sites):
        run()
    rows, p_max = torch.cat(list(theta.values())), torch.cat(largest)
    layers = {
        f"theta_median_layer_{number:02d}": theta[site.name].median().item()
        for number, site in enumerate(sites)
        if site.name in theta
    }
    return layers | {
        "theta_median": rows.median().item(),
        "theta_above_0.9_pct": 100 * (rows > 0.9).double().mean().item(),  # noqa: PLR2004
        "dominant_pct": 100 * (p_max >= DOMINANT).double().mean().item(),
    }

"""What one batch shows of a model's attention: the spread of the scores and the entropy."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from levelhead.capture import capture
from levelhead.measure.concentration import concentration
from levelhead.sites.calls import AttentionCall
from levelhead.sites.sites import AttentionSite

QUANTITIES = ("score_std", "entropy_nats")

SiteEffects = dict[str, dict[str, float]]


@torch.no_grad()
def attention_effects(model: nn.Module, batch: Any, sites: Sequence[AttentionSite]) -> SiteEffects:
    """Run a model once and measure the rows of each of its attentions.

    The model runs in evaluation mode, so that nothing in it moves, and comes back in its own.

    Args:
        model: The model.
        batch: One batch: a mapping of keyword arguments, a tuple of positional ones, or the one
            argument.
        sites: Some of ``find_attention(model)``.

    Returns:
        For each site that ran, ``score_std`` (standard deviation of a row's visible scores) and
        ``entropy_nats``, averaged over rows, heads and calls.
    """
    found: dict[str, list[dict[str, float]]] = {site.name: [] for site in sites}
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with capture(
            model, lambda call: found[call.site.name].append(_row_means(call)), sites=sites
        ):
            _run(model, batch)
    finally:
        for module, mode in training.items():
            module.training = mode
    return {name: _average(calls) for name, calls in found.items() if calls}


def _row_means(call: AttentionCall) -> dict[str, float]:
    rows = concentration(call.scores(), QUANTITIES)
    return {name: float(rows.mean(name).nanmean()) for name in QUANTITIES}


def _average(calls: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(call[name] for call in calls) / len(calls) for name in QUANTITIES}


def _run(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, tuple | list):
        model(*batch)
    else:
        model(batch)

"""Where a converted attention starts: at the host's function where that is possible."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from levelhead.parts.normalisers import Sink
from levelhead.shapes import require
from levelhead.sites.host import Installed, installed_in
from levelhead.sites.layout import Stored
from levelhead.sites.sites import AttentionSite
from levelhead.variants import VARIANTS

STARTS = ("preserve", "paper")
SINK_START = -4.0
"""A sink of score -4 takes under .2 % of a row of ten keys with score 0, and still gets a
gradient in proportion."""
NEUTRAL_ALPHA = 0.5
"""alpha at ``W_a = 0``, for both phi; also its running mean, so that beta is zero."""
NEUTRAL_GATE = 0.5
"""A gate at ``W_g = 0``."""


@dataclass(frozen=True)
class Start:
    """How a site starts.

    Attributes:
        factor: What a projection of the host is multiplied by; a power of two, so that undoing it
            is exact.
        factor_on: "o" (weight), "v" (weight and bias) or "" for none.
        note: The same in words.
    """

    factor: float = 1.0
    factor_on: str = ""
    note: str = ""


@torch.no_grad()
def preserve(site: AttentionSite, installed: Installed) -> Start:
    """Set an attention that was built to the host's function, as far as its terms can.

    Affine: ``W_a = 0`` and a running mean of one half give half of softmax; a gate with
    ``W_g = 0`` is one half; a projection of the host makes up for both. sigma_reparam starts at
    the host's function by itself. A sink starts at ``SINK_START`` unless the term says where.
    The host is not touched.

    Args:
        site: Where.
        installed: What was built for it.

    Returns:
        What has to be done to the host's projections.
    """
    inner, factor = installed.inner, 1.0
    if isinstance(inner.normaliser, Sink):
        _start_sink(installed, inner.normaliser)
    if inner.weights is not None:
        nn.init.zeros_(inner.weights.alpha_proj.weight)
        inner.weights.set_state("alpha_mean", NEUTRAL_ALPHA)
        inner.weights.set_state("num_steps", 1)
        # Rows of norm one forget any factor they had before.
        factor /= NEUTRAL_ALPHA if inner.precondition is None else 1.0
    if inner.gate is not None:
        for parameter in inner.gate.parameters():
            nn.init.zeros_(parameter)
        factor /= NEUTRAL_GATE
    return Start() if factor == 1.0 else _place(site, installed, factor)


def _start_sink(installed: Installed, sink: Sink) -> None:
    term = installed.variant.slot("normaliser")
    if term is not None and VARIANTS[term.name].options.keys() - term.options.keys():
        sink.start = SINK_START
        sink.reset_parameters()


def _place(site: AttentionSite, installed: Installed, factor: float) -> Start:
    """The output projection, where it reads the heads' outputs as they are; else the values."""
    if site.layout.o is not None and site.output_norm is None:
        return Start(factor, "o", f"the output projection was multiplied by {factor:g}")
    if installed.inner.precondition is None and not installed.variant.has_projections:
        return Start(factor, "v", f"the value projection was multiplied by {factor:g}")
    why = "no projection of the host can make up for"
    return Start(note=f"{why} a factor of {1 / factor:g} in the output")


def factored(site: AttentionSite, place: str) -> list[Stored]:
    """Return what a factor multiplies.

    Args:
        site: Where.
        place: "o", "v" or "".

    Returns:
        The weight of o, or weight and bias of v, or nothing.
    """
    projection = {"o": site.layout.o, "v": site.layout.v, "": None}[place]
    if projection is None:
        return []
    bias = projection.bias if place == "v" else None
    return [projection.weight] if bias is None else [projection.weight, bias]


@torch.no_grad()
def multiply(stored: list[Stored], factor: float) -> None:
    """Multiply in place; a power of two is exact in every floating-point dtype.

    Args:
        stored: What.
        factor: By what.

    Raises:
        ValueError: A weight would leave the range of its dtype (nothing is changed then).
    """
    for each in stored:
        largest = each.parameter.abs().max() * factor
        require(
            bool(largest.isfinite()),
            "a projection that makes up for a neutral gate or alpha must stay finite",
            f"{type(each.owner).__name__}.{each.name} times {factor:g} in {largest.dtype}",
            "start='paper', or a wider dtype",
        )
    for each in stored:
        rows = each.rows(each.parameter)
        rows.mul_(factor)


@contextmanager
def without_factor(site: AttentionSite) -> Iterator[None]:
    """Divide a factor that makes up for a neutral start out of the host, and put it back.

    What is read or written meanwhile is what the host computes with, so that it may as well
    have been written before the conversion.

    Args:
        site: Converted or not.
    """
    installed = installed_in(site.module)
    if installed is None or not installed.factor_on:
        yield
        return
    stored = factored(site, installed.factor_on)
    multiply(stored, 1 / installed.factor)
    try:
        yield
    finally:
        multiply(stored, installed.factor)

"""What a check works with, and how outputs are compared."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from levelhead.capture import capture
from levelhead.convert import restore
from levelhead.sites.calls import AttentionCall
from levelhead.sites.find import find_attention
from levelhead.sites.host import Installed, installed_in
from levelhead.sites.sites import AttentionSite
from levelhead.verify_batch import run, tensors_in

TOLERANCE = {
    torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2,
}  # fmt: skip
"""Largest difference of two right answers, relative to the largest value."""
STILL = {
    torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3,
}  # fmt: skip
"""Largest difference, likewise, that counts as "did not move"."""
UNSEEN = STILL | {torch.bfloat16: 1e-5, torch.float16: 1e-5}
"""The same where the question is whether anything arrives at all: in half precision what does may
move only a few bits, and what does not moves none."""


@dataclass
class Subject:
    """What is checked.

    Attributes:
        model: The converted model, in evaluation mode.
        batch: One batch for it.
        sites: Its converted attentions.
        is_causal: Whether the future must be hidden; None to take the word of the sites, or what
            their calls show.
        options: ``readers`` and ``ignore`` of ``find_attention``.
        stock: A copy that runs its own attention again.
    """

    model: nn.Module
    batch: Any
    sites: list[AttentionSite]
    is_causal: bool | None
    options: dict[str, Any] = field(default_factory=dict)
    stock: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        self.stock = copy.deepcopy(self.model)
        restore(self.stock, **self.options)

    def parts(self) -> Iterator[tuple[AttentionSite, Installed]]:
        """Yield every converted attention with what it runs."""
        for site in self.sites:
            installed = installed_in(site.module)
            assert installed is not None
            yield site, installed

    @property
    def hides_the_future(self) -> bool:
        """Whether no output may depend on a later token."""
        if self.is_causal is not None:
            return self.is_causal
        own = [site for site in self.sites if site.kind == "self"]
        return bool(own) and (all(site.is_causal for site in own) or self._calls_hide_the_future)

    @cached_property
    def _calls_hide_the_future(self) -> bool:
        """Whether stock's self-attention forbids the future in every call, by whatever mask.

        Where that is decided by each call (``levelhead.Attention``, torch's modules), no site can
        know it.
        """
        names = {site.name for site in self.sites if site.kind == "self"}
        found = find_attention(self.stock, **self.options)
        hidden: list[bool] = []
        try:
            with capture(
                self.stock,
                lambda call: hidden.append(_hides_the_future(call)),
                sites=[site for site in found if site.name in names],
            ):
                run(self.stock, self.batch)
        except ValueError:  # a call that cannot be seen proves nothing
            return False
        return bool(hidden) and all(hidden)


def _hides_the_future(call: AttentionCall) -> bool:
    visible = call.mask().visible()
    if visible is None or call.query.shape[2] != call.key.shape[2]:
        return False
    whole = visible.expand(*visible.shape[:2], call.query.shape[2], call.key.shape[2])
    return not bool(whole.triu(1).any())


def distance(found: Any, expected: Any) -> tuple[float, torch.dtype]:
    """Return the largest difference of two outputs, relative to the largest value expected.

    Args:
        found: Tensors, in any nesting.
        expected: The same.

    Returns:
        The difference (inf where it is NaN or shapes differ), and the narrowest dtype.
    """
    worst, dtype = 0.0, torch.float64
    pairs = list(zip(tensors_in(found), tensors_in(expected), strict=True))
    for one, other in pairs:
        if one.shape != other.shape:
            return float("inf"), other.dtype
        scale = other.abs().max().clamp_min(torch.finfo(other.dtype).tiny).double()
        difference = float(((one.double() - other.double()).abs().max() / scale).item())
        worst = max(worst, difference if difference == difference else float("inf"))
        dtype = min(dtype, other.dtype, key=lambda d: torch.finfo(d).bits)
    return worst, dtype

"""What a check works with, and how outputs are compared."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from levelhead.convert import restore
from levelhead.sites.host import Installed, installed_in
from levelhead.sites.sites import AttentionSite
from levelhead.verify_batch import tensors_in

TOLERANCE = {
    torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2,
}  # fmt: skip
"""Largest difference of two right answers, relative to the largest value."""
STILL = {
    torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3,
}  # fmt: skip
"""Largest difference, likewise, that counts as "did not move"."""


@dataclass
class Subject:
    """What is checked.

    Attributes:
        model: The converted model, in evaluation mode.
        batch: One batch for it.
        sites: Its converted attentions.
        is_causal: Whether the future must be hidden; None to take the sites' word.
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
        return bool(own) and all(site.is_causal for site in own)


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

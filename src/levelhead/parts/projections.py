"""Parts on the projections of queries, keys and values."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from levelhead.parts.base import AttentionShape, Part
from levelhead.shapes import at_least_float32, require, require_known, without_autocast
from levelhead.stages.projections import (
    add_identity,
    add_identity_per_head,
    leading_pair,
    power_iteration,
    spectral_correction,
)
from levelhead.steps import StepState

SPECTRAL_STRENGTH = 10.0
"""lambda of Saratchandran & Lucey 2025."""
WHICH = ("q", "k", "v")


class Projections(Part):
    """Projections as they are."""

    derived = True

    def project(
        self, which: str, hidden_states: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Return the projection of the hidden states.

        Args:
            which: "q", "k" or "v".
            hidden_states: ``[..., E]``.
            weight: As torch stores it, ``[H D, E]``.
            bias: ``[H D]`` or None.

        Returns:
            ``[..., H D]``.
        """
        return self.adjust(
            which, F.linear(hidden_states, weight, bias), hidden_states, weight, bias
        )

    def adjust(
        self,
        which: str,
        projected: Tensor,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        """Return what ``project`` would, given the plain projection a host has computed.

        Args:
            which: "q", "k" or "v".
            projected: ``hidden_states @ weight^T + bias``.
            hidden_states: ``[..., E]``.
            weight: As torch stores it, ``[H D, E]``.
            bias: ``[H D]`` or None.

        Returns:
            ``[..., H D]``.
        """
        return projected

    def derive(self, weights: dict[str, Tensor]) -> None:
        """Take from the initial weights what the part keeps of them.

        Args:
            weights: "q", "k", "v" to weights as torch stores them.
        """

    def ensure_derived(self, weights: dict[str, Tensor]) -> None:
        """Derive unless it was done, or loaded, since the last reset.

        Args:
            weights: As for ``derive``.
        """


class DerivedProjections(Projections):
    """Projections that keep something of the weights they start from.

    A reset may come before or after that of the weights (meta device, any order), so it only
    marks the part; the next forward derives.
    """

    def __init__(self):
        super().__init__()
        self.derived = False

    def reset_parameters(self) -> None:
        self.derived = False

    def ensure_derived(self, weights: dict[str, Tensor]) -> None:
        if not self.derived:
            self.derive(weights)
            self.derived = True

    def _load_from_state_dict(self, state_dict, prefix, *args):
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.derived = self.derived or any(key.startswith(prefix) for key in state_dict)


class SpectralIdentity(Projections):
    """W + strength * I, never materialised."""

    def __init__(self, strength: float, num_heads: dict[str, int] | None):
        super().__init__()
        self.strength, self.num_heads = float(strength), num_heads

    def adjust(
        self,
        which: str,
        projected: Tensor,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        if self.num_heads is None:
            return add_identity(projected, hidden_states, self.strength)
        return add_identity_per_head(
            projected, hidden_states, self.strength, self.num_heads[which]
        )


class SpectralSVD(DerivedProjections):
    """W + U diag(sigma_max) V^T, from the initial weight, fixed."""

    def __init__(self, shape: AttentionShape, num_heads: dict[str, int]):
        super().__init__()
        self.num_heads = num_heads
        for which in WHICH:
            rows = (shape.num_heads if which == "q" else shape.num_kv_heads) * shape.head_dim
            empty = torch.zeros(rows, shape.kv_dim(which), **shape.factory)
            self.register_buffer(f"{which}_correction", empty)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for which in WHICH:
            self.get_buffer(f"{which}_correction").zero_()

    @torch.no_grad()
    def derive(self, weights: dict[str, Tensor]) -> None:
        for which, weight in weights.items():
            blocks = weight.unflatten(0, (self.num_heads[which], -1)).mT
            correction = spectral_correction(blocks).mT.flatten(0, 1)
            self.get_buffer(f"{which}_correction").copy_(correction)

    def project(
        self, which: str, hidden_states: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        correction = self.get_buffer(f"{which}_correction").to(weight.dtype)
        return F.linear(hidden_states, weight + correction, bias)

    def adjust(
        self,
        which: str,
        projected: Tensor,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        correction = self.get_buffer(f"{which}_correction").to(weight.dtype)
        return projected + F.linear(hidden_states, correction)


def spectral(
    shape: AttentionShape,
    strength: float = SPECTRAL_STRENGTH,
    form: str = "identity",
    layout: str = "fused",
) -> Projections:
    """Build the part of spectral conditioning.

    Args:
        shape: The host.
        strength: lambda of the identity form.
        form: "identity" (a fixed multiple of I) or "svd" (from the initial weight).
        layout: "fused" (the whole ``E x (H D)`` matrix) or "per_head" (each head's block).

    Returns:
        The part.

    Raises:
        ValueError: An unknown form or layout, or a strength for the svd form, which has none.
    """
    require_known("spectral form", form, ("identity", "svd"))
    require_known("spectral layout", layout, ("fused", "per_head"))
    per_head = {"q": shape.num_heads, "k": shape.num_kv_heads, "v": shape.num_kv_heads}
    if form == "identity":
        return SpectralIdentity(strength, per_head if layout == "per_head" else None)
    require(
        strength == SPECTRAL_STRENGTH,
        "the svd form of spectral takes its strength from the weight",
        f"strength={strength}",
        "form='svd' without strength",
    )
    return SpectralSVD(shape, per_head if layout == "per_head" else dict.fromkeys(WHICH, 1))


class SigmaReparam(StepState, DerivedProjections):
    """W_eff = (sigma / ||W||_2) W, sigma learned, the norm by one power iteration a step."""

    def __init__(self, shape: AttentionShape):
        super().__init__()
        dtype = at_least_float32(shape.factory.get("dtype") or torch.get_default_dtype())
        device = shape.factory.get("device")
        self.sigma = nn.ParameterDict()
        for which in WHICH:
            rows = (shape.num_heads if which == "q" else shape.num_kv_heads) * shape.head_dim
            columns = shape.kv_dim(which)
            self.sigma[which] = nn.Parameter(torch.ones(1, **shape.factory))
            left = torch.full((rows,), rows**-0.5, dtype=dtype, device=device)
            right = torch.full((columns,), columns**-0.5, dtype=dtype, device=device)
            self.register_state(f"{which}_left", left)
            self.register_state(f"{which}_right", right)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for which in WHICH:
            nn.init.ones_(self.sigma[which])
            for name in (f"{which}_left", f"{which}_right"):
                self.set_state(name, self.get_buffer(name).numel() ** -0.5)

    @torch.no_grad()
    def derive(self, weights: dict[str, Tensor]) -> None:
        for which, weight in weights.items():
            left, right = leading_pair(weight)
            self.set_state(f"{which}_left", left)
            self.set_state(f"{which}_right", right)
            self.sigma[which].copy_(left @ weight.to(left.dtype) @ right)

    def ratio(self, which: str, weight: Tensor) -> Tensor:
        """Return ``sigma / ||W||_2``, moving the singular vectors in a training forward.

        Args:
            which: "q", "k" or "v".
            weight: As torch stores it.

        Returns:
            One number, shape ``[1]``; the gradient reaches sigma and W.
        """
        self.require_tracked()
        left, right = self.get_buffer(f"{which}_left"), self.get_buffer(f"{which}_right")
        if self.training:
            with torch.no_grad():
                before = self.get_buffer(f"{which}_left_before")
                new_left, new_right = power_iteration(weight, before)
                left.copy_(new_left)
                right.copy_(new_right)
            left, right = new_left, new_right
        wide = weight.to(left.dtype)
        with without_autocast(weight.device.type):
            return self.sigma[which] / (left @ wide @ right)

    def project(
        self, which: str, hidden_states: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        projected = F.linear(hidden_states, weight)
        projected = projected * self.ratio(which, weight).to(projected.dtype)
        return projected if bias is None else projected + bias.to(projected.dtype)

    def adjust(
        self,
        which: str,
        projected: Tensor,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ratio = self.ratio(which, weight)
        scaled = projected * ratio.to(projected.dtype)
        return scaled if bias is None else scaled + ((1 - ratio) * bias).to(projected.dtype)

"""The part that scales and shifts attention weights: affine-scaled attention."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from levelhead.kernels_mapped import Mapped, Then
from levelhead.parts.base import AttentionShape, Part
from levelhead.score_tiles import AffineTerms
from levelhead.shapes import at_least_float32, require, require_known
from levelhead.stages.masks import AttentionMask
from levelhead.stages.weights import AffineOutput, affine_output, affine_weights, linear_clipping
from levelhead.steps import StepState
from levelhead.visible import visible_count, visible_mean, visible_sum

PHI = {"linear_clipping": linear_clipping, "sigmoid": torch.sigmoid}
RHO = 0.9
"""Decay of the running mean (Bae et al. 2026)."""


class Affine(StepState, Part):
    """Weights times alpha(x) plus beta(x), whose running mean moves once per step."""

    alpha_mean: Tensor
    alpha_mean_before: Tensor
    num_steps: Tensor
    num_steps_before: Tensor

    def __init__(
        self,
        shape: AttentionShape,
        phi: str = "linear_clipping",
        rho: float = RHO,
        count: str = "visible",
        moving_average: str = "per_head",
        warm_start: bool = False,
    ):
        super().__init__()
        require_known("affine phi", phi, PHI)
        require_known("affine count", count, ("visible", "keys"))
        require_known("affine moving_average", moving_average, ("per_head", "per_layer"))
        require(0 <= rho < 1, "rho must be in [0, 1)", f"rho={rho}")
        self.phi = PHI[phi]
        self.rho, self.counts_visible, self.warm_start = rho, count == "visible", warm_start
        self.alpha_proj = nn.Linear(shape.embed_dim, shape.num_heads, bias=False, **shape.factory)
        self.per_head = moving_average == "per_head"
        size = shape.num_heads if self.per_head else 1
        device = shape.factory.get("device")
        dtype = at_least_float32(self.alpha_proj.weight.dtype)
        self.register_state("alpha_mean", torch.zeros(size, dtype=dtype, device=device))
        self.register_state("num_steps", torch.zeros(1, dtype=torch.long, device=device))
        # Not a buffer: DDP would overwrite every rank's share with that of rank 0.
        self._share = torch.zeros(size + 1, dtype=dtype, device=device)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        share = fn(self._share)
        self._share = share.to(at_least_float32(share.dtype))
        return self

    def reset_parameters(self) -> None:
        self.alpha_proj.reset_parameters()
        self.set_state("alpha_mean", 0.0)
        self.set_state("num_steps", 0)
        self._share.zero_()

    def coefficients(
        self,
        hidden_states: Float[Tensor, "B T E"],
        token_mask: Bool[Tensor, "#B T"] | None,
    ) -> tuple[Float[Tensor, "B H T 1"], Float[Tensor, "#H 1 1"]]:
        """Return alpha and its running mean, which a training forward moves.

            alpha = phi(hidden_states @ W_a)
            mean = rho * mean_before + (1 - rho) * average(alpha)

        Args:
            hidden_states: The input of the attention, query side.
            token_mask: True = a real token; the average leaves the others out. None for all.

        Returns:
            alpha in [0, 1] and the mean used in this forward (no gradient), float32 or wider.
        """
        self.require_tracked()
        logits = self.alpha_proj(hidden_states).mT.unsqueeze(-1)
        alpha = self.phi(logits.to(at_least_float32(logits.dtype)))
        mean = self._move(alpha.detach(), token_mask) if self.training else self.alpha_mean
        return alpha, mean.to(alpha.dtype)[:, None, None]

    @torch.no_grad()
    def _move(self, alpha: Tensor, token_mask: Tensor | None) -> Tensor:
        axes = (0, 2, 3) if self.per_head else (0, 1, 2, 3)
        total, count = self._share[:-1], self._share[-1:]
        if token_mask is None:
            total.copy_(alpha.sum(dim=axes))
            count.fill_(alpha.numel() // total.numel())
        else:
            weight = token_mask[:, None, :, None].to(alpha.dtype).expand_as(alpha)
            total.copy_((weight * alpha).sum(dim=axes))
            count.copy_(weight.sum() / total.numel())
        return self._finish(total, count)

    def _finish(self, total: Tensor, count: Tensor) -> Tensor:
        """Write and return the step's mean, from the sum and count of alpha."""
        before, average = self.alpha_mean_before, total / count.clamp_min(1.0)
        moved = torch.lerp(average, before, self.rho)
        if self.warm_start:
            moved = torch.where(self.num_steps_before > 0, moved, average)
        self.alpha_mean.copy_(torch.where(count > 0, moved, before))
        self.num_steps.copy_(self.num_steps_before + 1)
        return self.alpha_mean.clone()

    def pending(self) -> Tensor:
        return self._share

    def settle(self, total: Tensor) -> None:
        self._finish(total[:-1], total[-1:])

    def terms(self, mask: AttentionMask, alpha: Tensor, mean: Tensor) -> AffineTerms:
        """Return what scales and shifts the weights themselves, where they are at hand."""
        mask = mask.without_finite_bias()
        seen, count = mask.visible(), mask.num_keys
        if seen is not None and self.counts_visible:
            count = visible_count(mask).clamp_min(1)
        return AffineTerms(alpha, (mean - alpha) / count, seen)

    def then(self, value: Tensor, mask: AttentionMask, alpha: Tensor, mean: Tensor) -> Then:
        """Return what scales and shifts the weights, on the output, without a T x S matrix."""
        tensors = self._on_output(value, mask, alpha, mean)
        if tensors[-1].shape[2] > 1:  # a sum for every query takes long to take off again
            return lambda attn_output: affine_output(attn_output, *tensors)
        return Mapped(AffineOutput(), tensors)

    def _on_output(
        self, value: Tensor, mask: AttentionMask, alpha: Tensor, mean: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return alpha, the shift and the values it multiplies."""
        shift, mask = mean - alpha, mask.without_finite_bias()
        if mask.is_key_padding:
            visible, count = visible_sum(mask, value)
            divisor = count.clamp_min(1.0) if self.counts_visible else mask.num_keys
            return alpha, shift / divisor, visible
        if not self.counts_visible:
            shift = shift * (visible_count(mask).to(shift.dtype) / mask.num_keys)
        visible = visible_mean(mask, value, alpha.shape[1])
        return alpha, shift, visible

    def plain(
        self, attn_weights: Tensor, mask: AttentionMask, alpha: Tensor, mean: Tensor
    ) -> Tensor:
        """Return the scaled and shifted weights."""
        keys_counted = None if self.counts_visible else mask.num_keys
        return affine_weights(attn_weights, alpha, mean, mask.visible(), keys_counted)

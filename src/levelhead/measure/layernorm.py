"""LayerNorm's Jacobian, where it contracts, and the singular values of a residual block.

    J_LN = (1 / sigma) diag(gamma) (I - 1 1^T / E - xhat xhat^T / E)

A pre-LN residual sublayer has the Jacobian ``I + J_f J_LN``, with the identity added; a post-LN
one has ``J_LN (I + J_f)``, without.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from levelhead.measure.conditioning import Conditioning
from levelhead.measure.jacobian import operator_condition
from levelhead.shapes import require, require_float

# torch.nn.LayerNorm's default.
_EPS = 1e-5


@dataclass(frozen=True)
class LayerNormContraction:
    """How strongly LayerNorm shrinks at each token.

    Attributes:
        factor: ``||gamma||_inf / sigma``, at least the spectral norm of the Jacobian, one a token;
            inf where sigma is 0.
        contracts: ``factor < 1``. The product of LayerNorm Jacobians over layers shrinks
            geometrically where this holds at every layer: a sufficient condition.
    """

    factor: Float[Tensor, "*tokens"]
    contracts: Bool[Tensor, "*tokens"]


@torch.no_grad()
def layer_norm_jacobian(
    hidden_states: Float[Tensor, "*tokens E"],
    weight: Float[Tensor, " E"] | None = None,
    eps: float = _EPS,
) -> Float[Tensor, "*tokens E E"]:
    """The Jacobian of LayerNorm at each token, in float64.

        J = (1 / sigma) diag(gamma) (I - 1 1^T / E - xhat xhat^T / E),  sigma^2 = var(x) + eps

    Rank E - 1 with eps > 0 (E - 2 with eps = 0) where no entry of gamma is zero.

    Args:
        hidden_states: What goes into the norm; finite.
        weight: gamma; ones unless given. (The norm's bias does not matter.)
        eps: Added to the variance; 0 or more.

    Returns:
        ``[..., out, in]`` for each token.
    """
    states, gamma = _checked(hidden_states, weight, eps)
    sigma = _sigma(states, eps)
    flat = bool((sigma > 0).all())
    require(flat, "eps must be positive where a token is constant", f"eps={eps} and sigma = 0")
    centred = (states - states.mean(-1, keepdim=True)) / sigma
    size = states.shape[-1]
    inner = torch.eye(size, dtype=states.dtype, device=states.device) - 1 / size
    inner = inner - centred[..., :, None] * centred[..., None, :] / size
    return gamma[:, None] / sigma[..., None] * inner


@torch.no_grad()
def layer_norm_contraction(
    hidden_states: Float[Tensor, "*tokens E"],
    weight: Float[Tensor, " E"] | None = None,
    eps: float = _EPS,
) -> LayerNormContraction:
    """The sufficient condition for contraction, tested at each token of one layer.

    Args:
        hidden_states: What goes into the norm; finite.
        weight: gamma; ones unless given.
        eps: Added to the variance; 0 or more.

    Returns:
        Factor and verdict of each token; stack the layers to test their product.
    """
    states, gamma = _checked(hidden_states, weight, eps)
    factor = gamma.abs().amax() / _sigma(states, eps)[..., 0]
    return LayerNormContraction(factor, factor < 1)


def residual_jacobian(
    block: nn.Module | Callable[[Tensor], Tensor],
    hidden_states: Float[Tensor, "*tokens E"],
    method: str = "auto",
) -> Conditioning:
    """Extreme singular values of a block's Jacobian to its input, by exact products with it.

    Works for any block that maps hidden states to hidden states: pre-LN, post-LN, one sublayer.

    Args:
        block: A module (run in float64 with copies of its parameters, left as it is) or a function
            that keeps float64. Must be deterministic: eval mode, no dropout.
        hidden_states: ``[T, E]`` or ``[B, T, E]``, finite.
        method: As for `levelhead.measure.jacobian.operator_condition`: "auto" is exact up to 2,500
            numbers of input and matrix-free, with a lower bound on kappa, beyond.

    Returns:
        ``sigma_max``, ``sigma_min`` and kappa over the non-zero singular values.
    """
    require_float(hidden_states=hidden_states)
    function = _in_float64(block) if isinstance(block, nn.Module) else block
    states = hidden_states.detach().to(torch.float64)
    first, second = function(states), function(states)
    same = isinstance(first, Tensor) and torch.equal(first, second)
    must = "block must be deterministic and return one tensor"
    require(same, must, "two different outputs", "eval mode, a module that returns a tensor")
    return operator_condition(function, [states], method=method)


def _in_float64(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """The module as a function in float64, its own parameters untouched."""
    named = [*module.named_parameters(), *module.named_buffers()]
    wide = {
        name: t.detach().to(torch.float64) if t.is_floating_point() else t for name, t in named
    }
    for name, _ in module.named_parameters():
        wide[name].requires_grad_()  # keeps torch's modules off their inference fast path
    return lambda states: torch.func.functional_call(module, wide, (states,))


def _checked(states: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """States and gamma in float64, or a complaint."""
    require_float(hidden_states=states)
    gamma = states.new_ones(states.shape[-1]) if weight is None else weight.detach()
    came = f"weight {list(gamma.shape)}, hidden_states {list(states.shape)}"
    require(gamma.shape == states.shape[-1:], "weight must be [E]", came)
    finite = bool(states.isfinite().all()) and bool(gamma.isfinite().all())
    require(finite, "hidden_states and weight must be finite", "a NaN or an infinity")
    require(eps >= 0, "eps must not be negative", f"eps={eps}")
    return states.detach().to(torch.float64), gamma.to(torch.float64)


def _sigma(states: Tensor, eps: float) -> Tensor:
    return (states.var(-1, unbiased=False, keepdim=True) + eps).sqrt()

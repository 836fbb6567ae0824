"""What a row of attention weights says about itself: small functions of ``attn_weights``.

All are differentiable and safe to use as a loss: a masked key (weight 0) gets gradient 0, never
NaN, and so does a row without any weight. For long sequences see ``measure.concentration``, which
never holds the weights.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from levelhead.shapes import at_least_float32


def entropy_nats(attn_weights: Float[Tensor, "*rows S"]) -> Float[Tensor, "*rows"]:
    """Entropy of each row.

        H = -sum_s p_s ln p_s,   0 ln 0 = 0

    Args:
        attn_weights: Non-negative weights.

    Returns:
        Nats, in [0, ln S] for probabilities; 0 for a row without weight. float32 or wider.
    """
    p = _wide(attn_weights)
    return -(p * torch.where(p > 0, p, 1).log()).sum(-1)


def normalized_entropy(
    attn_weights: Float[Tensor, "*rows S"], num_visible: Int[Tensor, "*rows"]
) -> Float[Tensor, "*rows"]:
    """Entropy as a share of what the visible keys allow.

        H / ln(num_visible)

    Args:
        attn_weights: Non-negative weights.
        num_visible: How many keys each query may attend to.

    Returns:
        In [0, 1] for probabilities; NaN where fewer than two keys leave no choice.
    """
    entropy = entropy_nats(attn_weights)
    most = num_visible.clamp(min=2).to(entropy.dtype).log()
    return (entropy / most).masked_fill(num_visible < 2, torch.nan)


def p_max(attn_weights: Float[Tensor, "*rows S"]) -> Float[Tensor, "*rows"]:
    """Largest weight of each row.

    Args:
        attn_weights: Weights.

    Returns:
        In [0, 1] for probabilities.
    """
    return _wide(attn_weights).amax(-1)


def effective_keys(attn_weights: Float[Tensor, "*rows S"]) -> Float[Tensor, "*rows"]:
    """How many keys share the weight of a row: its participation ratio.

        (sum_s p_s)^2 / sum_s p_s^2

    Args:
        attn_weights: Non-negative weights of any row sum.

    Returns:
        In [1, S]; 0 for a row without weight.
    """
    p = _wide(attn_weights)
    largest = p.detach().amax(-1, keepdim=True)
    p = p / torch.where(largest > 0, largest, 1)  # squares of small weights would underflow
    square = p.square().sum(-1)
    return p.sum(-1).square() / torch.where(square > 0, square, 1)


def row_mass(attn_weights: Float[Tensor, "*rows S"]) -> Float[Tensor, "*rows"]:
    """Sum of each row: 1 for softmax, less with a sink, alpha_ma for affine weights.

    Args:
        attn_weights: Weights.

    Returns:
        The sums, in float32 or wider.
    """
    return _wide(attn_weights).sum(-1)


def negative_mass(attn_weights: Float[Tensor, "*rows S"]) -> Float[Tensor, "*rows"]:
    """How much of each row is negative, as affine weights can be.

        sum_s max(0, -attn_weights_s)

    Args:
        attn_weights: Weights.

    Returns:
        0 or more.
    """
    return (-_wide(attn_weights)).clamp(min=0).sum(-1)


def sink_mass(
    attn_weights: Float[Tensor, "B H T S"], first_tokens: Bool[Tensor, "B S"]
) -> Float[Tensor, "B H T"]:
    """Weight on the first real token of each document.

    Args:
        attn_weights: Weights.
        first_tokens: True at those tokens; see ``measure.streaming.first_tokens``.

    Returns:
        In [0, 1] for probabilities.
    """
    return (_wide(attn_weights) * first_tokens[:, None, None]).sum(-1)


def head_similarity(attn_weights: Float[Tensor, "B H T S"]) -> Float[Tensor, "B H H"]:
    """How alike the heads attend: the cosine of their rows, averaged over queries.

        mean over t of <P_h[t], P_g[t]> / (||P_h[t]|| ||P_g[t]||)

    Args:
        attn_weights: Weights; a query counts for a pair of heads if both rows hold weight.

    Returns:
        In [0, 1] for non-negative weights, 1 on the diagonal; NaN where no query counts.
    """
    total, count = head_similarity_sums(attn_weights)
    return (total / count.clamp(min=1)).masked_fill(count == 0, torch.nan)


def head_similarity_sums(
    attn_weights: Float[Tensor, "B H T S"],
) -> tuple[Float[Tensor, "B H H"], Float[Tensor, "B H H"]]:
    """Sum and count behind ``head_similarity``, to be added up over blocks of queries.

    Args:
        attn_weights: Weights.

    Returns:
        Sum of the cosines over queries, and how many queries count, for each pair of heads.
    """
    p = _wide(attn_weights).transpose(1, 2)
    square = p.square().sum(-1, keepdim=True)
    has_weight = (square > 0).to(p.dtype)
    unit = p * torch.where(square > 0, square, 1).rsqrt()
    return (unit @ unit.mT).sum(1), (has_weight @ has_weight.mT).sum(1)


def _wide(attn_weights: Tensor) -> Tensor:
    return attn_weights.to(at_least_float32(attn_weights.dtype))

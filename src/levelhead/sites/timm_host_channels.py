"""Attention whose queries and keys are the channels of a head instead of tokens."""

from jaxtyping import Float
from torch import Tensor

from levelhead.inner import InnerAttention, to_autocast_dtype


def attend_over_channels(
    inner: InnerAttention,
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B H T D"],
    value: Float[Tensor, "B H T D"],
    hidden_states: Float[Tensor, "B T E"],
) -> Float[Tensor, "B H T D"]:
    """Mix the channels of each head.

        attn_output^T = precondition(normaliser(scale * norm(query^T, key^T)) @ value^T)
        attn_output = gate(attn_output, hidden_states)

    Norms and preconditioning see channels as rows; the gate sees tokens, since it is computed
    from them.

    Args:
        inner: The parts.
        query: Queries, tokens as rows.
        key: Keys.
        value: Values.
        hidden_states: Input of the attention.

    Returns:
        The output, tokens as rows again.

    Source: El-Nouby et al. 2021 (XCiT), arXiv 2106.09681; Ding et al. 2022 (DaViT), 2204.03645.
    """
    query, key, value = (rows.mT for rows in to_autocast_dtype(query, key, value))
    query, key = inner.norm.prepare(query, key)
    attn_output = inner.mix(query, key, value, inner.check(query, key, value))
    if inner.precondition is not None:
        attn_output = inner.precondition(attn_output, None)
    return attn_output.mT if inner.gate is None else inner.gate(attn_output.mT, hidden_states)

"""The Gram matrix ``G = J J^T`` of one head's Jacobian, built from its structure.

To the weights, without a key map:

    G_ij = (x_i . x_j) M_i M_j^T + (q_i . q_j) R_i R_j^T + (u_i . u_j) O_i O_j^T

With a key map (rotary embedding, k norm, QUEST) the middle term is ``B B^T`` with
``B[(i, a), (e, d)] = sum_j spread_i[a, j] x_j[e] y_ij[d]``; to the input, ``G = sum_l C_l C_l^T``
with one block of columns for each token. The letters are those of `levelhead.measure.linearise`.
Bias columns are already in the inputs (a one beside each x and each u).

Only the lower triangle is written, in blocks of rows: the pages above it stay untouched, so the
matrix costs about half of its size in memory until someone writes there.
"""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from levelhead.measure.linearise import LinearisedHead

# Rows of one block: large enough for full-speed matrix products, small against T D.
_BLOCK_ROWS = 1024


@torch.no_grad()
def weight_gram(linear: LinearisedHead) -> Float[Tensor, "TD TD"]:
    """Lower triangle of ``J J^T``, J the Jacobian to q, k and v weights (biases included).

    Args:
        linear: The linearised head.

    Returns:
        ``[T Dv, T Dv]`` float64; what lies above the diagonal blocks is arbitrary.
    """
    head = linear.head
    query_part, output_jacobian = linear.query_part(), linear.output_jacobian
    key_part = None
    if linear.key_jacobian is None:
        key_part = linear.spread @ same_products(head.key_input)
    gram = _lower_storage(linear)
    for first, last in _row_blocks(linear):
        block = _weighted_products(query_part, head.query_input, first, last)
        if key_part is not None:
            block += _weighted_products(key_part, linear.query, first, last)
        if output_jacobian is not None:
            block += _weighted_products(output_jacobian, linear.mixed_input, first, last)
        else:
            inner = linear.mixed_input[first:last] @ linear.mixed_input[:last].mT
            block.diagonal(dim1=1, dim2=3).add_(inner[:, :, None])
        _lower_rows(gram, linear, first, last).copy_(block.flatten(2).flatten(0, 1))
    if key_part is None:
        _add_mapped_key_term(gram, linear)
    return gram


@torch.no_grad()
def input_gram(linear: LinearisedHead) -> Float[Tensor, "TD TD"]:
    """Lower triangle of ``J J^T``, J the Jacobian of a self-attention to its hidden states.

        C_il = delta_il M_i W_Q^T + spread_i[:, l] y_il^T W_K^T + w_il O_i W_V^T

    Args:
        linear: The linearised head.

    Returns:
        ``[T Dv, T Dv]`` float64; what lies above the diagonal blocks is arbitrary.
    """
    gram = _lower_storage(linear).zero_()
    for columns in input_columns(linear, same_products(_input_weights(linear))):
        _add_product(gram, linear, columns)
    return gram


@torch.no_grad()
def weight_jacobian(linear: LinearisedHead, compress: bool = False) -> Float[Tensor, "TD N"]:
    """J itself to the weights, columns ordered as the flattened q, k, v weights.

    Args:
        linear: The linearised head.
        compress: Return fewer columns where the inputs are wider than long, with the same
            ``J J^T`` and so the same singular values.

    Returns:
        ``[T Dv, Eq D + Ek D + Ev Dv]`` float64.
    """
    head, shrink = linear.head, same_products if compress else _unchanged
    key_input, output_jacobian = shrink(head.key_input), linear.output_jacobian
    query_input, mixed_input = shrink(head.query_input), shrink(linear.mixed_input)
    query_columns = torch.einsum("te,tad->taed", query_input, linear.query_part())
    if linear.key_jacobian is None:
        key_columns = torch.einsum("tae,td->taed", linear.spread @ key_input, linear.query)
    else:
        pull = linear.key_pull()
        key_columns = torch.einsum("tas,se,tsd->taed", linear.spread, key_input, pull)
    if output_jacobian is None:
        tokens, size = linear.output_shape
        output_jacobian = torch.eye(size, dtype=torch.float64, device=linear.query.device)
        output_jacobian = output_jacobian.expand(tokens, size, size)
    value_columns = torch.einsum("te,tac->taec", mixed_input, output_jacobian)
    parts = [part.flatten(2) for part in (query_columns, key_columns, value_columns)]
    return torch.cat(parts, dim=2).flatten(0, 1)


@torch.no_grad()
def input_jacobian(linear: LinearisedHead, compress: bool = False) -> Float[Tensor, "TD N"]:
    """J itself to the hidden states, columns ordered as the flattened hidden states.

    Args:
        linear: The linearised head.
        compress: As for `weight_jacobian`; shrinks where E exceeds 2 D + Dv.

    Returns:
        ``[T Dv, T E]`` float64.
    """
    weights = _input_weights(linear)
    weights = same_products(weights) if compress else weights
    return torch.cat(list(input_columns(linear, weights)), dim=1)


def same_products(rows: Float[Tensor, "N E"]) -> Float[Tensor, "N C"]:
    """A matrix whose rows have the same inner products, with at most as many columns as rows.

    Args:
        rows: Any matrix.

    Returns:
        ``rows`` itself unless it is wider than long.
    """
    return rows if rows.shape[1] <= len(rows) else torch.linalg.qr(rows.mT, mode="r").R.mT


def input_columns(
    linear: LinearisedHead, weights: Float[Tensor, "W C"]
) -> Iterator[Float[Tensor, "TD C"]]:
    """Yield for each token l the columns ``[T Dv, C]`` of its C_l.

    Args:
        linear: The linearised head.
        weights: ``[W_Q^T; W_K^T; W_V^T]``, or anything with the same inner products.

    Yields:
        One block of columns a token.
    """
    query_part, head_dim = linear.query_part(), linear.query.shape[1]
    to_query, to_key, to_value = weights.split([head_dim, head_dim, linear.output_shape[1]])
    key_jacobian, output_jacobian = linear.key_jacobian, linear.output_jacobian
    through = to_value if output_jacobian is None else output_jacobian @ to_value
    for token in range(linear.output_shape[0]):
        pull = linear.query if key_jacobian is None else linear.query @ key_jacobian[token]
        columns = linear.spread[:, :, token, None] * (pull @ to_key)[:, None, :]
        columns += linear.mixing[:, token, None, None] * through
        columns[token] += query_part[token] @ to_query
        yield columns.flatten(0, 1)


def _input_weights(linear: LinearisedHead) -> Tensor:
    """``[W_Q^T; W_K^T; W_V^T]`` without the bias rows."""
    head = linear.head
    weights = (head.q_weight, head.k_weight, head.v_weight)
    return torch.cat([weight[: head.embed_dim].mT for weight in weights])


def _unchanged(rows: Tensor) -> Tensor:
    return rows


def _row_blocks(linear: LinearisedHead) -> list[tuple[int, int]]:
    """First and last token of each block of rows."""
    tokens, head_dim = linear.output_shape
    step = max(1, _BLOCK_ROWS // head_dim)
    return [(first, min(first + step, tokens)) for first in range(0, tokens, step)]


def _lower_storage(linear: LinearisedHead) -> Tensor:
    size = math.prod(linear.output_shape)
    return torch.empty(size, size, dtype=torch.float64, device=linear.query.device)


def _lower_rows(gram: Tensor, linear: LinearisedHead, first: int, last: int) -> Tensor:
    """The rows of the tokens ``first`` to ``last``, up to and with the diagonal block."""
    head_dim = linear.output_shape[1]
    return gram[first * head_dim : last * head_dim, : last * head_dim]


def _weighted_products(parts: Tensor, vectors: Tensor, first: int, last: int) -> Tensor:
    """``(v_i . v_j) P_i P_j^T`` for i in the block and j up to its end: ``[I, Dv, J, Dv]``."""
    head_dim = parts.shape[1]
    rows, columns = parts[first:last].flatten(0, 1), parts[:last].flatten(0, 1)
    products = (rows @ columns.mT).view(last - first, head_dim, last, head_dim)
    return products.mul_((vectors[first:last] @ vectors[:last].mT)[:, None, :, None])


def _add_mapped_key_term(gram: Tensor, linear: LinearisedHead) -> None:
    """Add ``B B^T``, one slice of B for each dimension of the head, never B as a whole."""
    pull, key_input = linear.key_pull(), same_products(linear.head.key_input)
    for dimension in range(pull.shape[2]):
        columns = (linear.spread * pull[:, None, :, dimension]) @ key_input
        _add_product(gram, linear, columns.flatten(0, 1))


def _add_product(gram: Tensor, linear: LinearisedHead, columns: Tensor) -> None:
    """Add ``columns columns^T`` to the lower blocks, in place."""
    head_dim = linear.output_shape[1]
    for first, last in _row_blocks(linear):
        rows = columns[first * head_dim : last * head_dim]
        _lower_rows(gram, linear, first, last).addmm_(rows, columns[: last * head_dim].mT)

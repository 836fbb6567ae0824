"""Two factors of a matrix, the same seen from other directions, and least squares for a key."""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from levelhead.init.blocks import standard_normal
from levelhead.init.orthogonal import uniform_orthogonal


def balanced_factors(
    target: Float[Tensor, "rows columns"], rank: int, generator: torch.Generator | None
) -> tuple[Float[Tensor, "rows rank"], Float[Tensor, "rank columns"]]:
    """Split a matrix into two factors of equal scale whose product is its best approximation.

        target ~ U S V^T (truncated),    left = U S^(1/2),    right = S^(1/2) V^T

    V comes from the eigenvectors of ``target^T target`` and ``U S = target V``, so the product is
    the projection of the target on V whatever the rounding of S. A rank above the matrix' own is
    filled by a random semi-orthogonal mixing, which leaves the product alone.

    Args:
        target: The matrix.
        rank: Columns of the left factor.
        generator: Random source of the mixing.

    Returns:
        Left and right factor.
    """
    own_rank = min(rank, *target.shape)
    _, vectors = torch.linalg.eigh(target.mT @ target)
    vectors = vectors[:, -own_rank:].flip(1)
    image = target @ vectors
    root = torch.linalg.vector_norm(image, dim=0).sqrt()
    left = image / torch.where(root > 0, root, 1.0)
    right = (vectors * root).mT
    if rank == own_rank:
        return left, right
    mixing = uniform_orthogonal((own_rank, rank), target, generator)
    return left @ mixing, mixing.mT @ right


def turned_factors(
    left: Float[Tensor, "rows rank"],
    right: Float[Tensor, "rank columns"],
    count: int,
    generator: torch.Generator | None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the factors of one target, then what they are after independent random rotations.

        left' = Q left,    right' = right Q^T,    Q uniform, drawn anew for every pair

    ``noise * Z + identity * I`` and ``Q (noise * Z + identity * I) Q^T`` have one law, so each
    pair has the law of the factors of a target of its own, at the cost of a matrix of the
    factors' size. What the pairs share is what rotations leave alone: the singular values, and
    the inner products of left with right singular vectors. Where the target is not square, the
    coordinates beyond the identity are turned by a rotation of their own.

    Args:
        left: From `balanced_factors`.
        right: Likewise.
        count: How many pairs, the given one included.
        generator: Random source of the rotations.

    Yields:
        Left and right factor.
    """
    yield left, right
    shared = min(left.shape[0], right.shape[1])
    paired = torch.cat([left[:shared], right.mT[:shared]], dim=1)
    beyond = torch.cat([left[shared:], right.mT[shared:]])  # one of the two is empty, or both
    paired_triangle, beyond_triangle = _triangle(paired), _triangle(beyond)
    for _ in range(count - 1):
        turned = _random_turn(paired_triangle, shared, generator)
        new_left, new_right = turned.tensor_split(2, dim=1)
        rest = _random_turn(beyond_triangle, beyond.shape[0], generator)
        new_left = torch.cat([new_left, rest[: left.shape[0] - shared]])
        new_right = torch.cat([new_right, rest[: right.shape[1] - shared]])
        yield new_left, new_right.mT


def _triangle(matrix: Tensor) -> Tensor:
    """The triangular factor R of ``matrix = B R``: all of it that no rotation changes."""
    return torch.linalg.qr(matrix.double(), mode="r").R.to(matrix.dtype)


def _random_turn(triangle: Tensor, rows: int, generator: torch.Generator | None) -> Tensor:
    """``Q B R`` for a uniform rotation Q: Q B is a uniform matrix with orthonormal columns."""
    return uniform_orthogonal((rows, triangle.shape[0]), triangle, generator) @ triangle


def least_squares_queries(
    right: Float[Tensor, "rank columns"],
    rows: int,
    count: int,
    noise: float,
    identity: float,
    generator: torch.Generator | None,
) -> list[Float[Tensor, "rows rank"]]:
    """Solve ``query @ right ~ target`` by least squares for fresh targets.

        query = target P = noise * Z P + identity * P,    P = pinv(right) = B R,    Z P ~ G R

    Only ``Z B`` enters, whose entries are independent N(0, 1 / rows) because the columns of B are
    orthonormal; so G is drawn instead of Z.

    Args:
        right: The key, transposed.
        rows: E of the query's side.
        count: How many queries, each with a target of its own.
        noise: Factor on Z.
        identity: Factor on I.
        generator: Random source.

    Returns:
        One query block per target.
    """
    queries: list[Tensor] = []
    if count == 0:
        return queries
    inverse = torch.linalg.pinv(right)
    triangle = _triangle(inverse) * (noise / math.sqrt(rows))
    shared = min(rows, inverse.shape[0])
    for _ in range(count):
        query = standard_normal((rows, triangle.shape[0]), right, generator) @ triangle
        query[:shared] += identity * inverse[:shared]
        queries.append(query)
    return queries

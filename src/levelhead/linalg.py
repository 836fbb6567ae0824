"""Matrix facts that never lie and never throw: kappa, ranks, norms, polar and QR factors.

Everything is computed in float64 whatever came in; a batch member that is not finite costs its
neighbours nothing; what went wrong is a status a caller can read, not an exception from LAPACK
("failed to converge" is what LAPACK says about a NaN). Functions that must hand back a usable
matrix (`polar_factor`, `orthogonal_factor`) refuse a matrix that is not finite with a
``ValueError`` instead. All refuse what is not a floating-point matrix with at least one entry.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch
from jaxtyping import Float, Int
from torch import Tensor

from levelhead.shapes import at_least_float32, require, require_float


class Status(IntEnum):
    """What became of one matrix; tensors of statuses hold these numbers."""

    OK = 0
    RANK_DEFICIENT = 1
    FALLBACK = 2
    NON_FINITE = 3

    @property
    def word(self) -> str:
        """The status in words: "ok", "rank-deficient", "fallback" or "non-finite"."""
        return self.name.lower().replace("_", "-")


@dataclass(frozen=True)
class Spectrum:
    """Singular values (or eigenvalues) of a batch of matrices.

    Attributes:
        values: ``[*batch, K]`` float64, descending; NaN for a matrix that is not finite.
        rank: ``[*batch]``, how many exceed ``max(rows, cols) * eps * largest magnitude``, eps of
            the dtype that came in (float32 at the least); 0 for a matrix that is not finite.
        status: ``[*batch]`` of `Status`. FALLBACK: the usual routine failed, and the values come
            from the eigenvalues of the Gram matrix, with about half of the digits.
    """

    values: Float[Tensor, "*batch K"]
    rank: Int[Tensor, "*batch"]
    status: Int[Tensor, "*batch"]


@dataclass(frozen=True)
class ConditionNumber:
    """Condition numbers of a batch of matrices, under both conventions.

    Attributes:
        kappa: ``[*batch]`` in [1, inf]; inf for a rank-deficient matrix (the zero matrix too),
            NaN only for one that is not finite.
        kappa_nonzero: The same over the non-zero singular values; inf for the zero matrix.
        sigma_max: Largest singular value.
        sigma_min: Smallest non-zero singular value; 0 for the zero matrix.
        rank: Numerical rank, see `Spectrum`.
        status: `Status` of each matrix.
    """

    kappa: Float[Tensor, "*batch"]
    kappa_nonzero: Float[Tensor, "*batch"]
    sigma_max: Float[Tensor, "*batch"]
    sigma_min: Float[Tensor, "*batch"]
    rank: Int[Tensor, "*batch"]
    status: Int[Tensor, "*batch"]


def singular_values(
    matrix: Float[Tensor, "*batch rows cols"], precision: torch.dtype | None = None
) -> Spectrum:
    """Singular values of each matrix, with a status instead of an exception.

    Args:
        matrix: Any batch shape; may hold NaN and inf. No gradient flows through the result.
        precision: The dtype whose eps says what counts as zero; the matrix' own unless given (for
            a float64 matrix made from float32 numbers, say).

    Returns:
        ``min(rows, cols)`` values a matrix, in [0, inf), descending; see `Spectrum`.
    """
    _check_matrix(matrix)
    eps = _eps(precision or matrix.dtype)
    return _spectrum(matrix, torch.linalg.svdvals, _singular_values_by_gram, eps)


def symmetric_eigenvalues(matrix: Float[Tensor, "*batch rows rows"]) -> Spectrum:
    """Eigenvalues of each symmetric matrix (lower triangle read), with a status.

    Args:
        matrix: Square; may hold NaN and inf. No gradient flows through the result.

    Returns:
        Real eigenvalues, descending; FALLBACK values come from the general eigenvalue routine.
    """
    _check_matrix(matrix)
    require(
        matrix.shape[-1] == matrix.shape[-2],
        "a symmetric matrix must be square",
        f"matrix {list(matrix.shape)}",
    )
    return _spectrum(matrix, _eigenvalues_descending, _eigenvalues_general, _eps(matrix.dtype))


def condition_number(
    matrix: Float[Tensor, "*batch rows cols"], precision: torch.dtype | None = None
) -> ConditionNumber:
    """Condition number ``sigma_max / sigma_min`` of each matrix, whatever its values.

    Args:
        matrix: Any batch shape; may hold NaN and inf.
        precision: The dtype whose eps says what counts as zero; the matrix' own unless given.

    Returns:
        Both conventions (literal, and over the non-zero singular values); see `ConditionNumber`.
    """
    return condition_of(singular_values(matrix, precision))


def condition_of(spectrum: Spectrum) -> ConditionNumber:
    """Condition numbers from singular values that are there already.

    Args:
        spectrum: As `singular_values` returns it.

    Returns:
        Both conventions; see `ConditionNumber`.
    """
    values, rank = spectrum.values, spectrum.rank
    sigma_max = values[..., 0]
    last = (rank - 1).clamp_min(0).unsqueeze(-1)
    sigma_min = values.gather(-1, last).squeeze(-1)
    kappa_nonzero = sigma_max / sigma_min
    kappa_nonzero = torch.where(sigma_max == 0, torch.inf, kappa_nonzero)
    deficient = (rank < values.shape[-1]) & sigma_max.isfinite()
    kappa = torch.where(deficient, torch.inf, kappa_nonzero)
    return ConditionNumber(kappa, kappa_nonzero, sigma_max, sigma_min, rank, spectrum.status)


def spectral_norm(matrix: Float[Tensor, "*batch rows cols"]) -> Float[Tensor, "*batch"]:
    """Largest singular value of each matrix, differentiable with a finite gradient.

        ||W||_2 = u^T W v,    d||W||_2 / dW = u v^T

    The singular pair is found without a graph and held fixed, which gives the exact gradient where
    the largest value is simple, and a subgradient where it is not (the zero matrix included).

    Args:
        matrix: Any batch shape. A matrix that is not finite has norm NaN and a zero gradient.

    Returns:
        Values in [0, inf), in the dtype of ``matrix`` (float32 at the least).
    """
    _check_matrix(matrix)
    compute_dtype = at_least_float32(matrix.dtype)
    finite = _is_finite(matrix)
    safe = torch.where(finite[..., None, None], matrix, 0).to(torch.float64)
    left, right = _leading_pair(safe.detach())
    norm = torch.einsum("...m,...mn,...n->...", left, safe, right)
    return torch.where(finite, norm, torch.nan).to(compute_dtype)


@torch.no_grad()
def polar_factor(matrix: Float[Tensor, "*batch rows cols"]) -> Float[Tensor, "*batch rows cols"]:
    """The semi-orthogonal matrix nearest to each matrix.

        matrix = U S V^T,    polar_factor = U V^T

    ``rows >= cols`` gives orthonormal columns, otherwise orthonormal rows. Of a Gaussian matrix it
    is uniform over semi-orthogonal matrices. A rank-deficient matrix has several nearest ones; one
    of them is returned, semi-orthogonal all the same.

    Args:
        matrix: Finite entries, any scale.

    Returns:
        The factor in the dtype of ``matrix``, computed in float64; singular values all 1.
    """
    wide = _finite_and_scaled(matrix)
    left, _, right = torch.linalg.svd(wide, full_matrices=False)
    return (left @ right).to(matrix.dtype)


@torch.no_grad()
def orthogonal_factor(
    matrix: Float[Tensor, "*batch rows cols"],
) -> Float[Tensor, "*batch rows cols"]:
    """Orthonormal columns (rows, where wide) of each matrix by QR with the signs fixed.

        matrix = Q R with diag(R) >= 0,    orthogonal_factor = Q

    The sign rule makes the factor unique for full rank, and uniform for a Gaussian matrix.

    Args:
        matrix: Finite entries, any scale.

    Returns:
        The factor in the dtype of ``matrix``, computed in float64.
    """
    wide = _finite_and_scaled(matrix)
    tall = wide if wide.shape[-2] >= wide.shape[-1] else wide.mT
    q, r = torch.linalg.qr(tall)
    diagonal = r.diagonal(dim1=-2, dim2=-1)
    q = q * torch.where(diagonal < 0, -1.0, 1.0).unsqueeze(-2)
    return (q if tall is wide else q.mT).to(matrix.dtype)


def _check_matrix(matrix: Tensor) -> None:
    """Raise unless ``matrix`` is a floating-point batch of matrices with entries."""
    require_float(matrix=matrix)
    require(
        matrix.ndim >= 2 and matrix.numel() > 0,
        "a matrix must have at least two axes and one entry",
        f"matrix {list(matrix.shape)}",
        "[rows, cols] or [*batch, rows, cols]",
    )


def _eps(dtype: torch.dtype) -> float:
    """Relative precision of numbers that came in this dtype, float32's at the least."""
    return torch.finfo(at_least_float32(dtype)).eps


def _is_finite(matrix: Tensor) -> Tensor:
    """Whether each matrix of the batch holds finite numbers only."""
    return matrix.detach().isfinite().all(-1).all(-1)


def _finite_and_scaled(matrix: Tensor) -> Tensor:
    """Return ``matrix`` in float64, its largest entry 1 (factors do not depend on the scale)."""
    _check_matrix(matrix)
    require(
        bool(_is_finite(matrix).all()),
        "every entry of the matrix must be finite",
        f"{int((~matrix.isfinite()).sum())} non-finite entries in matrix {list(matrix.shape)}",
    )
    wide = matrix.to(torch.float64)
    largest = wide.abs().amax(dim=(-2, -1), keepdim=True)
    return wide / torch.where(largest > 0, largest, 1.0)


@torch.no_grad()
def _spectrum(
    matrix: Tensor,
    usual: Callable[[Tensor], Tensor],
    fallback: Callable[[Tensor], Tensor],
    eps: float,
) -> Spectrum:
    """Apply ``usual`` to the finite members, ``fallback`` where it fails, and judge the values."""
    finite = _is_finite(matrix)
    safe = torch.where(finite[..., None, None], matrix, 0).to(torch.float64)
    values, fell_back = _values_or_fallback(safe, usual, fallback)
    values = torch.where(finite.unsqueeze(-1), values, torch.nan)
    magnitude = values.abs()
    tolerance = max(matrix.shape[-2:]) * eps * magnitude.amax(-1, keepdim=True)
    rank = (magnitude > tolerance).sum(-1)
    status = torch.where(rank < values.shape[-1], Status.RANK_DEFICIENT, Status.OK)
    status = torch.where(fell_back, Status.FALLBACK, status)
    return Spectrum(values, rank, torch.where(finite, status, Status.NON_FINITE))


def _values_or_fallback(
    safe: Tensor, usual: Callable[[Tensor], Tensor], fallback: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Values of each member, and which needed the fallback; one failure costs only itself."""
    try:
        values = usual(safe)
        return values, torch.zeros(safe.shape[:-2], dtype=torch.bool, device=safe.device)
    except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
        if safe.ndim == 2:
            return fallback(safe), torch.tensor(True, device=safe.device)
    members = [_values_or_fallback(m, usual, fallback) for m in safe.flatten(0, -3)]
    values = torch.stack([member[0] for member in members])
    fell_back = torch.stack([member[1] for member in members])
    return values.unflatten(0, safe.shape[:-2]), fell_back.unflatten(0, safe.shape[:-2])


def _singular_values_by_gram(matrix: Tensor) -> Tensor:
    """Singular values as square roots of the Gram matrix' eigenvalues, for when the SVD fails."""
    largest = matrix.abs().amax().clamp_min(torch.finfo(matrix.dtype).tiny)
    scaled = matrix / largest
    gram = scaled @ scaled.mT if matrix.shape[-2] <= matrix.shape[-1] else scaled.mT @ scaled
    return torch.linalg.eigvalsh(gram).flip(-1).clamp_min(0).sqrt() * largest


def _eigenvalues_descending(matrix: Tensor) -> Tensor:
    """Eigenvalues of a symmetric matrix, largest first."""
    return torch.linalg.eigvalsh(matrix).flip(-1)


def _eigenvalues_general(matrix: Tensor) -> Tensor:
    """Real parts of the eigenvalues of the symmetrised matrix by the general routine."""
    symmetric = matrix.tril() + matrix.tril(-1).mT
    return torch.linalg.eigvals(symmetric).real.sort(descending=True).values


@torch.no_grad()
def _leading_pair(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Unit singular vectors of the largest singular value of each finite matrix."""
    try:
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        return left[..., :, 0], right[..., 0, :]
    except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
        right = torch.linalg.eigh(matrix.mT @ matrix).eigenvectors[..., -1]
        left = torch.nn.functional.normalize((matrix @ right.unsqueeze(-1)).squeeze(-1), dim=-1)
        return left, right

"""Kappa of a Jacobian: dense, by Lanczos and Cholesky, matrix-free, or from J itself.

    kappa = sigma_max / sigma_min over the non-zero singular values

A singular value counts as zero at or below ``max(rows, columns) * eps * sigma_max`` (float64).
The Gram matrix cannot tell such values from zero below about ``sqrt(rows * eps) * sigma_max``, so
each method that works on it notices, and goes to J itself or says that kappa is a lower bound.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from levelhead.lanczos import EigenPair, largest_eigenpair
from levelhead.measure.nullspace import NullSpace, cholesky_solve
from levelhead.measure.operators import (
    JacobianOperator,
    JacobianProblem,
    dense_jacobian,
    smaller_gram,
)

_EPS = torch.finfo(torch.float64).eps
# Stop when an eigenpair's relative residual, a bound on its error, is below this: kappa to 1e-8.
_TOLERANCE = 1e-8
_MAX_STEPS = 500
_POLISHING_SOLVES = 2
_STEPS_IN_RANGE = 10
# A shift of fewer eps, in a small problem, would sit too near to the rounding errors of G.
_FEWEST_EPS = 4096
# The same where the residual is relative to lambda_max and the eigenvalue sought is far smaller.
_TOLERANCE_BESIDE_TOP = 1e-10
# Eigenvalues under this many shifts belong to the null space of a shifted Gram matrix.
_NULL_CUT = 10.0


@dataclass(frozen=True)
class Conditioning:
    """How well-conditioned a Jacobian is, and how that is known.

    Attributes:
        kappa: ``sigma_max / sigma_min`` over the non-zero singular values, in [1, inf]; inf only
            for J = 0.
        sigma_max: Largest singular value.
        sigma_min: Smallest non-zero singular value; 0 for J = 0. Where ``kind`` is "lower bound",
            an upper bound on it.
        rank: Number of non-zero singular values, or None where the method cannot count them.
        shape: Rows and columns of J.
        literal_kappa_is_infinite: Whether J lacks full rank, so that kappa over all singular
            values is infinite; None where the rank is not known.
        method: "dense", "lanczos", "matrix_free" or "autograd".
        residual: Relative error bound: each end is within this of a true singular value.
        kind: "exact" up to the residual, or "lower bound" on kappa.
    """

    kappa: float
    sigma_max: float
    sigma_min: float
    rank: int | None
    shape: tuple[int, int]
    literal_kappa_is_infinite: bool | None
    method: str
    residual: float
    kind: Literal["exact", "lower bound"] = "exact"


def by_autograd(operator: JacobianOperator) -> Conditioning:
    """Kappa from all singular values of J, built product by product: slow, for tests.

    Args:
        operator: J.

    Returns:
        The exact conditioning.
    """
    return _from_matrix(dense_jacobian(operator), operator.shape, "autograd")


@torch.no_grad()
def by_dense(problem: JacobianProblem) -> Conditioning:
    """Kappa from all eigenvalues of the Gram matrix, its small end sharpened on J itself.

    Where the Gram matrix is singular to working precision, or larger than ``J^T J`` would be, the
    singular values of J decide.

    Args:
        problem: J in its three forms.

    Returns:
        The exact conditioning.
    """
    operator, (rows, columns) = problem.operator, problem.operator.shape
    if rows > columns:
        return _from_matrix(problem.dense(), operator.shape, "dense")
    gram = problem.gram()
    values = torch.linalg.eigvalsh(gram)
    smallest, largest = float(values[0]), float(values[-1])
    floor = rows * _EPS * largest
    if smallest <= floor:
        return _from_matrix(problem.dense(), operator.shape, "dense")
    bottom = _smallest_eigenpair(gram, operator)
    assert bottom is not None, "a matrix of positive eigenvalues has a Cholesky factor"
    sigma_min, residual = _sharpen(operator, bottom.vector)
    if abs(sigma_min**2 - smallest) > floor + 1e-6 * smallest:
        sigma_min, residual = smallest**0.5, floor / smallest
    sigma_max = largest**0.5
    return _full_rank(operator, sigma_max, sigma_min, residual + rows * _EPS, "dense")


@torch.no_grad()
def by_lanczos(problem: JacobianProblem) -> Conditioning:
    """Kappa by Lanczos on G at the large end and on its Cholesky inverse at the small one.

    One matrix of the size of G is held (``8 (T Dv)^2`` bytes) and factored in place. A singular G
    is shifted, and the smallest eigenvalue outside its null space found.

    Args:
        problem: J in its three forms.

    Returns:
        The conditioning; "lower bound" where small singular values cannot be told from zero.
    """
    operator = problem.operator
    sigma_max, top_residual = _largest_singular_value(operator)
    if sigma_max == 0:
        return _zero(operator, "lanczos")
    floor = max(operator.shape[0], _FEWEST_EPS) * _EPS * sigma_max**2
    bottom = _smallest_eigenpair(problem.gram(), operator)
    if bottom is None or 1 / bottom.value <= floor:
        return _by_shifted_lanczos(problem, sigma_max, floor)
    sigma_min, residual = _sharpen(operator, bottom.vector)
    return _full_rank(operator, sigma_max, sigma_min, residual + top_residual, "lanczos")


@torch.no_grad()
def by_matrix_free(operator: JacobianOperator, max_steps: int = _MAX_STEPS) -> Conditioning:
    """Sigma_max exactly and a lower bound on kappa, from products with J alone.

    The small end is a Rayleigh quotient of a vector in the range of J, hence never below the
    smallest non-zero singular value, however far from it the steps end.

    Args:
        operator: J.
        max_steps: Products at the small end, before ten within the range of J.

    Returns:
        A lower bound on kappa, without the rank.
    """
    product, size = smaller_gram(operator)
    top = largest_eigenpair(
        product, _start(size, operator), tolerance=_TOLERANCE, max_steps=_MAX_STEPS
    )
    if top.value <= 0:
        return _zero(operator, "matrix_free")

    def beside_top(vector: Tensor) -> Tensor:
        return top.value * vector - product(vector)

    below = top.value * (1 - _NULL_CUT * size * _EPS)
    bottom = largest_eigenpair(
        beside_top,
        product(_start(size, operator)),
        tolerance=_TOLERANCE_BESIDE_TOP,
        max_steps=max_steps,
        below=below,
    )
    # Into the range of J, where the null space cannot pull the quotient down; that multiplies
    # what is left of large eigenvalues by their ratio to the sought one: a few steps remove it.
    vector = largest_eigenpair(
        beside_top,
        product(bottom.vector),
        tolerance=_TOLERANCE_BESIDE_TOP,
        max_steps=_STEPS_IN_RANGE,
        below=below,
    ).vector
    image = product(vector)
    square = float(vector @ image)
    residual = float((image - square * vector).norm()) / square + top.residual
    sigma_max, sigma_min = top.value**0.5, square**0.5
    return Conditioning(
        kappa=sigma_max / sigma_min,
        sigma_max=sigma_max,
        sigma_min=sigma_min,
        rank=None,
        shape=operator.shape,
        literal_kappa_is_infinite=None,
        method="matrix_free",
        residual=residual,
        kind="lower bound",
    )


def _from_matrix(matrix: Tensor, shape: tuple[int, int], method: str) -> Conditioning:
    """The conditioning from all singular values of a matrix that shares them with J."""
    values = torch.linalg.svdvals(matrix)
    sigma_max = float(values[0])
    rank = int((values > max(shape) * _EPS * sigma_max).sum())
    sigma_min = float(values[rank - 1]) if rank else 0.0
    kappa = sigma_max / sigma_min if rank else float("inf")
    return Conditioning(
        kappa=kappa,
        sigma_max=sigma_max,
        sigma_min=sigma_min,
        rank=rank,
        shape=shape,
        literal_kappa_is_infinite=rank < min(shape),
        method=method,
        residual=max(shape) * _EPS * kappa if rank else 0.0,
    )


def _full_rank(
    operator: JacobianOperator, sigma_max: float, sigma_min: float, residual: float, method: str
) -> Conditioning:
    """The conditioning of a J whose rows are independent."""
    return Conditioning(
        kappa=sigma_max / sigma_min,
        sigma_max=sigma_max,
        sigma_min=sigma_min,
        rank=operator.shape[0],
        shape=operator.shape,
        literal_kappa_is_infinite=False,
        method=method,
        residual=residual,
    )


def _zero(operator: JacobianOperator, method: str) -> Conditioning:
    """The conditioning of J = 0."""
    inf = float("inf")
    return Conditioning(inf, 0.0, 0.0, 0, operator.shape, True, method, 0.0)


def _start(size: int, operator: JacobianOperator) -> Tensor:
    """A random direction, the same in every call, so that a measure repeats itself."""
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(operator.device)


def _largest_singular_value(operator: JacobianOperator) -> tuple[float, float]:
    """Sigma_max and its relative residual."""
    product, size = smaller_gram(operator)
    start = _start(size, operator)
    pair = largest_eigenpair(product, start, tolerance=_TOLERANCE, max_steps=_MAX_STEPS)
    return max(pair.value, 0.0) ** 0.5, pair.residual


def _factor_in_place(gram: Tensor) -> bool:
    """Overwrite the lower triangle of G by its Cholesky factor; False where G is not positive."""
    info = torch.empty((), dtype=torch.int32, device=gram.device)
    torch.linalg.cholesky_ex(gram, out=(gram, info))
    return int(info) == 0


def _inverse_eigenpair(factor: Tensor, operator: JacobianOperator, below: float) -> EigenPair:
    """The largest eigenpair of ``(L L^T)^-1`` under a cut."""
    return largest_eigenpair(
        lambda vector: cholesky_solve(factor, vector[:, None])[:, 0],
        _start(len(factor), operator),
        tolerance=_TOLERANCE,
        max_steps=_MAX_STEPS,
        below=below,
    )


def _smallest_eigenpair(gram: Tensor, operator: JacobianOperator) -> EigenPair | None:
    """The smallest eigenpair of G, as the largest of its inverse; None where G is not positive."""
    if not _factor_in_place(gram):
        return None
    pair = _inverse_eigenpair(gram, operator, below=float("inf"))
    vector = pair.vector[:, None]
    for _ in range(_POLISHING_SOLVES):  # thins out what lies along large eigenvalues of G
        vector = cholesky_solve(gram, vector / vector.norm())
    return replace(pair, vector=vector[:, 0] / vector.norm())


def _sharpen(operator: JacobianOperator, vector: Tensor) -> tuple[float, float]:
    """Sigma as ``|J^T u|``, exact to second order in the error of u, and the relative residual.

    The residual comes from products with J, so an error in G itself would show in it.
    """
    image = operator.adjoint(vector)
    square = float(image @ image)
    gap = operator.apply(image) - square * vector
    return square**0.5, float(gap.norm()) / square


def _by_shifted_lanczos(problem: JacobianProblem, sigma_max: float, shift: float) -> Conditioning:
    """Kappa of a rank-deficient J: factor ``G + shift I`` and look past its null space."""
    operator, factor = problem.operator, problem.gram()
    factor.diagonal().add_(shift)
    while not _factor_in_place(factor):
        shift *= _NULL_CUT
        factor = problem.gram()
        factor.diagonal().add_(shift)
    cut = 1 / ((_NULL_CUT + 1) * shift)
    pair = _inverse_eigenpair(factor, operator, cut)
    null_space = NullSpace(factor, shift, damping=shift * pair.value)
    vector = pair.vector - null_space.project(pair.vector[:, None])[:, 0]
    sigma_min, residual = _sharpen(operator, vector / vector.norm())
    null_sigma, null_weight = null_space.probe(operator)
    tolerance = max(operator.shape) * _EPS * sigma_max
    blind = null_sigma > tolerance
    rank = None if blind else null_space.rank(null_weight)
    return Conditioning(
        kappa=sigma_max / sigma_min,
        sigma_max=sigma_max,
        sigma_min=sigma_min,
        rank=rank,
        shape=operator.shape,
        literal_kappa_is_infinite=None if rank is None else rank < min(operator.shape),
        method="lanczos",
        residual=residual,
        kind="lower bound" if blind else "exact",
    )

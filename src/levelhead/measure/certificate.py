"""A proof that no singular value lies outside what an iteration found."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor


@torch.no_grad()
def ends_are_certified(
    gram: Callable[[], Float[Tensor, "M M"]], sigma_min: float, sigma_max: float, tolerance: float
) -> bool:
    """Prove that all singular values of J lie in ``[sigma_min (1 - t), sigma_max (1 + t)]``.

        G - sigma_min^2 (1 - t)^2 I   and   sigma_max^2 (1 + t)^2 I - G   have Cholesky factors

    With values of sigma that were reached (Rayleigh quotients), kappa is then right to about
    ``2 t``. Costs twice the building and factoring of G, in the memory of one.

    Args:
        gram: Builds the lower triangle of ``G = J J^T``, float64, anew.
        sigma_min: What an iteration found as the smallest singular value.
        sigma_max: What it found as the largest.
        tolerance: t, well above rounding: ``rows * eps * kappa^2`` at the lower end.

    Returns:
        Whether both matrices are positive definite.
    """
    lower = gram()
    lower.diagonal().sub_((sigma_min * (1 - tolerance)) ** 2)
    if not _is_positive(lower):
        return False
    del lower
    upper = gram().neg_()
    upper.diagonal().add_((sigma_max * (1 + tolerance)) ** 2)
    return _is_positive(upper)


def _is_positive(matrix: Tensor) -> bool:
    """Whether a matrix, lower triangle given, has a Cholesky factor; overwrites it."""
    info = torch.empty((), dtype=torch.int32, device=matrix.device)
    torch.linalg.cholesky_ex(matrix, out=(matrix, info))
    return int(info) == 0

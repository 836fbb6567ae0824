"""The null space of a Gram matrix, seen through the Cholesky factor of ``G + shift I``.

shift (G + shift I)^-1   is 1 on the null space and shift / lambda, nearly 0, elsewhere
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from levelhead.measure.operators import JacobianOperator

_EPS = torch.finfo(torch.float64).eps
_PROBES = 8
_INVERSE_COLUMNS = 256
# A count is clear when what else could have added to it stays below this.
_CLEAR_COUNT = 0.4


def cholesky_solve(
    factor: Float[Tensor, "M M"], vectors: Float[Tensor, "M C"]
) -> Float[Tensor, "M C"]:
    """Solve with a Cholesky factor.

    Args:
        factor: Lower triangle L.
        vectors: Right-hand sides.

    Returns:
        ``(L L^T)^-1 vectors``.
    """
    halfway = torch.linalg.solve_triangular(factor, vectors, upper=False)
    return torch.linalg.solve_triangular(factor.mT, halfway, upper=True)


@dataclass(frozen=True)
class NullSpace:
    """The null space of G, up to the resolution of G.

    Attributes:
        factor: Lower Cholesky factor of ``G + shift I``.
        shift: Well above the rounding errors of G.
        damping: ``shift / (lambda + shift)`` at the smallest eigenvalue outside the null space.
    """

    factor: Float[Tensor, "M M"]
    shift: float
    damping: float

    def project(self, vectors: Float[Tensor, "M C"]) -> Float[Tensor, "M C"]:
        """The part of each vector inside the null space.

        Args:
            vectors: Any.

        Returns:
            Vectors of which everything else is damped below eps.
        """
        remaining = 1.0
        while remaining > _EPS:
            vectors = self.shift * cholesky_solve(self.factor, vectors)
            remaining *= self.damping
        return vectors

    def probe(self, operator: JacobianOperator) -> tuple[float, float]:
        """What random vectors of the null space say about it.

        Args:
            operator: J, with ``G = J J^T``.

        Returns:
            A value that its singular values do not exceed (as far as random probes tell), and
            the mean of ``shift / (eigenvalue + shift)`` over it, 1 but for rounding in G.
        """
        generator = torch.Generator().manual_seed(len(self.factor))
        shape = (len(self.factor), _PROBES)
        vectors = torch.randn(shape, generator=generator, dtype=torch.float64)
        vectors = self.project(vectors.to(self.factor.device))
        for _ in range(2):  # what rounding in G left behind is found with J itself and taken out
            images = [operator.apply(operator.adjoint(vector)) for vector in vectors.mT]
            vectors = vectors - cholesky_solve(self.factor, torch.stack(images, dim=1))
        vectors = vectors / vectors.norm(dim=0)
        largest = max(float(operator.adjoint(vector).norm()) for vector in vectors.mT)
        weights = self.shift * (vectors * cholesky_solve(self.factor, vectors)).sum(0)
        return largest * len(self.factor) ** 0.5, float(weights.mean())

    def rank(self, weight: float) -> int | None:
        """Count what lies outside, by ``null count = shift trace((G + shift I)^-1) / weight``.

        Args:
            weight: As ``probe`` returns it.

        Returns:
            The rank of G, or None where the count is not clear.
        """
        size, square = len(self.factor), 0.0
        for first in range(0, size, _INVERSE_COLUMNS):
            corner = self.factor[first:, first:]
            units = torch.eye(len(corner), min(_INVERSE_COLUMNS, len(corner))).to(corner)
            half = torch.linalg.solve_triangular(corner, units, upper=False)
            square += float(half.square().sum())
        null_count = self.shift * square / weight
        blur = size * self.damping + abs(null_count - round(null_count))
        return size - round(null_count) if blur < _CLEAR_COUNT else None

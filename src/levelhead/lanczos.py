"""Lanczos with full reorthogonalisation, for the extreme eigenvalues of a symmetric operator."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

# The small tridiagonal problem is solved this seldom; it costs little and decides when to stop.
_STEPS_BETWEEN_CHECKS = 5


@dataclass(frozen=True)
class EigenPair:
    """One approximate eigenpair.

    Attributes:
        value: The Rayleigh quotient of ``vector``: inside the spectrum, always.
        vector: Of length one.
        residual: ``|A vector - value vector| / |value|`` as the recurrence sees it.
        steps: Products with the operator.
    """

    value: float
    vector: Float[Tensor, " N"]
    residual: float
    steps: int


@torch.no_grad()
def largest_eigenpair(
    apply: Callable[[Tensor], Tensor],
    start: Float[Tensor, " N"],
    *,
    tolerance: float,
    max_steps: int,
    below: float = float("inf"),
) -> EigenPair:
    """The largest eigenvalue of a symmetric operator, or the largest one below a cut.

    Args:
        apply: Product with the operator.
        start: First direction, random, not zero.
        tolerance: Stop at this relative residual.
        max_steps: Stop after this many products all the same; the residual tells.
        below: Look only at eigenvalues under this cut.

    Returns:
        The pair; its residual exceeds ``tolerance`` when the steps did not suffice.
    """
    max_steps = min(max_steps, start.numel())
    basis = start.new_empty(max_steps, start.numel())
    basis[0] = start / start.norm()
    diagonal: list[float] = []
    beside: list[float] = []
    while True:
        step = len(diagonal)
        vector = apply(basis[step])
        diagonal.append(float(vector @ basis[step]))
        for _ in range(2):
            vector = vector - basis[: step + 1].mT @ (basis[: step + 1] @ vector)
        beside.append(float(vector.norm()))
        exhausted = beside[-1] <= torch.finfo(vector.dtype).eps * max(map(abs, diagonal))
        last = exhausted or step + 1 == max_steps
        if last or (step + 1) % _STEPS_BETWEEN_CHECKS == 0:
            pair = _ritz_pair(basis, diagonal, beside, below)
            if pair is not None and (last or pair.residual <= tolerance):
                return pair
            assert not last, "no Ritz value below the cut"
        basis[step + 1] = vector / beside[-1]


def _ritz_pair(
    basis: Tensor, diagonal: list[float], beside: list[float], below: float
) -> EigenPair | None:
    """The largest Ritz pair below the cut, or None where there is none yet."""
    steps = len(diagonal)
    small = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    if steps > 1:
        off = torch.diag(torch.tensor(beside[:-1], dtype=torch.float64), 1)
        small = small + off + off.mT
    values, vectors = torch.linalg.eigh(small)
    candidates = (values < below).nonzero()
    if len(candidates) == 0:
        return None
    pick = int(candidates[-1])
    value, weights = float(values[pick]), vectors[:, pick]
    vector = basis[:steps].mT @ weights.to(basis)
    residual = (
        beside[-1] * abs(float(weights[-1])) / max(abs(value), torch.finfo(values.dtype).tiny)
    )
    return EigenPair(value, vector / vector.norm(), residual, steps)

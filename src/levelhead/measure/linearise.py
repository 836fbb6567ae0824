"""The Jacobian of one head by its structure: pieces of size T D E instead of T D x 3 E D.

    dA_i = M_i dW_Q^T x_i + sum_j spread_i[:, j] (y_ij^T dW_K^T x_j) + O_i dW_V^T u_i

    spread_i = scale O_i V^T Lambda_i          Lambda_i = (diag(p_i) - p_i p_i^T) diag(cap'_i)
    M_i = spread_i K Fq_i,   y_ij = Fk_j^T q_i,   u_i = sum_j w_ij x_j

Fq, Fk, O are the local Jacobians of the query, key and output maps (identities where there is no
map), w the weights that multiply the values. Without a key map y_ij = q_i, and the middle term is
``R_i dW_K^T q_i`` with ``R_i = spread_i X``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from levelhead.measure.head import AttentionHead, RowMap, softmax_rows
from levelhead.shapes import require

# A map that mixes rows moves a random tangent by far more than this, one that does not by eps.
_ROWS_INDEPENDENT = 1e-9


@dataclass(frozen=True)
class LinearisedHead:
    """The pieces of the Jacobian of one head at its own weights, all float64.

    Attributes:
        head: What was linearised.
        query: ``[T, D]``, after the query map.
        key: ``[S, D]``, after the key map.
        value: ``[S, Dv]``.
        probabilities: ``[T, S]``, the softmax.
        slope: ``[T, S]``, ``scale row_scale p cap'``: how a weight follows its own q k product.
        query_jacobian: ``[T, D, D]``, the Fq_i, or None for the identity.
        key_jacobian: ``[S, D, D]``, the Fk_j, or None for the identity.
        output_jacobian: ``[T, Dv, Dv]``, the O_i, or None for the identity.
    """

    head: AttentionHead
    query: Float[Tensor, "T D"]
    key: Float[Tensor, "S D"]
    value: Float[Tensor, "S Dv"]
    probabilities: Float[Tensor, "T S"]
    slope: Float[Tensor, "T S"]
    query_jacobian: Float[Tensor, "T D D"] | None
    key_jacobian: Float[Tensor, "S D D"] | None
    output_jacobian: Float[Tensor, "T Dv Dv"] | None

    @property
    def output_shape(self) -> tuple[int, int]:
        """T and Dv; their product is the number of rows of the Jacobian."""
        return len(self.query), self.value.shape[1]

    @cached_property
    def mixing(self) -> Float[Tensor, "T S"]:
        """The weights that multiply the values."""
        return self.head.mix(self.probabilities)

    @cached_property
    def mixed_input(self) -> Float[Tensor, "T Ev"]:
        """The u_i."""
        return self.mixing @ self.head.value_input

    @cached_property
    def spread(self) -> Float[Tensor, "T Dv S"]:
        """The spread_i: how the output moves with the q k products."""
        centred = self.value.mT[None] - (self.probabilities @ self.value)[:, :, None]
        return _through(self.output_jacobian, centred * self.slope[:, None, :])

    def query_part(self) -> Float[Tensor, "T Dv D"]:
        """The M_i.

        Returns:
            ``spread_i K Fq_i`` for each query.
        """
        part = self.spread @ self.key
        return part if self.query_jacobian is None else part @ self.query_jacobian

    def key_pull(self) -> Float[Tensor, "T S D"]:
        """The y_ij of a head with a key map.

        Returns:
            ``Fk_j^T q_i`` for each query i and key j.
        """
        assert self.key_jacobian is not None
        return torch.einsum("td,sde->tse", self.query, self.key_jacobian)

    def push(self, query: Tensor, key: Tensor, value: Tensor) -> Float[Tensor, "T Dv"]:
        """Move the output with tangents of the projections, before their maps; O(T S D).

        Args:
            query: ``[T, D]``.
            key: ``[S, D]``.
            value: ``[S, Dv]``.

        Returns:
            The tangent of the output.
        """
        query, key = _on_rows(self.query_jacobian, query), _on_rows(self.key_jacobian, key)
        moved = self.slope * (query @ self.key.mT + self.query @ key.mT)
        centre = self.probabilities @ self.value
        tangent = moved @ self.value - moved.sum(1, keepdim=True) * centre + self.mixing @ value
        return _on_rows(self.output_jacobian, tangent)

    def pull(self, output: Float[Tensor, "T Dv"]) -> tuple[Tensor, Tensor, Tensor]:
        """The transpose of ``push``: gradients of ``sum(output * A)``; O(T S D).

        Args:
            output: Gradient at the output.

        Returns:
            Gradients at the projected query, key and value, before their maps.
        """
        output = _on_rows(self.output_jacobian, output, transpose=True)
        centre = (output * (self.probabilities @ self.value)).sum(1, keepdim=True)
        moved = self.slope * (output @ self.value.mT - centre)
        query = _on_rows(self.query_jacobian, moved @ self.key, transpose=True)
        key = _on_rows(self.key_jacobian, moved.mT @ self.query, transpose=True)
        return query, key, self.mixing.mT @ output


@torch.no_grad()
def linearise(head: AttentionHead) -> LinearisedHead:
    """Compute the pieces of one head's Jacobian.

    Args:
        head: The head; its maps must act row by row.

    Returns:
        The pieces.
    """
    form = head.form
    query, query_jacobian = _map_rows(form.query_map, head.query_input @ head.q_weight, "query")
    key, key_jacobian = _map_rows(form.key_map, head.key_input @ head.k_weight, "key")
    value = head.value_input @ head.v_weight
    products = head.scale * query @ key.mT
    probabilities = softmax_rows(head, products)
    weighted = head.mix(probabilities) @ value
    _, output_jacobian = _map_rows(form.output_map, weighted, "output")
    if form.output_gate is not None:
        output_jacobian = _gated(output_jacobian, form.output_gate, value.shape[1])
    return LinearisedHead(
        head=head,
        query=query,
        key=key,
        value=value,
        probabilities=probabilities,
        slope=_slope(head, products, probabilities),
        query_jacobian=query_jacobian,
        key_jacobian=key_jacobian,
        output_jacobian=output_jacobian,
    )


def _slope(head: AttentionHead, products: Tensor, probabilities: Tensor) -> Tensor:
    """``scale row_scale p cap'``."""
    slope = head.scale * probabilities
    if head.form.row_scale is not None:
        slope = slope * head.form.row_scale[:, None]
    if head.form.soft_cap is not None:
        slope = slope * (1 - torch.tanh(products / head.form.soft_cap).square())
    return slope


def _through(jacobian: Tensor | None, matrices: Tensor) -> Tensor:
    return matrices if jacobian is None else jacobian @ matrices


def _on_rows(jacobian: Tensor | None, rows: Tensor, transpose: bool = False) -> Tensor:
    """Apply each row's Jacobian (or its transpose) to the row."""
    if jacobian is None:
        return rows
    return torch.einsum("tji,tj->ti" if transpose else "tij,tj->ti", jacobian, rows)


def _gated(jacobian: Tensor | None, gate: Tensor, head_dim: int) -> Tensor:
    """The output Jacobian behind a gate: each row times its gate."""
    gate = gate.expand(-1, head_dim)
    return torch.diag_embed(gate) if jacobian is None else gate[:, :, None] * jacobian


def _map_rows(row_map: RowMap | None, rows: Tensor, name: str) -> tuple[Tensor, Tensor | None]:
    """Apply a map to rows; return the result and each row's Jacobian ``[T, D out, D in]``."""
    if row_map is None:
        return rows, None
    mapped = row_map(rows)
    came = f"{list(rows.shape)} to {list(mapped.shape)}"
    require(mapped.shape == rows.shape, f"{name}_map must keep the shape", came)
    require(bool(mapped.isfinite().all()), f"{name}_map must stay finite", "a NaN or an infinity")
    pull = torch.func.vjp(row_map, rows)[1]
    units = torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
    jacobian = torch.stack([pull(unit.expand_as(rows))[0] for unit in units], dim=1)
    finite = bool(jacobian.isfinite().all())
    require(finite, f"{name}_map must have a finite derivative", "a NaN or an infinity")
    _require_row_by_row(pull, jacobian, name)
    return mapped, jacobian


def _require_row_by_row(pull: Callable, jacobian: Tensor, name: str) -> None:
    """Raise unless the map pulls a random cotangent back as its row Jacobians say."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    shape, dtype = jacobian.shape[:2], jacobian.dtype
    cotangent = torch.randn(shape, generator=generator, dtype=dtype).to(jacobian.device)
    true = pull(cotangent)[0]
    by_rows = _on_rows(jacobian, cotangent, transpose=True)
    gap = (true - by_rows).abs().max() / true.abs().max().clamp_min(torch.finfo(dtype).tiny)
    require(
        bool(gap <= _ROWS_INDEPENDENT),
        f"{name}_map must act on each row by itself, differentiably and in float64",
        f"a Jacobian that mixes rows (relative gap {float(gap):.1e})",
        "levelhead.measure.jacobian.operator_condition for any other map",
    )

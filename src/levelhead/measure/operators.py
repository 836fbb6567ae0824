"""Jacobians as operators: products with J and its transpose, never J itself."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from levelhead.measure.linearise import LinearisedHead
from levelhead.shapes import require


class JacobianOperator(Protocol):
    """Anything that multiplies with a Jacobian ``[rows, columns]`` and with its transpose."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the vectors live."""
        ...

    def apply(self, vector: Float[Tensor, " N"]) -> Float[Tensor, " M"]:
        """Return ``J vector``."""
        ...

    def adjoint(self, vector: Float[Tensor, " M"]) -> Float[Tensor, " N"]:
        """Return ``J^T vector``."""
        ...


@dataclass(frozen=True)
class JacobianProblem:
    """One Jacobian in the three forms the methods need.

    Attributes:
        operator: Products with J and its transpose.
        gram: Builds the lower triangle of ``J J^T`` anew.
        dense: Builds a matrix with the singular values of J (the non-zero ones at least).
    """

    operator: JacobianOperator
    gram: Callable[[], Float[Tensor, "M M"]]
    dense: Callable[[], Float[Tensor, "M N"]]


class WeightJacobian:
    """J of one head to its flattened q, k, v weights, by structure: O(T S D + T E D) a product."""

    def __init__(self, linear: LinearisedHead):
        self.linear = linear
        head = linear.head
        self._inputs = (head.query_input, head.key_input, head.value_input)
        self._weights = (head.q_weight, head.k_weight, head.v_weight)
        self.shape = (math.prod(linear.output_shape), sum(w.numel() for w in self._weights))
        self.device = linear.query.device

    def apply(self, vector: Tensor) -> Tensor:
        parts = vector.split([weight.numel() for weight in self._weights])
        tangents = [
            states @ part.view_as(weight)
            for states, part, weight in zip(self._inputs, parts, self._weights, strict=True)
        ]
        return self.linear.push(*tangents).flatten()

    def adjoint(self, vector: Tensor) -> Tensor:
        gradients = self.linear.pull(vector.view(self.linear.output_shape))
        pairs = zip(self._inputs, gradients, strict=True)
        return torch.cat([(states.mT @ gradient).flatten() for states, gradient in pairs])


class InputJacobian:
    """J of one self-attention head to its flattened hidden states, by structure."""

    def __init__(self, linear: LinearisedHead):
        self.linear = linear
        head = linear.head
        weights = (head.q_weight, head.k_weight, head.v_weight)
        self._weights = [weight[: head.embed_dim] for weight in weights]
        columns = len(head.query_input) * head.embed_dim
        self.shape = (math.prod(linear.output_shape), columns)
        self.device = linear.query.device

    def apply(self, vector: Tensor) -> Tensor:
        tangent = vector.view(len(self.linear.query), -1)
        return self.linear.push(*(tangent @ weight for weight in self._weights)).flatten()

    def adjoint(self, vector: Tensor) -> Tensor:
        query, key, value = self.linear.pull(vector.view(self.linear.output_shape))
        to_query, to_key, to_value = self._weights
        return (query @ to_query.mT + key @ to_key.mT + value @ to_value.mT).flatten()


class FunctionJacobian:
    """J of any differentiable function of tensors, exact, by reverse mode only.

    ``J^T u`` is a gradient; ``J v`` is the gradient of ``u -> J^T u`` pulled back with v, so that
    no operation needs a forward-mode rule.
    """

    def __init__(self, function: Callable[..., Tensor], inputs: Sequence[Tensor]):
        inputs = [tensor.detach().to(torch.float64) for tensor in inputs]
        with sdpa_kernel(SDPBackend.MATH):  # the only one with a second derivative
            output, pull = torch.func.vjp(function, *inputs)[:2]
        came = f"output of dtype {output.dtype}"
        require(output.dtype == torch.float64, "the function must compute in float64", came)
        self._output_shape, self._inputs, self._pull = output.shape, inputs, pull
        self._push = torch.func.vjp(pull, torch.zeros_like(output))[1]
        self.shape = (output.numel(), sum(tensor.numel() for tensor in inputs))
        self.device = output.device

    def apply(self, vector: Tensor) -> Tensor:
        parts = vector.split([tensor.numel() for tensor in self._inputs])
        tangents = [p.view_as(t) for p, t in zip(parts, self._inputs, strict=True)]
        return self._push(tuple(tangents))[0].detach().flatten()

    def adjoint(self, vector: Tensor) -> Tensor:
        gradients = self._pull(vector.view(self._output_shape))
        return torch.cat([gradient.detach().flatten() for gradient in gradients])


def smaller_gram(operator: JacobianOperator) -> tuple[Callable[[Tensor], Tensor], int]:
    """Products with ``J J^T`` or ``J^T J``, whichever is smaller; both have J's sigma squared.

    Args:
        operator: J.

    Returns:
        The product, and the size of its vectors.
    """
    rows, columns = operator.shape
    if rows <= columns:
        return (lambda vector: operator.apply(operator.adjoint(vector))), rows
    return (lambda vector: operator.adjoint(operator.apply(vector))), columns


def dense_jacobian(operator: JacobianOperator) -> Float[Tensor, "M N"]:
    """J itself, one product for each row or column, whichever are fewer.

    Args:
        operator: J; meant for small ones.

    Returns:
        ``[rows, columns]`` float64.
    """
    rows, columns = operator.shape
    units = torch.eye(min(rows, columns), dtype=torch.float64, device=operator.device)
    if rows <= columns:
        return torch.stack([operator.adjoint(unit) for unit in units])
    return torch.stack([operator.apply(unit) for unit in units], dim=1)

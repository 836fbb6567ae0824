"""The one description of where a model keeps its attention, whatever library wrote it.

Initialisers, spectra, Jacobians, monitors and conversion speak to an ``AttentionSite`` and to
nothing else, so that fused qkv, separate q/k/v, transposed Conv1D, per-head interleaved and
grouped layouts all look the same.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn


@dataclass
class ProjectionWeights:
    """The logical projections of one attention, as the papers write them (``hidden_states @ W``).

    Attributes:
        q_weight: ``[E, H D]``; head h owns columns ``h D .. (h + 1) D``.
        k_weight: ``[Ekv, Hkv D]``.
        v_weight: ``[Ekv, Hkv D]``.
        o_weight: ``[H D, E]``, or None where the host has no output projection.
        q_bias: ``[H D]`` or None where the host has none. Likewise the other three.
    """

    q_weight: Tensor
    k_weight: Tensor
    v_weight: Tensor
    o_weight: Tensor | None
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> "ProjectionWeights":
        """Return a copy with ``change`` applied to every tensor that is there.

        Args:
            change: A function from tensor to tensor.

        Returns:
            The new weights.
        """
        old = {field.name: getattr(self, field.name) for field in fields(self)}
        return ProjectionWeights(**{k: None if t is None else change(t) for k, t in old.items()})


@dataclass
class AttentionSite:
    """Where one attention of a model lives and what it looks like.

    A subclass for a library (or for one user's module: about ten lines) says how weights are read
    and written; everything else is data.

    Attributes:
        name: Dotted path in the model.
        module: The host's attention module.
        layer_idx: Position among the sites of the model, from 0.
        embed_dim: E, width of the query side's input.
        num_heads: H.
        num_kv_heads: Hkv.
        head_dim: D.
        scale: The factor on the dot product that the host uses.
        is_causal: Whether the host masks the future.
        kind: "self", "cross", "window", "cross_covariance" or "channel": what attends to what.
        kv_embed_dim: Width of the key side's input; ``embed_dim`` unless the kind is "cross".
        q_norm: The host's own norm on queries after projection, or None. ``k_norm`` likewise.
        has_rope: Whether the host rotates queries and keys.
        has_position_bias: Whether the host adds a (relative) position bias to the scores.
        soft_cap: The host's own tanh cap on scores, or None.
        has_sink: Whether the host already has a learned sink.
    """

    name: str
    module: nn.Module
    layer_idx: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    is_causal: bool = False
    kind: str = "self"
    kv_embed_dim: int | None = None
    q_norm: nn.Module | None = None
    k_norm: nn.Module | None = None
    has_rope: bool = False
    has_position_bias: bool = False
    soft_cap: float | None = None
    has_sink: bool = False

    def read(self) -> ProjectionWeights:
        """Return copies of the weights in the one logical layout, in the host's dtype and device.

        Returns:
            The weights; changing them does not change the host.

        Raises:
            NotImplementedError: The subclass does not say how its weights are stored.
        """
        raise NotImplementedError(f"{type(self).__name__}.read says how the weights are stored")

    def write(self, weights: ProjectionWeights) -> None:
        """Write weights in the logical layout back into the host, in place.

        Args:
            weights: As ``read`` returns them; a bias the host does not have must be None.

        Raises:
            NotImplementedError: The subclass does not say how its weights are stored.
        """
        raise NotImplementedError(f"{type(self).__name__}.write says how the weights are stored")

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that ``write`` would change.

        Raises:
            NotImplementedError: The subclass does not say how its weights are stored.
        """
        raise NotImplementedError(f"{type(self).__name__}.parameters names what write changes")


@torch.no_grad()
def copy_into(parameter: Tensor, values: Tensor) -> None:
    """Copy values into a parameter in place, keeping its dtype, device and ``requires_grad``.

    Args:
        parameter: The host's tensor (or a view of it).
        values: What it shall hold, same shape.
    """
    parameter.copy_(values)

"""The one description of where a model keeps its attention, whatever library wrote it.

Initialisers, spectra, Jacobians, monitors and conversion speak to an ``AttentionSite`` and to
nothing else, so that fused qkv, separate q/k/v, transposed Conv1D, per-head interleaved and
grouped layouts all look the same.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.shapes import require, require_known
from levelhead.sites.layout import Layout, ProjectionWeights

KINDS = ("self", "cross", "window", "class", "landmark", "cross_covariance", "channel")


@dataclass(kw_only=True)
class AttentionSite:
    """Where one attention of a model lives and what it looks like.

    Sizes are read off the stored weights; everything else is said by the reader of the library
    (for a module of your own, see docs/own_module.md).

    Attributes:
        name: Dotted path in the model.
        module: The host's attention module, the one whose forward computes the attention.
        layout: Where its projections are stored.
        num_heads: H.
        scale: The factor on the dot product of (normed) query and key that the host uses,
            wherever in its code it applies it.
        head_scale: The host's learned factor per head ``[H, 1, 1]`` as it is now, on top of
            ``scale``; None where it has none.
        layer_idx: Position among the sites of the model, from 0.
        kind: "self"; "cross" (keys from elsewhere); "window" (self, inside windows); "class"
            (only the class token asks); "landmark" (self, approximated through a few mean
            tokens); "cross_covariance" and "channel" (softmax over the channels of a head:
            scores ``[B, H, D, D]``).
        is_causal: Whether the host masks the future.
        q_norm: The host's own norm on queries after projection, or None. ``k_norm`` likewise.
        norm_spans_heads: Whether these norms take all heads of a token: to norm them together
            (OLMo-2) or with gains for each (Cohere).
        is_cosine: Whether the host scales queries and keys to unit length.
        has_rope: Whether the host rotates queries and keys; a YaRN rotation stretches both too,
            which is not in ``scale``.
        has_position_bias: Whether the host adds a (relative) position bias to the scores.
        soft_cap: The host's own tanh cap on scores, or None.
        sink_score: The host's learned sink ``[H]``, or None.
        window_size: Width of a sliding window in tokens, (height, width) of an image window, or
            None.
        has_gate: Whether the host gates the attention output.
        output_norm: The host's own norm on the attention output before ``o``, or None.
        dropout_p: Probability of dropping an attention weight in training, as built.
        tied_with: Names of other sites that share a parameter with this one.
        host: How ``levelhead.convert`` makes the module run other attention
            (``levelhead.sites.host.Host``); None for the host of the module's library.
        num_kv_heads: Hkv, from the stored weights.
        head_dim: D, likewise.
        v_head_dim: Width of a value head; D almost always.
        embed_dim: E, width of the query side's input.
        kv_embed_dim: Width of the key side's input; E unless the kind is "cross".
        v_embed_dim: Width of what values are made of; that of keys but for torch's ``vdim``.
    """

    name: str
    module: nn.Module
    layout: Layout
    num_heads: int
    scale: float
    head_scale: Callable[[], Tensor] | None = None
    layer_idx: int = 0
    kind: str = "self"
    is_causal: bool = False
    q_norm: nn.Module | None = None
    k_norm: nn.Module | None = None
    norm_spans_heads: bool = False
    is_cosine: bool = False
    has_rope: bool = False
    has_position_bias: bool = False
    soft_cap: float | None = None
    sink_score: nn.Parameter | None = None
    window_size: int | tuple[int, int] | None = None
    has_gate: bool = False
    output_norm: nn.Module | None = None
    dropout_p: float = 0.0
    tied_with: tuple[str, ...] = ()
    host: Any = None
    num_kv_heads: int = field(init=False)
    head_dim: int = field(init=False)
    v_head_dim: int = field(init=False)
    embed_dim: int = field(init=False)
    kv_embed_dim: int = field(init=False)
    v_embed_dim: int = field(init=False)

    def __post_init__(self) -> None:
        require_known("kind of attention site", self.kind, KINDS)
        q_width, self.embed_dim = self.layout.q.weight.shape
        k_width, self.kv_embed_dim = self.layout.k.weight.shape
        v_width, self.v_embed_dim = self.layout.v.weight.shape
        sizes = f"q {q_width}, k {k_width}, v {v_width} outputs, num_heads={self.num_heads}"
        where = f"{self.name} ({type(self.module).__name__})"
        require(
            self.num_heads > 0 and q_width % self.num_heads == 0,
            f"num_heads must divide the outputs of q at {where}",
            sizes,
        )
        self.head_dim = q_width // self.num_heads
        self.num_kv_heads = k_width // self.head_dim
        fits = self.num_kv_heads > 0 and k_width == self.num_kv_heads * self.head_dim
        require(
            fits and v_width % self.num_kv_heads == 0 and self.num_heads % self.num_kv_heads == 0,
            f"q, k and v must hold whole heads, num_kv_heads dividing num_heads, at {where}",
            sizes,
        )
        self.v_head_dim = v_width // self.num_kv_heads
        if self.layout.o is not None:
            o_inputs = self.layout.o.weight.shape[1]
            require(
                o_inputs == self.num_heads * self.v_head_dim,
                f"the output projection must read all heads at {where}",
                f"{o_inputs} inputs of o, {self.num_heads} heads of width {self.v_head_dim}",
            )

    @property
    def has_sink(self) -> bool:
        """Whether the host already has a learned sink."""
        return self.sink_score is not None

    def read(self) -> ProjectionWeights:
        """Return copies of the weights in the one logical layout, in the host's dtype and device.

        Returns:
            The weights; changing them does not change the host.
        """
        return self.layout.read()

    def write(self, weights: ProjectionWeights) -> None:
        """Write weights in the logical layout back into the host, in place.

        The parameters stay the same objects, with their dtype, device and ``requires_grad``.
        All of them are written or, when one does not fit, none.

        Args:
            weights: As ``read`` returns them; a bias the host does not have must be None.
        """
        self.layout.write(weights)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that ``write`` would change, each once."""
        return self.layout.parameters()


@torch.no_grad()
def copy_into(parameter: Tensor, values: Tensor) -> None:
    """Copy values into a parameter in place, keeping its dtype, device and ``requires_grad``.

    Args:
        parameter: The host's tensor (or a view of it).
        values: What it shall hold, same shape.
    """
    parameter.copy_(values)

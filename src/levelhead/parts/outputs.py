"""Parts on the output of each head."""

from torch import Tensor, nn

from levelhead.kernels_mapped import Mapped
from levelhead.parts.base import AttentionShape, Part
from levelhead.rows import ROW_EPS
from levelhead.shapes import require, require_known
from levelhead.stages.outputs import EquilibrateRows, equilibrate_rows, gate_output


class Precondition(Part):
    """Row equilibration of each head's output."""

    def __init__(self, eps: float = ROW_EPS, detach: bool = False):
        super().__init__()
        require(eps > 0, "eps must be positive", f"eps={eps}")
        self.eps, self.detach_norm = eps, bool(detach)

    def mapped(self) -> Mapped:
        """Return the same as a map that can be undone."""
        return Mapped(EquilibrateRows(self.eps, self.detach_norm))

    def forward(self, attn_output: Tensor, hidden_states: Tensor | None) -> Tensor:
        """Return rows of norm one."""
        return equilibrate_rows(attn_output, self.eps, self.detach_norm)


class Gate(Part):
    """A sigmoid gate on each head's output, computed from the hidden states."""

    def __init__(
        self,
        shape: AttentionShape,
        granularity: str = "elementwise",
        bias: bool | None = None,
    ):
        super().__init__()
        require_known("gate granularity", granularity, ("elementwise", "headwise"))
        width = {"elementwise": shape.num_heads * shape.head_dim, "headwise": shape.num_heads}
        self.gate_proj = nn.Linear(
            shape.embed_dim,
            width[granularity],
            bias=shape.bias if bias is None else bias,
            **shape.factory,
        )

    def reset_parameters(self) -> None:
        self.gate_proj.reset_parameters()

    def forward(self, attn_output: Tensor, hidden_states: Tensor | None) -> Tensor:
        """Return the gated output."""
        assert hidden_states is not None
        return gate_output(attn_output, self.gate_proj(hidden_states))

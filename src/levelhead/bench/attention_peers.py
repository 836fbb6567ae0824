"""The same variants in x-transformers: its own attention layer, on rows that are projected."""

import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

SOFT_CAP = 50.0


class Inputs(Protocol):
    """What a case of the benchmark holds, its heads beside each other in memory.

    Attributes:
        qkv: Queries, keys and values.
        hidden_states: What they would be projected from.
        projected: By width, what another projection of that comes to.
    """

    qkv: list[Tensor]
    hidden_states: Tensor
    projected: dict[int, Tensor]


class Precomputed(nn.Module):
    """In the place of a projection: what it came to."""

    def __init__(self, projected: Tensor):
        super().__init__()
        self.projected = projected

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return it."""
        return self.projected


class _Rows(nn.Module):
    """In the place of a projection: the rows of this call, their heads merged."""

    rows: Tensor

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.rows.transpose(1, 2).flatten(2)


def peer_options(head_dim: int) -> dict[str, dict[str, Any]]:
    """Return, for each variant that x-transformers has too, how its layer is told to be it.

    Args:
        head_dim: D.
    """
    return {
        "off_by_one": {"flash": True, "add_zero_kv": True},
        "sink": {"head_learned_sink": True},  # refuses flash
        "qknorm": {"flash": True, "qk_norm": True, "qk_norm_scale": 1.0},
        "qknorm_hs": {"flash": True, "qk_norm": True, "qk_norm_scale": head_dim**0.5},
        "qknorm_ds": {"flash": True, "qk_rmsnorm": True},
        f"soft_cap(cap={SOFT_CAP})": {"softclamp_logits": True, "logit_softclamp_value": SOFT_CAP},
        "gate": {"flash": True, "gate_values": True},
    }


def peer_version() -> str | None:
    """Return which x-transformers is installed, or None."""
    if importlib.util.find_spec("x_transformers") is None:
        return None
    return importlib.metadata.version("x-transformers")


def peers(case: Inputs) -> dict[str, Callable[..., Tensor]]:
    """Return causal attention as x-transformers has it, where it is installed.

    Its layer runs as it is; projections alone are replaced by what they come to, as for
    levelhead's own variants.

    Args:
        case: The tensors of the benchmark.

    Returns:
        Variant to ``(query, key, value) -> output``; empty without x-transformers.
    """
    if peer_version() is None:
        return {}
    return {
        variant: _attend_with(options, case)
        for variant, options in peer_options(case.qkv[0].shape[3]).items()
    }


def _attend_with(options: dict[str, Any], case: Inputs) -> Callable[..., Tensor]:
    from x_transformers.x_transformers import Attention

    _, num_heads, _, head_dim = case.qkv[0].shape
    width = num_heads * head_dim
    layer: Any = Attention(width, heads=num_heads, dim_head=head_dim, causal=True, **options)
    layer.to(case.hidden_states)
    rows = [_Rows() for _ in range(3)]
    layer.to_q, layer.to_k, layer.to_v = rows
    layer.to_out = nn.Identity()
    if layer.to_v_gate is not None:
        layer.to_v_gate = Precomputed(case.projected[width])

    def attend(*qkv: Tensor) -> Tensor:
        for module, given in zip(rows, qkv, strict=True):
            module.rows = given
        attn_output = layer(case.hidden_states)
        return attn_output.unflatten(2, (num_heads, head_dim)).transpose(1, 2)

    return attend

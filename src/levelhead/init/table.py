"""The table of initialisers, and what each computes for one attention."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from levelhead.init.conditioned import conditioned
from levelhead.init.mimetic import (
    QK_IDENTITY,
    QK_NOISE,
    VO_IDENTITY,
    VO_NOISE,
    mimetic_qk,
    mimetic_vo,
)
from levelhead.init.orthogonal import orthogonal, xavier
from levelhead.init.weight_selection import weight_selection
from levelhead.shapes import require


@dataclass(frozen=True)
class HostProjections:
    """The projections of one attention in the logical layout, as an initialiser sees them.

    Attributes:
        q: ``[E, H D]``.
        k: ``[Ekv, Hkv D]``.
        v: ``[Ekv, Hkv D]``.
        o: ``[H D, E]``, or None where the host has no output projection.
        num_heads: H.
        num_kv_heads: Hkv.
        generator: Random source; None uses torch's global one.
        v_bias: ``[Hkv D]``, or None where the host has none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor | None
    num_heads: int
    num_kv_heads: int
    generator: torch.Generator | None
    v_bias: Tensor | None = None

    @property
    def head_counts(self) -> dict[str, int]:
        """H and Hkv as keyword arguments."""
        return {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads}


MATRICES = ("q", "k", "v", "o")

Fresh = Mapping[str, Tensor]


def _no_notes(host: HostProjections, **options: Any) -> list[str]:
    return []


@dataclass(frozen=True)
class InitializerInfo:
    """One row of the table.

    Attributes:
        name: What it is called in ``levelhead.initialize_``.
        equation: In the names of this library.
        source: Where it comes from.
        touches: What it changes; everything else stays as the host made it.
        when: When to use it.
        compute: From the host's projections (the state dict, for a whole model) and the options,
            which are keywords, to the fresh matrices by name.
        matrices: Names of the matrices it changes.
        promises_products: Whether its promise is on the products q k^T and v o.
        whole_model: Whether it works on the state dict instead of on each attention.
        notes: Which of its conditions a host does not meet, in words.
    """

    name: str
    equation: str
    source: str
    touches: str
    when: str
    compute: Callable[..., Fresh]
    matrices: tuple[str, ...] = MATRICES
    promises_products: bool = False
    whole_model: bool = False
    notes: Callable[..., list[str]] = _no_notes

    @property
    def options(self) -> dict[str, Any]:
        """The options and their defaults (``Parameter.empty``: must be given)."""
        parameters = inspect.signature(self.compute).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}

    def as_dict(self) -> dict[str, Any]:
        """Return the row as plain data.

        Returns:
            Every column but ``compute``; the options with their defaults.
        """
        options = {
            name: "required" if default is inspect.Parameter.empty else default
            for name, default in self.options.items()
        }
        columns = ("name", "equation", "source", "touches", "when")
        return {column: getattr(self, column) for column in columns} | {"options": options}


def _default(host: HostProjections) -> Fresh:
    return {}


def _conditioned(host: HostProjections, *, value: str = "fused", gain: float | str = 1.0) -> Fresh:
    options = {"value": value, "gain": gain, "generator": host.generator}
    q, k, v = conditioned(host.q, host.k, host.v, **host.head_counts, **options)
    return {"q": q, "k": k, "v": v}


def _conditioned_notes(
    host: HostProjections, *, value: str = "fused", gain: float | str = 1.0
) -> list[str]:
    """Say why ``X W_V = X`` does not hold, where the fused identity could promise it."""
    notes: list[str] = []
    if value == "fused" and gain == 1.0 and host.v.shape[0] != host.v.shape[1]:
        notes.append(
            f"hidden_states @ v_weight keeps {host.v.shape[1]} of {host.v.shape[0]} "
            "coordinates, because Hkv D is not E"
        )
    if host.v_bias is not None and bool(host.v_bias.any()):
        notes.append("the value bias is not zero, and stays as the host made it")
    return notes


def _mimetic(
    host: HostProjections,
    *,
    qk_noise: float = QK_NOISE,
    qk_identity: float = QK_IDENTITY,
    vo_noise: float = VO_NOISE,
    vo_identity: float = VO_IDENTITY,
) -> Fresh:
    o_weight = _output(host, "mimetic")
    common = {**host.head_counts, "generator": host.generator}
    q, k = mimetic_qk(host.q, host.k, noise=qk_noise, identity=qk_identity, **common)
    v, o = mimetic_vo(host.v, o_weight, noise=vo_noise, identity=vo_identity, **common)
    return {"q": q, "k": k, "v": v, "o": o}


def _orthogonal(host: HostProjections, *, gain: float | str = 1.0) -> Fresh:
    weights = _present(host)
    return {n: orthogonal(w, gain=gain, generator=host.generator) for n, w in weights.items()}


def _xavier(host: HostProjections, *, gain: float = 1.0) -> Fresh:
    weights = _present(host)
    return {n: xavier(w, gain=gain, generator=host.generator) for n, w in weights.items()}


def _present(host: HostProjections) -> dict[str, Tensor]:
    weights = {"q": host.q, "k": host.k, "v": host.v, "o": host.o}
    return {name: weight for name, weight in weights.items() if weight is not None}


def _output(host: HostProjections, name: str) -> Tensor:
    require(
        host.o is not None,
        f"{name} makes a promise on v and o together and needs an output projection",
        "an attention without one",
        "conditioned, orthogonal, xavier",
    )
    assert host.o is not None
    return host.o


_TABLE = (
    InitializerInfo(
        "default", "as the host made it", "the host", "nothing",
        "the baseline every comparison needs", _default,
        matrices=(),
    ),
    InitializerInfo(
        "conditioned", "W_Q^T W_Q = W_K^T W_K = I_D per head, W_V = I",
        "Saratchandran & Lucey, ICLR 2026",
        "q, k and v weights; not o, not biases",
        "training from scratch: every head starts with condition number 1; gain='match' keeps the "
        "host's scale", _conditioned,
        matrices=("q", "k", "v"), notes=_conditioned_notes,
    ),
    InitializerInfo(
        "mimetic", "W_Q W_K^T ~ .7 Z + .7 I per head, W_V W_O ~ .4 Z - .4 I per layer",
        "Trockman & Kolter 2023, arXiv 2305.09828",
        "q, k, v and o weights; not biases, not position embeddings",
        "small data: attention starts looking like that of trained vision models", _mimetic,
        promises_products=True,
    ),
    InitializerInfo(
        "weight_selection", "entries arange(s) t / s, else round(linspace(0, t - 1, s))",
        "Xu et al. 2024, arXiv 2311.18823",
        "every weight of the model but the classifier head",
        "a larger trained model of the same family is at hand", weight_selection,
        whole_model=True,
    ),
    InitializerInfo(
        "orthogonal", "the shorter side of each whole matrix is orthonormal",
        "Saxe et al. 2014, arXiv 1312.6120",
        "q, k, v and o weights; not biases",
        "a control for conditioned: orthogonal without heads and without the identity",
        _orthogonal,
    ),
    InitializerInfo(
        "xavier", "W_ij ~ N(0, 2 / (fan_in + fan_out)), fans of each logical matrix",
        "Glorot & Bengio 2010",
        "q, k, v and o weights; not biases",
        "a control: the same variance in fused and separate layouts", _xavier,
    ),
)  # fmt: skip

INITIALIZERS: Mapping[str, InitializerInfo] = {info.name: info for info in _TABLE}


def initializers() -> list[InitializerInfo]:
    """Return the table of initialisers.

    Returns:
        One row per initialiser.
    """
    return list(_TABLE)

"""The table of attention variants and the string form that names them."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from levelhead.parts.base import AttentionShape, Part
from levelhead.parts.normalisers import OffByOne, Sink, Softmax
from levelhead.parts.outputs import Gate, Precondition
from levelhead.parts.projections import Projections, SigmaReparam, spectral
from levelhead.parts.scores import (
    DotProduct,
    QueryKeyNorm,
    QueryKeyNormDimensionScale,
    QueryKeyNormHeadScale,
    QueryNorm,
    Quest,
    SoftCap,
)
from levelhead.parts.weights import Affine
from levelhead.shapes import require, require_known
from levelhead.terms import Term, parse_terms

__all__ = ["VARIANTS", "Variant", "VariantInfo", "parse_variant", "variants"]

SLOTS = ("projections", "norm", "cap", "normaliser", "weights", "precondition", "gate")
_FUSED = "never builds a T x S matrix"


@dataclass(frozen=True)
class VariantInfo:
    """One row of the table.

    Attributes:
        name: The term.
        stage: Which of the five stages it belongs to.
        slot: Its place within the stage; two terms of one slot exclude each other.
        equation: In the names of this library.
        source: Where it comes from.
        parameters: What it adds, in the letters of ``levelhead.shapes``.
        neutral: The setting at which it is plain softmax attention, or "none".
        when: When to use it.
        fused: How the fused form runs.
        build: Makes the part from the host's shape and the term's options.
        needs_hidden_states: Whether the part reads the input of the attention.
    """

    name: str
    stage: str
    slot: str
    equation: str
    source: str
    parameters: str
    neutral: str
    when: str
    build: Callable[..., Part]
    needs_hidden_states: bool = False
    fused: str = _FUSED

    @property
    def options(self) -> dict[str, Any]:
        """The options of the term and their defaults (``Parameter.empty``: must be given)."""
        parameters = inspect.signature(self.build).parameters
        return {name: p.default for name, p in parameters.items() if name != "shape"}

    def as_dict(self) -> dict[str, Any]:
        """Return the row as plain data.

        Returns:
            Every column but ``build``; the options with their defaults.
        """
        row = asdict(self)
        del row["build"]
        row["options"] = {
            name: "required" if default is inspect.Parameter.empty else default
            for name, default in self.options.items()
        }
        return row

    def make(self, shape: AttentionShape, options: Mapping[str, Any]) -> Part:
        """Build the part.

        Args:
            shape: The host.
            options: The term's options.

        Returns:
            A new part.
        """
        takes_shape = "shape" in inspect.signature(self.build).parameters
        return self.build(*((shape,) if takes_shape else ()), **options)


_TABLE = (
    VariantInfo(
        "softmax", "normaliser", "normaliser",
        "attn_weights = softmax(scale * query @ key^T)",
        "Vaswani et al. 2017, arXiv 1706.03762", "0", "itself",
        "the baseline", Softmax,
    ),
    VariantInfo(
        "off_by_one", "normaliser", "normaliser",
        "attn_weights[s] = exp(scores[s]) / (1 + sum_j exp(scores[j]))",
        "Miller 2023, 'Attention is off by one'", "0", "none",
        "a head should be able to attend to nothing, without new parameters", OffByOne,
    ),
    VariantInfo(
        "sink", "normaliser", "normaliser",
        "attn_weights[s] = exp(scores[s]) / (exp(sink_score) + sum_j exp(scores[j]))",
        "OpenAI 2025, GPT-OSS, arXiv 2508.10925", "H", "start=-1e4 (exp of it is 0)",
        "the first token soaks up attention; GPT-OSS's remedy", Sink,
    ),
    VariantInfo(
        "quest", "scores", "norm",
        "scores = query @ (key / ||key||)^T",
        "Govindarajan et al. 2026, arXiv 2604.00199", "0", "none",
        "logits explode or a few keys shout; the score is at most the query's norm", Quest,
    ),
    VariantInfo(
        "qnorm", "scores", "norm",
        "scores = (query / ||query||) @ key^T",
        "Govindarajan et al. 2026, arXiv 2604.00199 (ablation)", "0", "none",
        "a control for quest: the norm on the other side", QueryNorm,
    ),
    VariantInfo(
        "qknorm", "scores", "norm",
        "scores = (query / ||query||) @ (key / ||key||)^T",
        "Henry et al. 2020, arXiv 2010.04245, without its scale", "0", "none",
        "a control: scores in [-1, 1] are nearly uniform attention", QueryKeyNorm,
    ),
    VariantInfo(
        "qknorm_hs", "scores", "norm",
        "scores = head_scale * (query / ||query||) @ (key / ||key||)^T, "
        "head_scale starts at sqrt(D)",
        "Henry et al. 2020, arXiv 2010.04245; scale per head", "H", "none",
        "bounded logits with one learned temperature per head", QueryKeyNormHeadScale,
    ),
    VariantInfo(
        "qknorm_ds", "scores", "norm",
        "scores = (q_scale * query / ||query||) @ (k_scale * key / ||key||)^T, "
        "both start at D^(1/4)",
        "Dehghani et al. 2023, arXiv 2302.05442; RMS form", "2 D", "none",
        "what most large models do today (q_norm and k_norm with gains)",
        QueryKeyNormDimensionScale,
    ),
    VariantInfo(
        "soft_cap", "scores", "cap",
        "scores = cap * tanh(scores / cap)",
        "Gemma Team 2024, arXiv 2408.00118", "0", "cap -> inf",
        "a hard bound on scores where a norm is not wanted", SoftCap,
        fused="on a CPU tiles of scores in a core's cache: in float32 (caps up to 83) by a C "
        "kernel compiled when first needed (Linux, AVX2, a C compiler; README), by torch's "
        "operators without one, with a bias and in float64. Elsewhere, for no fused kernel of "
        "torch caps scores, the plain form over blocks of queries, recomputed in the backward "
        "pass (kept for torch.func); the whole T x S form when compiled by torch",
    ),
    VariantInfo(
        "affine", "weights", "weights",
        "attn_weights = alpha * softmax(scores) + (alpha_mean - alpha) / N, "
        "alpha = phi(hidden_states @ W_a)",
        "Bae et al. 2026, arXiv 2602.23057", "E H",
        "none; W_a = 0 and alpha_mean = .5 give half of softmax",
        "gradient noise and sinks in language models; weights may be negative", Affine,
        needs_hidden_states=True,
    ),
    VariantInfo(
        "precondition", "output", "precondition",
        "attn_output[t] = attn_output[t] / ||attn_output[t]||",
        "Saratchandran 2026, arXiv 2603.27153", "0", "none",
        "output rows of very different norms make the attention Jacobian ill-conditioned",
        Precondition,
    ),
    VariantInfo(
        "gate", "output", "gate",
        "attn_output = attn_output * sigmoid(hidden_states @ W_g)",
        "Qiu et al. 2025, arXiv 2505.06708 (position G1)",
        "E H D elementwise, E H headwise", "W_g = 0 and bias -> inf (bias=True)",
        "sinks and loss spikes in language models, if parameters may be added", Gate,
        needs_hidden_states=True,
    ),
    VariantInfo(
        "spectral", "projections", "projections",
        "hidden_states @ (W + strength * I) for q, k and v",
        "Saratchandran & Lucey 2025, arXiv 2603.07162", "0", "strength = 0",
        "ill-conditioned projections; look at the score scale, the default saturates LayerNormed "
        "inputs", spectral,
    ),
    VariantInfo(
        "sigma_reparam", "projections", "projections",
        "hidden_states @ (sigma / ||W||_2) W for q, k and v",
        "Zhai et al. 2023, arXiv 2303.06296", "3", "the start: sigma = ||W||_2",
        "entropy collapse: the spectral norm of each projection is a learned number", SigmaReparam,
    ),
)  # fmt: skip

VARIANTS: Mapping[str, VariantInfo] = {info.name: info for info in _TABLE}


def variants() -> list[VariantInfo]:
    """Return the table of variant terms.

    Returns:
        One row per term, in the order of the stages' importance.
    """
    return list(_TABLE)


@dataclass(frozen=True)
class Variant:
    """A legal choice of terms, at most one in each slot.

    Attributes:
        terms: The terms that differ from plain softmax attention, in the order of the slots.
    """

    terms: tuple[Term, ...] = ()

    def __str__(self) -> str:
        return " + ".join(map(str, self.terms)) or "softmax"

    def slot(self, name: str) -> Term | None:
        """Return the term in one slot.

        Args:
            name: The slot.

        Returns:
            The term, or None where the slot keeps its default.
        """
        return next((term for term in self.terms if VARIANTS[term.name].slot == name), None)

    @property
    def needs_hidden_states(self) -> bool:
        """Whether a part reads the input of the attention."""
        return any(VARIANTS[term.name].needs_hidden_states for term in self.terms)

    @property
    def has_projections(self) -> bool:
        """Whether a part changes the projections, which live outside the inner attention."""
        return self.slot("projections") is not None


def parse_variant(text: "str | Variant") -> Variant:
    """Read a variant string.

    Args:
        text: ``term (+ term)*``; order does not matter. A ``Variant`` is returned as it is.

    Returns:
        The variant; ``parse_variant(str(variant)) == variant``.

    Raises:
        ValueError: An unknown term or option, two terms of one slot, or a refused pair.
    """
    if isinstance(text, Variant):
        return text
    taken: dict[str, Term] = {}
    for term in parse_terms(text):
        require_known("variant term", term.name, VARIANTS)
        info = VARIANTS[term.name]
        _check_options(info, term)
        if info.slot in taken:
            raise ValueError(
                f"{taken[info.slot].name} and {term.name} both belong to the stage "
                f"{info.stage}, which takes one of them"
            )
        taken[info.slot] = term
    _refuse_cancelled_sink(taken)
    chosen = [taken[slot] for slot in SLOTS if slot in taken]
    return Variant(tuple(term for term in chosen if term != Term("softmax")))


def _check_options(info: VariantInfo, term: Term) -> None:
    known = info.options
    for name in term.options:
        require(
            name in known,
            f"{term.name} takes other options",
            f"{name}={term.options[name]!r}",
            ", ".join(known) or "no option",
        )
        annotation = inspect.signature(info.build).parameters[name].annotation
        require(
            _fits(term.options[name], annotation),
            f"{term.name} needs {name} of another type",
            f"{name}={term.options[name]!r}",
            getattr(annotation, "__name__", str(annotation)),
        )
    missing = [
        name for name, default in known.items()
        if default is inspect.Parameter.empty and name not in term.options
    ]  # fmt: skip
    require(
        not missing, f"{term.name} needs {', '.join(missing)}", str(term),
        f"{term.name}({', '.join(f'{name}=...' for name in missing)})",
    )  # fmt: skip


def _fits(value: Any, annotation: Any) -> bool:
    if annotation is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, annotation)


def _refuse_cancelled_sink(taken: Mapping[str, Term]) -> None:
    normaliser = taken.get("normaliser", Term("softmax"))
    if "precondition" in taken and normaliser.name != "softmax":
        raise ValueError(
            f"precondition with {normaliser.name} is refused: row equilibration cancels any "
            "positive factor of a row exactly, so the sink would change nothing and get no "
            "gradient; use one of the two"
        )


def make_parts(variant: Variant, shape: AttentionShape) -> dict[str, Any]:
    """Build the parts of a variant, one per slot that is not left out.

    Args:
        variant: What to build.
        shape: The host.

    Returns:
        Slot to part; the slots "projections", "norm" and "normaliser" are always there.
    """
    parts: dict[str, Any] = {
        "projections": Projections(), "norm": DotProduct(), "normaliser": Softmax()
    }  # fmt: skip
    for term in variant.terms:
        info = VARIANTS[term.name]
        parts[info.slot] = info.make(shape, term.options)
    return parts

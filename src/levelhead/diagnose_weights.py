"""What the weights of one site say, and their bounds: spectra, finiteness, Lipschitz, Jacobian."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from levelhead.diagnose_calls import FirstTokens
from levelhead.diagnose_forms import head_forms
from levelhead.diagnose_rows import SiteRows
from levelhead.diagnosis import WHOLE_LAYER, Record
from levelhead.inner import InnerAttention
from levelhead.measure.head import HeadForm
from levelhead.measure.jacobian import jacobian_condition
from levelhead.measure.lipschitz import lipschitz_bound
from levelhead.measure.spectra import AttentionSpectra, MatrixSpectra, attention_spectra
from levelhead.measure.surrogate import jacobian_bound, jacobian_surrogate
from levelhead.sites.layout import ProjectionWeights
from levelhead.sites.sites import AttentionSite

SPECTRUM = {
    "kappa": "largest over smallest singular value",
    "spectral_norm": "largest singular value",
    "stable_rank": "sum sigma^2 / max sigma^2",
    "effective_rank": "exp(entropy of the singular values)",
}
"""Numbers of each head's matrices; products q k and v o have ``alignment`` as well."""


def weight_records(site: AttentionSite, weights: ProjectionWeights) -> Iterator[Record]:
    """Yield the spectra of one site, each head and each whole matrix.

    Args:
        site: Where.
        weights: Its projections.

    Yields:
        Numbers.
    """
    spectra = attention_spectra(
        weights.q_weight, weights.k_weight, weights.v_weight, weights.o_weight,
        num_heads=site.num_heads, num_kv_heads=site.num_kv_heads,
    )  # fmt: skip
    for part in ("q", "k", "v", "o", "qk", "vo"):
        found: MatrixSpectra | None = getattr(spectra, part)
        if found is not None:
            yield from _by_head(site, part, found)
    yield from _whole(site, spectra)


def _by_head(site: AttentionSite, part: str, found: MatrixSpectra) -> Iterator[Record]:
    times = site.num_heads // len(found.kappa)
    words = dict(SPECTRUM)
    if found.alignment is not None:
        words["alignment"] = "cosine with the identity"
    for name, meaning in words.items():
        for head, value in enumerate(getattr(found, name).repeat_interleave(times).tolist()):
            text = f"{meaning}, of {PARTS[part]} of the head"
            yield Record(site.name, site.layer_idx, head, f"{name}_{part}", value, text)


PARTS = {
    "q": "W_Q", "k": "W_K", "v": "W_V", "o": "W_O", "qk": "W_Q W_K^T", "vo": "W_V W_O",
}  # fmt: skip


def _whole(site: AttentionSite, spectra: AttentionSpectra) -> Iterator[Record]:
    for part in ("q", "k", "v", "o", "vo"):
        found: MatrixSpectra | None = getattr(spectra.fused, part)
        if found is None:
            continue
        for name, meaning in SPECTRUM.items():
            text = f"{meaning}, of the whole {PARTS[part]}, all heads"
            value = float(getattr(found, name))
            yield Record(
                site.name, site.layer_idx, WHOLE_LAYER, f"{name}_{part}_fused", value, text
            )


def num_nonfinite(weights: ProjectionWeights) -> int:
    """Count the entries of the projections that are NaN or infinite.

    Args:
        weights: Projections and biases.

    Returns:
        How many.
    """
    tensors = [tensor for tensor in vars(weights).values() if tensor is not None]
    return sum(int((~tensor.isfinite()).sum()) for tensor in tensors)


def why_no_bound(site: AttentionSite) -> str:
    """Say why the Lipschitz bound does not hold for a site.

    Args:
        site: Where.

    Returns:
        The reason, or "" where it holds.
    """
    reasons = {
        f"attention of kind {site.kind!r}": site.kind != "self",
        "q and k norms": site.q_norm is not None or site.k_norm is not None or site.is_cosine,
        "rotary embedding": site.has_rope,
        "an output norm or gate": site.output_norm is not None or site.has_gate,
        "no output projection": site.layout.o is None,
        "a learned factor a head": site.head_scale is not None,
        "a variant's own stages": _has_own_stages(site),
        "a scale that is not positive": not is_positive(site.scale),
    }
    return ", ".join(reason for reason, applies in reasons.items() if applies)


def lipschitz_record(site: AttentionSite, weights: ProjectionWeights, radius: float) -> Record:
    """Bound the Lipschitz constant over all inputs as large as those that were seen.

    Args:
        site: One for which ``why_no_bound`` says "".
        weights: Its projections.
        radius: Largest root mean square of a token.

    Returns:
        The number.
    """
    assert weights.o_weight is not None
    bound = lipschitz_bound(
        weights.q_weight, weights.k_weight, weights.v_weight, weights.o_weight,
        num_heads=site.num_heads, num_kv_heads=site.num_kv_heads, radius=radius,
        temperature=1 / site.scale, q_bias=weights.q_bias,
    )  # fmt: skip
    words = f"valid for all inputs whose tokens have a root mean square of {radius:.3g} or less"
    return Record(site.name, site.layer_idx, WHOLE_LAYER, "lipschitz_bound", bound, words)


def why_no_jacobian(site: AttentionSite, rows: SiteRows) -> str:
    """Say why the Jacobian of a site's heads is not taken.

    Args:
        site: Where.
        rows: What its calls said.

    Returns:
        The reason, or "" where it can be taken.
    """
    reasons = {
        f"attention of kind {site.kind!r}": site.kind != "self",
        "hidden states that were not seen": rows.first is None,
        "numbers that are not finite": rows.num_nonfinite > 0 or bool(rows.broken_heads),
    }
    return ", ".join(reason for reason, applies in reasons.items() if applies)


def _has_own_stages(site: AttentionSite) -> bool:
    """Whether more than softmax happens, so that a plain head's Jacobian would be another's."""
    inner = next((m for m in site.module.modules() if isinstance(m, InnerAttention)), None)
    return inner is not None and str(inner.variant) != "softmax"


def jacobian_records(
    site: AttentionSite, weights: ProjectionWeights, first: FirstTokens
) -> Iterator[Record]:
    """Yield kappa of the Jacobian of every head, its valid bound and the papers' surrogate.

    Args:
        site: Where; a self-attention.
        weights: Its projections.
        first: Tokens to look at, attending among themselves.

    Yields:
        Numbers.

    Raises:
        ValueError: What is between projections and softmax, where it is not known.
    """
    states, forms = first.hidden_states, head_forms(site, weights, first)
    among = f"on the first {len(states)} tokens of a sample, attending among themselves"
    for head, form in enumerate(forms):
        bias = None if first.attn_bias is None else first.attn_bias[head]
        options = {"scale": site.scale, "attn_mask": first.attn_mask}
        matrices, biases = _of_head(weights, site, head)
        conditioning = jacobian_condition(
            states, *matrices, **biases, **options, attn_bias=bias, form=form
        )
        how = f"{conditioning.kind}, over the non-zero singular values, to the weights"
        values = {"jacobian_kappa": (conditioning.kappa, f"{how}, {among}")}
        bound = jacobian_bound(states, *matrices, **biases, **options, attn_bias=bias, form=form)
        values["jacobian_bound"] = (bound.kappa, f"upper bound that holds, {among}")
        if form == HeadForm() and bias is None:
            surrogate = jacobian_surrogate(states, *matrices, **options)
            words = f"{surrogate.label}; without biases, {among}"
            values["jacobian_surrogate"] = (surrogate.value, words)
        for metric, (value, words) in values.items():
            yield Record(site.name, site.layer_idx, head, metric, value, words)


def _of_head(
    weights: ProjectionWeights, site: AttentionSite, head: int
) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """The matrices and biases of one query head; a key head serves several."""
    key_head = head * site.num_kv_heads // site.num_heads
    of = {"q": (site.num_heads, head)} | dict.fromkeys("kv", (site.num_kv_heads, key_head))
    matrices = [_columns(getattr(weights, f"{part}_weight"), *of[part]) for part in "qkv"]
    biases = {f"{part}_bias": getattr(weights, f"{part}_bias") for part in "qkv"}
    return matrices, {
        name: None if bias is None else bias.unflatten(0, (of[name[0]][0], -1))[of[name[0]][1]]
        for name, bias in biases.items()
    }


def _columns(weight: Tensor, count: int, index: int) -> Tensor:
    return weight.unflatten(1, (count, -1))[:, index]


def is_positive(scale: float) -> bool:
    """Whether a scale has a temperature.

    Args:
        scale: Factor on the dot product.

    Returns:
        True for finite numbers above zero.
    """
    return math.isfinite(scale) and scale > 0


@torch.no_grad()
def read_finite(site: AttentionSite) -> tuple[ProjectionWeights | None, int, str]:
    """Read a site's projections.

    Args:
        site: Where.

    Returns:
        The weights (None where they cannot be read), how many entries are not finite, and why
        they could not be read.
    """
    try:
        weights = site.read()
    except ValueError as error:
        return None, 0, str(error)
    return weights, num_nonfinite(weights), ""

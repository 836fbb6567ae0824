"""Which terms of a variant make sense for which attention: the one table, with its reasons.

A host has a kind (who attends to what) and terms of its own (a cap, a sink, norms of queries and
keys). What is not refused here combines, in the order of the stages: the host's own norms and
rotation first, then the variant's norm, cap, bias and mask, normaliser, weights, and output terms.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from levelhead.sites.sites import AttentionSite
from levelhead.variants import VARIANTS, Variant

NORMS = ("quest", "qnorm", "qknorm", "qknorm_hs", "qknorm_ds")
SINKS = ("sink", "off_by_one")


@dataclass(frozen=True)
class HostTerm:
    """Something a host's attention is or has.

    Attributes:
        name: What the table calls it.
        holds: Whether a site is or has it.
        refused: Variant terms it does not combine with, and why.
        note: How the other terms combine with it.
    """

    name: str
    holds: Callable[[AttentionSite], bool]
    refused: Mapping[str, str]
    note: str = ""


def _each(names: Sequence[str], why: str) -> dict[str, str]:
    return dict.fromkeys(names, why)


_OVER_CHANNELS = _each(
    ["affine"],
    "its queries are channels, and affine learns one alpha for each query token",
) | _each(
    ["qknorm_ds"],
    "its queries and keys have one coordinate for each token, so gains for each of head_dim "
    "coordinates do not fit",
)
_LANDMARK = (
    "its weights are a product of three softmax matrices, so there is no one row of scores or "
    "weights that {} could act on"
)

HOST_TERMS: tuple[HostTerm, ...] = (
    HostTerm("self-attention", lambda site: site.kind == "self", {}),
    HostTerm(
        "cross-attention", lambda site: site.kind == "cross", {},
        "alpha and gates read the hidden states of the query side",
    ),
    HostTerm("window attention", lambda site: site.kind == "window", {}),
    HostTerm("class attention", lambda site: site.kind == "class", {}),
    HostTerm(
        "cross-covariance attention", lambda site: site.kind == "cross_covariance",
        _OVER_CHANNELS, "rows of the output are channels for precondition, tokens for gate",
    ),
    HostTerm(
        "channel attention", lambda site: site.kind == "channel", _OVER_CHANNELS,
        "rows of the output are channels for precondition, tokens for gate",
    ),
    HostTerm(
        "landmark attention", lambda site: site.kind == "landmark",
        {name: _LANDMARK.format(name) for name in ("affine", "sink", "off_by_one", "soft_cap")},
        "norms act on queries and keys before the landmarks are averaged",
    ),
    HostTerm(
        "causal mask", lambda site: site.is_causal, {},
        "affine counts the keys a query may attend to",
    ),
    HostTerm(
        "sliding window", lambda site: isinstance(site.window_size, int), {},
        "affine counts the keys inside the window",
    ),
    HostTerm(
        "rotary positions", lambda site: site.has_rope, {},
        "qknorm_ds acts before the rotation, as its gains do not commute with it",
    ),
    HostTerm(
        "position bias", lambda site: site.has_position_bias, {},
        "added to the scores after norm and cap",
    ),
    HostTerm(
        "soft cap", lambda site: site.soft_cap is not None,
        _each(["soft_cap"], "the host caps its scores already; change its own cap instead"),
        "the host's cap stays, on the scores a norm leaves",
    ),
    HostTerm(
        "learned sink", lambda site: site.has_sink,
        _each(["sink"], "the host has a learned sink already")
        | _each(["off_by_one"], "the host has a learned sink already, and a row has one sink")
        | _each(
            ["precondition"],
            "row equilibration cancels any positive factor of a row exactly, so the host's sink "
            "would change nothing and get no gradient",
        ),
        "the host's sink stays",
    ),
    HostTerm(
        "norms of queries and keys", lambda site: site.q_norm is not None,
        _each(["qknorm_ds"], "the host has norms with gains on queries and keys already"),
        "the host's norms stay and come first",
    ),
    HostTerm(
        "cosine scores", lambda site: site.is_cosine,
        _each(NORMS, "the host scales queries and keys to unit length already"),
        "the host's learned temperature stays",
    ),
    HostTerm(
        "gate", lambda site: site.has_gate,
        _each(["gate"], "the host gates its output already"), "the host's gate stays, last",
    ),
    HostTerm(
        "norm of the output", lambda site: site.output_norm is not None, {},
        "the host's norm stays, after the output terms",
    ),
)  # fmt: skip
"""Each row: what a host is or has, and what it refuses."""


def refusal(site: AttentionSite, variant: Variant) -> str | None:
    """Say why a variant makes no sense at a site.

    Args:
        site: Where.
        variant: What.

    Returns:
        "term with host term: reason", or None where all terms combine.
    """
    for host in HOST_TERMS:
        for term in variant.terms:
            if term.name in host.refused and host.holds(site):
                return f"{term.name} with {host.name}: {host.refused[term.name]}"
    return None


@dataclass(frozen=True)
class Combinations:
    """The table as rows and as text.

    Attributes:
        rows: One for each pair of host term and variant term: (host, term, refusal or "").
    """

    rows: tuple[tuple[str, str, str], ...]

    def __iter__(self):
        return iter(self.rows)

    def markdown(self) -> str:
        """Return the table in Markdown: one row a host term, "no" where a term is refused."""
        terms = list(dict.fromkeys(term for _, term, _ in self.rows))
        lines = ["| host | " + " | ".join(terms) + " |", "|---" * (len(terms) + 1) + "|"]
        for host in HOST_TERMS:
            cells = ["no" if term in host.refused else "yes" for term in terms]
            lines.append(f"| {host.name} | " + " | ".join(cells) + " |")
        return "\n".join(lines)

    def __str__(self) -> str:
        lines = []
        for host in HOST_TERMS:
            taken = [name for name in _terms() if name not in host.refused]
            everything = "all terms" if not host.refused else ", ".join(taken)
            lines.append(f"{host.name}: {everything}" + (f" ({host.note})" if host.note else ""))
            lines += [f"    not {name}: {why}" for name, why in host.refused.items()]
        return "\n".join(lines)


def _terms() -> list[str]:
    return [name for name in VARIANTS if name != "softmax"]


def combinations() -> Combinations:
    """Return what combines with what: every host term with every variant term.

    Returns:
        Rows (host term, variant term, reason of the refusal or ""); prints as a list with the
        reasons.
    """
    return Combinations(
        tuple(
            (host.name, term, host.refused.get(term, ""))
            for host in HOST_TERMS
            for term in _terms()
        )
    )

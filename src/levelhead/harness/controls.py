"""Controls that tell conditioning from scale, added to a grid and pointed out beside it.

``conditioned`` makes the singular values equal *and* the scores larger; ``conditioned(gain='match')``
makes them equal at the host's scale. ``spectral`` adds ``strength * I``, which conditions and rescales
at once: only the course over the strength, from 0 (the baseline itself) on, shows which of the two acts.
"""  # noqa: E501

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from levelhead.parts.projections import SPECTRAL_STRENGTH
from levelhead.terms import Term, parse_terms
from levelhead.variants import parse_variant

STRENGTHS = (0, 1, SPECTRAL_STRENGTH)
MATCHED = "match"


def with_controls(
    variants: Sequence[str], inits: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Add the controls of what is compared; what has none stays alone.

    Args:
        variants: Variant strings.
        inits: Initialisers.

    Returns:
        Both, each followed by its controls, nothing twice.
    """
    wide = [each for text in variants for each in (_name(text), *_strengths(text))]
    matched = [each for text in inits for each in (text, *_matched(text))]
    return tuple(dict.fromkeys(wide)), tuple(dict.fromkeys(matched))


def control_sentences(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Point out the control of what a table holds, and where it is missing how to add it.

    Args:
        rows: Of the table.

    Returns:
        At most one sentence for ``conditioned`` and one for ``spectral``.
    """
    inits = list(dict.fromkeys(row["init"] for row in rows))
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    return [*_conditioned_sentences(inits), *_spectral_sentences(variants)]


def _conditioned_sentences(inits: Sequence[str]) -> list[str]:
    controls = [control for text in inits for control in _matched(text)]
    if not controls:
        return []
    missing = [control for control in controls if control not in inits]
    there = (
        f"the control is missing: --controls adds {', '.join(missing)}"
        if missing
        else "what conditioning does is what its control shows as well"
    )
    return [
        "conditioned also raises the scale of the scores; conditioned(gain='match') keeps the "
        f"host's: {there}."
    ]


def _spectral_sentences(variants: Sequence[str]) -> list[str]:
    controls = [control for text in variants for control in _strengths(text)]
    if not controls:
        return []
    missing = [control for control in dict.fromkeys(controls) if control not in variants]
    there = (
        f"strengths are missing: --controls adds {', '.join(missing)}"
        if missing
        else "read its rows over the strength"
    )
    return [
        "spectral conditions and rescales the projections at once, and strength 0 is the "
        f"baseline itself: {there}."
    ]


def _matched(text: str) -> Iterable[str]:
    terms = parse_terms(text)
    if len(terms) == 1 and terms[0].name == "conditioned":
        yield str(Term("conditioned", {**terms[0].options, "gain": MATCHED}))


def _strengths(text: str) -> Iterable[str]:
    """The same variant at the other strengths; the svd form has none."""
    terms = parse_terms(_name(text))
    for term in terms:
        if term.name == "spectral" and term.options.get("form", "identity") == "identity":
            own = term.options.get("strength", SPECTRAL_STRENGTH)
            for strength in STRENGTHS:
                if strength != own:
                    changed = _at_strength(term, strength)
                    yield _name(" + ".join(str(changed if t is term else t) for t in terms))


def _at_strength(term: Term, strength: float) -> Term:
    rest = {key: value for key, value in term.options.items() if key != "strength"}
    is_default = strength == SPECTRAL_STRENGTH
    return Term(term.name, rest if is_default else {**rest, "strength": strength})


def _name(variant: str) -> str:
    return str(parse_variant(variant))

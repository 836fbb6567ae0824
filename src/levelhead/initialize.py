"""Initialise the attention of a whole model, and say what came of it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.convert_start import without_factor
from levelhead.effects import SiteEffects, attention_effects
from levelhead.init.blocks import require_data
from levelhead.init.promises import AttentionFacts, attention_facts
from levelhead.init.report import (
    InitReport,
    MatrixRow,
    ProductRow,
    effect_rows,
    matrix_rows,
    product_rows,
)
from levelhead.init.table import INITIALIZERS, MATRICES, HostProjections, InitializerInfo
from levelhead.shapes import require, require_float, require_known
from levelhead.sharding import distribute_like, whole_parameters
from levelhead.sites.build import derive_again
from levelhead.sites.find import find_attention
from levelhead.sites.layout import ProjectionWeights
from levelhead.sites.sites import AttentionSite, copy_into
from levelhead.terms import Term, parse_terms

Rows = tuple[list[MatrixRow], list[ProductRow], list[str]]


@torch.no_grad()
def initialize_(
    model: nn.Module,
    initializer: str = "conditioned",
    *,
    generator: torch.Generator | None = None,
    sites: Sequence[AttentionSite] | None = None,
    batch: Any = None,
    include_frozen: bool = False,
    **options: Any,
) -> InitReport:
    """Initialise the attention of a model in place.

    Names and weights are checked before anything is changed; an attention that the method cannot
    serve is refused when it is reached. Matrices are drawn in one order and dtype in the logical
    layout, computed in float32 or wider and cast once, so one seed gives the same matrices in
    every layout, dtype and device (mimetic in float64 or on another device: matrices of the same
    law, because eigenvectors have no sign of their own). Call it once the weights exist: after
    ``from_pretrained``, ``to_empty`` and every ``reset_parameters``. What a variant keeps of its
    initial weights (sigma_reparam, the svd form of spectral) is taken anew, and a factor by which
    ``convert`` made up for a neutral start stays beside it: converting first or last is the same.
    Sharded parameters are
    gathered one attention at a time and end up as shards of one whole matrix, rank 0's. Weights
    that several attentions share are initialised once.

    Args:
        model: Any model in which ``levelhead.find_attention`` finds attention.
        initializer: A name of ``levelhead.initializers()`` with options, for example
            ``"conditioned(value='per_head')"``.
        generator: Random source; None uses torch's global one.
        sites: Some of ``find_attention(model)``, or those of modules of your own; all by default.
        batch: One batch (a mapping of keyword arguments, a tuple of positional ones, or the one
            argument); with it the report also shows the scores' spread and the entropy of every
            attention before and after.
        include_frozen: Also initialise weights with ``requires_grad=False``, which are otherwise
            refused.
        options: More options of the initialiser, for example ``teacher=`` (a model or its state
            dict) of ``weight_selection``.

    Returns:
        One row per matrix: condition numbers, orthogonality and norms of the host's, the computed
        and the stored matrix. Refused with a ``ValueError``: an unknown name or option, weights
        that are frozen, shared in part, without data or not floating point, and a host the method
        cannot serve.

    Example:
        >>> import torch, levelhead as lh
        >>> layer = torch.nn.TransformerEncoderLayer(48, 3)
        >>> report = lh.initialize_(layer, "conditioned", generator=torch.Generator())
        >>> [(row.matrix, round(row.stored.kappa_max, 3)) for row in report.initialised]
        [('q', 1.0), ('k', 1.0), ('v', 1.0)]
    """
    term, info = _parse(initializer, options)
    sites = find_attention(model) if sites is None else list(sites)
    require(len(sites) > 0, "sites must name at least one attention", "sites=[]")
    job = Job(model, sites, info, dict(term.options), generator, include_frozen)
    _check_sites(job)
    before = _effects(job, batch)
    matrices, products, notes = (_run_whole_model if info.whole_model else _run_sites)(job)
    counted = (f"{n} attentions: {note}" for note, n in Counter(notes).items())
    effects = effect_rows(before, _effects(job, batch))
    return InitReport(
        _shown(term), tuple(matrices), tuple(products), tuple(effects), tuple(counted)
    )


@dataclass(frozen=True)
class Job:
    """One call of ``initialize_``: what is done to what."""

    model: nn.Module
    sites: Sequence[AttentionSite]
    info: InitializerInfo
    options: dict[str, Any]
    generator: torch.Generator | None
    include_frozen: bool


def _run_sites(job: Job) -> Rows:
    """Initialise one attention after the other; those that share their weights only once."""
    matrices: list[MatrixRow] = []
    products: list[ProductRow] = []
    notes: list[str] = []
    done: dict[frozenset[int], str] = {}
    for site in job.sites:
        weights = frozenset(map(id, _weights(job, site).values()))
        if weights and weights in done:
            tied = f"tied to {done[weights]}"
            first = [row for row in matrices if row.site == done[weights]]
            matrices += [replace(row, site=site.name, status=tied) for row in first]
            continue
        done[weights] = site.name
        with whole_parameters(_owners(site)), without_factor(site):
            rows = _run_site(job, site)
        matrices += rows[0]
        products += rows[1]
        notes += rows[2]
    if not {"q", "k", "v"}.isdisjoint(job.info.matrices):
        for site in job.sites:
            derive_again(site)
    return matrices, products, notes


def _run_site(job: Job, site: AttentionSite) -> Rows:
    """Measure, compute, write, read back and measure again."""
    weights = site.read()
    dtypes = {name: weight.dtype for name, weight in _present(weights).items()}
    before = _facts(job, site, _present(weights))
    host = _host_projections(site, weights, job.generator)
    fresh = job.info.compute(host, **job.options)
    notes = job.info.notes(host, **job.options)
    del host
    computed = _facts(job, site, fresh)
    is_exact = all(weight.dtype == dtypes[name] for name, weight in fresh.items())
    stored = _store(site, weights, fresh)
    # A matrix that was stored as it was computed need not be measured twice.
    after = computed.over(before) if is_exact else _facts(job, site, stored)
    named = {name: _dtype_name(dtype) for name, dtype in dtypes.items()}
    products = product_rows(site.name, before, computed, after)
    return matrix_rows(site.name, named, before, computed, after), products, notes


def _store(
    site: AttentionSite, weights: ProjectionWeights, fresh: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Cast once, write, and return what the host then holds, which must be what was written."""
    if not fresh:
        return _present(weights)
    for name, values in fresh.items():
        setattr(weights, f"{name}_weight", values.to(getattr(weights, f"{name}_weight").dtype))
    site.write(weights)
    stored = _present(site.read())
    written = _present(weights)
    lost = [name for name in fresh if not torch.equal(written[name], stored[name])]
    require(
        not lost,
        "a host must hold each projection apart from the others",
        f"{site.name}, which did not keep {', '.join(lost)}",
    )
    return stored


def _run_whole_model(job: Job) -> Rows:
    """Fill every tensor of the state dict that the initialiser returns."""
    state = job.model.state_dict(keep_vars=True)
    options = job.options | {"teacher": _state(job.options["teacher"])}
    fresh = job.info.compute(state, **options)
    _check_weights({name: state[name] for name in fresh}, job.include_frozen)
    before = {site.name: _whole_facts(job, site) for site in job.sites}
    for name, values in fresh.items():
        copy_into(state[name], distribute_like(values, state[name]))
    rows: list[MatrixRow] = []
    filled = {id(state[name]) for name in fresh}
    for site in job.sites:
        derive_again(site, filled)
        after = _whole_facts(job, site)
        dtypes = {name: _dtype_name(w.dtype) for name, w in _weights(job, site).items()}
        rows += matrix_rows(site.name, dtypes, before[site.name], after, after)
    left = sorted(set(state) - set(fresh))
    return rows, [], [f"left as the student made it: {', '.join(left)}"] if left else []


def _effects(job: Job, batch: Any) -> SiteEffects:
    return {} if batch is None else attention_effects(job.model, batch, job.sites)


def _whole_facts(job: Job, site: AttentionSite) -> AttentionFacts:
    with whole_parameters(_owners(site)):
        return _facts(job, site, _present(site.read()))


def _facts(job: Job, site: AttentionSite, weights: Mapping[str, Tensor]) -> AttentionFacts:
    heads = site.num_heads, site.num_kv_heads
    return attention_facts(weights, *heads, products=job.info.promises_products)


def _present(weights: ProjectionWeights) -> dict[str, Tensor]:
    """Return the matrices that the host has, by their short names."""
    named = {name: getattr(weights, f"{name}_weight") for name in MATRICES}
    return {name: weight for name, weight in named.items() if weight is not None}


def _host_projections(
    site: AttentionSite, weights: ProjectionWeights, generator: torch.Generator | None
) -> HostProjections:
    return HostProjections(
        q=weights.q_weight,
        k=weights.k_weight,
        v=weights.v_weight,
        o=weights.o_weight,
        num_heads=site.num_heads,
        num_kv_heads=site.num_kv_heads,
        generator=generator,
        v_bias=weights.v_bias,
    )


def _weights(job: Job, site: AttentionSite) -> dict[str, nn.Parameter]:
    """The parameters that hold the matrices the initialiser changes."""
    stored = site.layout.stored()
    places = {name: stored[f"{name}_weight"] for name in job.info.matrices}
    return {name: place.parameter for name, place in places.items() if place is not None}


def _owners(site: AttentionSite) -> list[nn.Module]:
    """The modules that hold the projections; the output projection may lie outside the site's."""
    return [place.owner for place in site.layout.stored().values() if place is not None]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _state(teacher: Any) -> Mapping[str, Tensor]:
    """Return the state dict of a model, or the mapping that came."""
    if isinstance(teacher, nn.Module):
        return teacher.state_dict()
    require(
        isinstance(teacher, Mapping) and all(isinstance(t, Tensor) for t in teacher.values()),
        "teacher must be a model or its state dict",
        f"teacher of type {type(teacher).__name__}",
    )
    return teacher


def _parse(initializer: str, options: Mapping[str, Any]) -> tuple[Term, InitializerInfo]:
    """Read the name and join the options written in it with those given beside it."""
    terms = parse_terms(initializer)
    require(len(terms) == 1, "an initializer is one name with options", repr(initializer))
    require_known("initializer", terms[0].name, INITIALIZERS)
    info = INITIALIZERS[terms[0].name]
    twice = sorted(set(terms[0].options) & set(options))
    require(not twice, "each option may be given once", f"{', '.join(twice)} twice")
    term = Term(info.name, {**terms[0].options, **options})
    for name in term.options:
        known = ", ".join(info.options) or "no option"
        require(name in info.options, f"{info.name} takes other options", name, known)
    needed = [name for name, default in info.options.items() if default is Parameter.empty]
    missing = [name for name in needed if name not in term.options]
    require(not missing, f"{info.name} needs {', '.join(missing)}", str(term))
    return term, info


def _shown(term: Term) -> str:
    """The name with those options that have a short written form."""
    plain = (int, float, str, bool, type(None))
    return str(Term(term.name, {k: v for k, v in term.options.items() if isinstance(v, plain)}))


def _check_sites(job: Job) -> None:
    """Refuse weights that cannot be initialised, before any is changed."""
    owners: dict[int, tuple[str, frozenset[int]]] = {}
    for site in job.sites:
        weights = {f"{name} of {site.name}": w for name, w in _weights(job, site).items()}
        _check_weights(weights, job.include_frozen)
        mine = frozenset(map(id, weights.values()))
        for other, theirs in {owners[key] for key in mine if key in owners}:
            require(
                mine == theirs,
                "attentions must share all of their weights or none",
                f"{site.name} and {other}, which share some",
            )
        owners.update(dict.fromkeys(mine, (site.name, mine)))


def _check_weights(weights: Mapping[str, Tensor], include_frozen: bool) -> None:
    for name, weight in weights.items():
        require_float(**{name: weight})
        require_data(name, weight)
        require(
            weight.requires_grad or include_frozen or not isinstance(weight, nn.Parameter),
            "weights must be trainable to be initialised",
            f"{name} with requires_grad=False",
            "include_frozen=True, or unfreeze them first",
        )

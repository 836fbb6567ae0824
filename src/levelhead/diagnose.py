"""``diagnose``: run a model once, measure every attention, say what is unhealthy.

Nothing of the model is changed; what cannot be measured is said, not skipped.
"""

import math
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.capture import capture
from levelhead.capture_tokens import TokenFinder
from levelhead.diagnose_norms import NormWatcher, contraction_by_site, has_layer_norm
from levelhead.diagnose_rows import SiteRows
from levelhead.diagnose_weights import (
    jacobian_records,
    lipschitz_record,
    read_finite,
    weight_records,
    why_no_bound,
    why_no_jacobian,
)
from levelhead.diagnosis import WHOLE_LAYER, Diagnosis, Record
from levelhead.findings import judge, verdict
from levelhead.measure.streaming import DEFAULT_QUERIES
from levelhead.modes import one_thread
from levelhead.shapes import require
from levelhead.sharding import borrowed_parameters
from levelhead.sites.calls import AttentionCall
from levelhead.sites.find import find_attention
from levelhead.sites.reading import Reader
from levelhead.sites.sites import AttentionSite

SYSTEMATIC_LAYERS = 0.25
"""Share of the layers in which a channel must be an outlier (LLM.int8, section 3.2)."""

Curves = Mapping[str, Sequence[tuple[int, float]]]


def diagnose(
    model: nn.Module,
    batch: Any = None,
    *,
    num_queries: int | None = DEFAULT_QUERIES,
    jacobian_tokens: int = 8,
    name: str | None = None,
    readers: Sequence[Reader] = (),
    curves: Curves | None = None,
) -> Diagnosis:
    """Measure every attention of a model on a batch and compare with the table of thresholds.

    The model runs once, without gradients and in evaluation mode, and is as it was afterwards.

    Args:
        model: Any model whose attention ``find_attention`` can read; a compiled one is looked at
            uncompiled.
        batch: What the model is called with: a tensor, a tuple of positional arguments, a mapping
            of keyword arguments; None looks at the weights alone.
        num_queries: Queries looked at in each sample, evenly spaced; None for all.
        jacobian_tokens: First tokens of a sample on which each head's Jacobian is taken; 0 for no
            Jacobians. The cost grows with the cube.
        name: What to call the model; its class by default.
        readers: As in ``find_attention``.
        curves: Name to (step, value) of the run the model comes from.

    Returns:
        The diagnosis. A batch that the model refuses leaves what the weights say, with the reason
        in ``meta["not_measured"]``.

    Raises:
        ValueError: No attention was found, or a number of queries or tokens out of range.

    Example:
        >>> import torch, levelhead as lh
        >>> model = torch.nn.TransformerEncoderLayer(48, 3, batch_first=True)
        >>> diagnosis = lh.diagnose(model, torch.randn(2, 7, 48))
        >>> diagnosis.verdict
        'Healthy: nothing above its threshold (1 of 1 attention layers looked at, 0 notes).'
    """
    valid = num_queries is None or num_queries >= 1
    require(valid, "num_queries must be at least 1", f"num_queries={num_queries}", "None for all")
    require(jacobian_tokens >= 0, "jacobian_tokens must be at least 0", f"{jacobian_tokens}")
    model = getattr(model, "_orig_mod", model)
    sites = find_attention(model, readers=readers)
    finder = TokenFinder(batch)
    rows = {site.name: SiteRows(site, num_queries, jacobian_tokens, finder) for site in sites}
    not_measured: list[str] = []
    contraction = _run(model, batch, rows, finder, not_measured)
    records = [
        record
        for site in sites
        for record in _site_records(site, rows[site.name], contraction, not_measured)
    ]
    extra = [*_derived(sites, rows, records), *_of_the_model(rows, contraction)]
    findings = judge([*records, *extra])
    num_unmeasured = sum(part.num_calls == 0 for part in rows.values())
    return Diagnosis(
        records=records,
        findings=findings,
        verdict=verdict(findings, len(sites), num_unmeasured),
        meta=_meta(name or type(model).__name__, model, rows, batch, not_measured),
        curves={key: list(curve) for key, curve in (curves or {}).items()},
    )


def _run(
    model: nn.Module,
    batch: Any,
    rows: Mapping[str, SiteRows],
    finder: TokenFinder,
    not_measured: list[str],
) -> dict[str, float]:
    """Run the batch through the model; each call is reduced while it happens."""
    if batch is None:
        not_measured.append("everything that depends on data: no batch was given")
        return {}
    last = [""]

    def on_attention(call: AttentionCall) -> None:
        last[0] = call.site.name
        with one_thread(), torch._C.DisableTorchFunction():  # no mode watches the watcher
            rows[call.site.name].add(call)

    watcher = NormWatcher(lambda: last[0], lambda: finder.last)
    try:
        sites = [part.site for part in rows.values()]
        watch = watcher if has_layer_norm(model) else nullcontext()
        with (
            torch.no_grad(),
            in_eval_mode(model),
            capture(model, on_attention, sites=sites),
            watch,
        ):
            call_model(model, batch)
    except Exception as error:  # a report is still written, and says what happened
        said = " ".join(str(error).split())[:300]
        not_measured.append(
            f"the forward stopped with {type(error).__name__}: {said}; give a batch that "
            f"{type(model).__name__} takes (a tensor, a tuple or a mapping of its arguments)"
        )
    return contraction_by_site(watcher, len(rows))


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call a model with a batch.

    Args:
        model: The model.
        batch: A tensor, a tuple or list of positional arguments, a mapping of keyword arguments.

    Returns:
        Its output.
    """
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode and every module back where it was.

    Args:
        model: The model.

    Yields:
        Nothing.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _site_records(
    site: AttentionSite,
    rows: SiteRows,
    contraction: Mapping[str, float],
    not_measured: list[str],
) -> list[Record]:
    with borrowed_parameters(site.module.modules()):
        return list(_records_of(site, rows, contraction, not_measured))


def _records_of(
    site: AttentionSite,
    rows: SiteRows,
    contraction: Mapping[str, float],
    not_measured: list[str],
) -> Iterator[Record]:
    if rows.num_calls:
        yield from rows.records()
    for reason in sorted(rows.not_measured):
        not_measured.append(f"{site.name}: {reason}")
    if site.name in contraction:
        words = "product of ||gamma||_inf / sigma (median token) of the norms after this attention"
        yield _of_layer(site, "post_ln_contraction", contraction[site.name], words)
    weights, broken, why = read_finite(site)
    if weights is None:
        not_measured.append(f"{site.name}: everything that depends on weights: {why}")
        return
    yield _of_layer(site, "nonfinite_weights", broken, "entries of the projections")
    with one_thread():
        spectra = list(weight_records(site, weights))
    yield from spectra
    if broken:
        not_measured.append(f"{site.name}: bounds and Jacobians: weights are not finite")
        return
    why = why_no_bound(site) if rows.radius > 0 else "no hidden states were seen"
    if why or not math.isfinite(rows.radius):
        not_measured.append(f"{site.name}: Lipschitz bound: {why or 'states are not finite'}")
    else:
        with one_thread():
            bound = lipschitz_record(site, weights, rows.radius)
        yield bound
    why = "jacobian_tokens=0" if not rows.num_first else why_no_jacobian(site, rows)
    if why or rows.first is None:
        not_measured.append(f"{site.name}: Jacobian: {why}")
    else:
        try:
            with one_thread():
                jacobians = list(jacobian_records(site, weights, rows.first))
        except ValueError as error:
            not_measured.append(f"{site.name}: Jacobian: {error}")
            return
        yield from jacobians


def _of_layer(site: AttentionSite, metric: str, value: float, words: str) -> Record:
    return Record(site.name, site.layer_idx, WHOLE_LAYER, metric, float(value), words)


def _derived(
    sites: Sequence[AttentionSite], rows: Mapping[str, SiteRows], records: Sequence[Record]
) -> Iterator[Record]:
    """Numbers that only the thresholds need: ratios to what would be usual."""
    for site in sites:
        yield _of_layer(site, "usual_scale", site.head_dim**-0.5, "1 / sqrt(head_dim)")
    by_name = {site.name: site for site in sites}
    for record in records:
        site, seen = by_name[record.layer], rows[record.layer]
        if record.metric == "raw_score_max" and seen.dtype:
            largest = torch.finfo(getattr(torch, seen.dtype)).max
            share = record.value / largest
            yield Record(site.name, site.layer_idx, record.head, "overflow_frac", share, "")


def _of_the_model(
    rows: Mapping[str, SiteRows], contraction: Mapping[str, float]
) -> Iterator[Record]:
    """Numbers of all layers together; their layer has no name."""
    if contraction and max(contraction.values()) < 1:
        depth = math.prod(contraction.values())
        yield Record("", -1, WHOLE_LAYER, "post_ln_contraction_depth", depth, "over all layers")
    systematic = len(systematic_outliers(rows))
    yield Record("", -1, WHOLE_LAYER, "systematic_outliers", float(systematic), "channels")


def systematic_outliers(rows: Mapping[str, SiteRows]) -> list[int]:
    """Return the channels that are outliers in a quarter of the layers or more.

    Args:
        rows: Of every site.

    Returns:
        Channel numbers, ascending.
    """
    num_layers = sum(part.num_calls > 0 for part in rows.values())
    counts = Counter(channel for part in rows.values() for channel in part.outliers)
    return sorted(c for c, n in counts.items() if n >= max(1, SYSTEMATIC_LAYERS * num_layers))


def _meta(
    name: str,
    model: nn.Module,
    rows: Mapping[str, SiteRows],
    batch: Any,
    not_measured: list[str],
) -> dict[str, Any]:
    seen = [part for part in rows.values() if part.num_calls]
    meta: dict[str, Any] = {
        "model": name,
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "num_params": sum(parameter.numel() for parameter in model.parameters()),
        "num_layers": len(rows),
        "batch": describe_batch(batch),
        "num_tokens": max((part.num_tokens for part in seen), default=0),
        "num_padding": max((part.num_padding for part in seen), default=0),
        "num_sampled_queries": max((part.num_looked_at for part in seen), default=0),
        "jacobian_tokens": max((part.num_first for part in rows.values()), default=0),
        "mode": "evaluation, no gradients",
        "dtypes": sorted({part.dtype for part in seen}),
        "devices": sorted({part.device for part in seen}),
        "scale": {site_name: part.site.scale for site_name, part in rows.items()},
        "kinds": dict(Counter(part.site.kind for part in rows.values())),
        "outlier_channels": systematic_outliers(rows),
        "not_measured": together(not_measured),
        "versions": {"levelhead": version("levelhead"), "torch": str(torch.__version__),
                     "python": platform.python_version()},
    }  # fmt: skip
    backend = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if backend is not None:
        meta["attn_implementation"] = str(backend)
    return meta


def together(reasons: Sequence[str]) -> list[str]:
    """Tell a reason that several layers share once.

    Args:
        reasons: "layer: what: why", or any text.

    Returns:
        The same with "(and n other layers)" where what and why repeat.
    """
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for reason in reasons:
        shared = reason.split(": ", 1)[-1] if ": " in reason else reason
        first.setdefault(shared, reason)
        counts[shared] += 1
    return [
        text if counts[shared] == 1 else f"{text} (and {counts[shared] - 1} other layers)"
        for shared, text in first.items()
    ]


def describe_batch(batch: Any) -> str:
    """Say in words what a model was called with.

    Args:
        batch: As for ``diagnose``.

    Returns:
        Names and shapes.
    """
    if batch is None:
        return "none"
    if isinstance(batch, Mapping):
        items = batch.items()
    else:
        parts = batch if isinstance(batch, (tuple, list)) else [batch]
        items = enumerate(parts)
    return ", ".join(
        f"{key} {list(value.shape)}" if isinstance(value, Tensor) else f"{key}"
        for key, value in items
    )

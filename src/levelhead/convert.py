"""Put any variant into a model that exists, and take it out again."""

from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from torch import nn

from levelhead.convert_checks import (
    check_model,
    check_no_optimizer,
    check_tied,
    check_unconverted,
    check_weights,
)
from levelhead.convert_kernels import kernel_in_words
from levelhead.convert_probe import moved_by
from levelhead.convert_report import Conversion, LayerChange
from levelhead.convert_start import STARTS, Start, factored, multiply, preserve
from levelhead.shapes import require, require_known
from levelhead.sites.build import build_installed, derive
from levelhead.sites.combining import refusal
from levelhead.sites.find import find_attention
from levelhead.sites.host import HOSTS, Host, Installed, host_of, installed_in
from levelhead.sites.projection_hooks import add_hooks, needs_hooks, remove_hooks
from levelhead.sites.reading import Reader
from levelhead.sites.sites import AttentionSite
from levelhead.steps import StepState, stop_tracking, track_steps
from levelhead.variants import Variant, parse_variant

Layers = Iterable[int | str]


@dataclass
class Plan:
    """One attention to convert: built, not yet installed."""

    site: AttentionSite
    host: Host
    installed: Installed
    start: Start = field(default_factory=Start)
    moved: float = 0.0


def convert(
    model: nn.Module,
    variant: str | Variant,
    layers: Layers | None = None,
    *,
    start: str = "preserve",
    readers: Sequence[Reader] = (),
    ignore: Collection[type[nn.Module]] = (),
) -> Conversion:
    """Swap the attention of a model in place.

    Weights, state-dict keys, dtype, device, mode, ``requires_grad`` and hooks of the host stay;
    parameters of the variant lie in each attention module under the name ``levelhead``. Convert
    before building the optimiser, compiling, wrapping or sharding. When anything is refused, the
    model is left exactly as it was. A model of transformers gets configurations of its own, equal
    copies, so that others built from the same object stay what they are.

    Args:
        model: The outermost module that is called in training.
        variant: Terms joined by ``+``; see ``levelhead.variants()``.
        layers: Positions or names of the attentions to convert (``levelhead.find_attention``);
            by default all for which the variant makes sense (``levelhead.combinations()``).
        start: "preserve" starts at the host's function where the terms can (affine, gate,
            sigma_reparam; sink nearly), for models with trained weights; "paper" starts as the
            papers do.
        readers: As for ``find_attention``.
        ignore: As for ``find_attention``.

    Returns:
        What changed in each layer, whether its function was preserved or by how much it moved,
        and what was left as it was; print it.

    Raises:
        ValueError: No attention, an illegal variant, a variant that a chosen layer cannot take,
            a model that is converted already, without values, sharded, quantised, compiled or
            wrapped, or an optimiser that was built before.

    Example:
        >>> import torch, levelhead as lh
        >>> layer = torch.nn.TransformerEncoderLayer(48, 3, batch_first=True)
        >>> lh.convert(layer, "gate").layers[0].function
        'preserved'
    """
    variant = parse_variant(variant)
    require_known("start", start, STARTS)
    check_model(model)
    sites = find_attention(model, readers=readers, ignore=ignore)
    check_unconverted(sites)
    chosen, left = _choose(sites, variant, layers)
    for site in chosen:
        check_weights(site)
    check_tied(chosen)
    plans = [_plan(site, variant, start) for site in chosen]
    if any(_num_params(plan.installed) for plan in plans):
        check_no_optimizer(model)
    _install_all(model, sites, plans, variant)
    rows = tuple(_row(plan, variant) for plan in plans)
    return Conversion(str(variant), start, rows, tuple(left))


def _choose(
    sites: list[AttentionSite], variant: Variant, layers: Layers | None
) -> tuple[list[AttentionSite], list[tuple[str, str]]]:
    """Return the sites to convert, and the others with the reason.

    Raises:
        ValueError: No site takes the variant, or one that was asked for does not.
    """
    wanted = sites if layers is None else _named(sites, layers)
    names = {site.name for site in wanted}
    reasons = {site.name: _refusal(site, variant) for site in wanted}
    chosen = [site for site in wanted if reasons[site.name] is None]
    refused = [(name, why) for name, why in reasons.items() if why is not None]
    if refused and (layers is not None or not chosen):
        listed = "; ".join(f"{name}: {why}" for name, why in refused)
        raise ValueError(f"{variant} cannot go into these attentions: {listed}")
    left = [(site.name, "not among the layers asked for") for site in sites
            if site.name not in names]  # fmt: skip
    return chosen, refused + left


def _named(sites: list[AttentionSite], layers: Layers) -> list[AttentionSite]:
    known: dict[int | str, AttentionSite] = {site.layer_idx: site for site in sites}
    known |= {site.name: site for site in sites}
    valid = ", ".join(f"{site.layer_idx} ({site.name})" for site in sites)
    is_one = isinstance(layers, str) or not isinstance(layers, Iterable)
    require(not is_one, "layers must be a list", f"layers={layers!r}", f"a list of {valid}")
    layers = list(layers)
    unknown = [layer for layer in layers if layer not in known]
    require(not unknown, "layers must be positions or names of attentions", f"{unknown}", valid)
    require(bool(layers), "at least one layer must be named", "layers=[]", valid)
    chosen = {known[layer].layer_idx for layer in layers}
    return [site for site in sites if site.layer_idx in chosen]


def _refusal(site: AttentionSite, variant: Variant) -> str | None:
    host = host_of(site)
    if host is None:
        kind = f"{type(site.module).__module__}.{type(site.module).__qualname__}"
        return (
            f"{kind} can be described but not converted; known: {', '.join(HOSTS)}, and modules "
            "whose site brings a host of its own (docs/own_module.md)"
        )
    return refusal(site, variant) or host.refuses(site, variant)


def _plan(site: AttentionSite, variant: Variant, start: str) -> Plan:
    host = host_of(site)
    assert host is not None
    installed = build_installed(site, host, variant)
    plan = Plan(site, host, installed)
    derive(site, installed)
    if start == "preserve":
        plan.start = preserve(site, installed)
    installed.start = start
    installed.factor, installed.factor_on = plan.start.factor, plan.start.factor_on
    plan.moved = moved_by(site, installed, plan.start.factor)
    return plan


def _install_all(
    model: nn.Module, sites: list[AttentionSite], plans: list[Plan], variant: Variant
) -> None:
    """Install every plan, or leave the model as it was."""
    with ExitStack() as undo:
        for plan in plans:
            undo.callback(uninstall, plan.site, plan.host)
            install(plan.site, plan.host, plan.installed)
        for host, own in by_host(sites):
            undo.callback(host.leave, model, own)
            host.enter(model, own, variant)
        for plan in plans:
            places = factored(plan.site, plan.start.factor_on)
            multiply(places, plan.start.factor)
            undo.callback(multiply, places, 1 / plan.start.factor)
        if any(isinstance(part, StepState) for plan in plans for part in plan.installed.modules()):
            track_steps(model)
        undo.pop_all()


def install(site: AttentionSite, host: Host, installed: Installed) -> None:
    """Let one attention run what was built for it.

    Args:
        site: Where.
        host: Its host.
        installed: What.
    """
    host.install(site, installed)
    if needs_hooks(installed) and not host.runs_projections:
        add_hooks(site, installed)


def uninstall(site: AttentionSite, host: Host) -> None:
    """Undo ``install``.

    Args:
        site: Where.
        host: Its host.
    """
    remove_hooks(site)
    host.uninstall(site)


def by_host(sites: list[AttentionSite]) -> list[tuple[Host, list[AttentionSite]]]:
    """Return each kind of host that runs a converted attention, with all of its sites.

    Args:
        sites: All sites of a model.

    Returns:
        Hosts and their sites.
    """
    groups: dict[type[Host], tuple[Host, list[AttentionSite]]] = {}
    for site in sites:
        host = host_of(site)
        if host is not None:
            groups.setdefault(type(host), (host, []))[1].append(site)
    return [group for group in groups.values() if any(map(_is_converted, group[1]))]


def _is_converted(site: AttentionSite) -> bool:
    return installed_in(site.module) is not None


def _num_params(installed: Installed) -> int:
    return sum(parameter.numel() for parameter in installed.parameters())


def _row(plan: Plan, variant: Variant) -> LayerChange:
    site = plan.site
    return LayerChange(
        name=site.name,
        host=type(site.module).__name__,
        before=describe_host(site),
        after=str(variant),
        num_params=_num_params(plan.installed),
        moved=plan.moved,
        note=plan.start.note,
        kernel=kernel_in_words(site, plan.installed),
    )


def describe_host(site: AttentionSite) -> str:
    """Say in this library's terms what attention a host computes.

    Args:
        site: Where.

    Returns:
        For example "softmax(scale=0.125) + soft cap".
    """
    own = {
        "norms of queries and keys": site.q_norm is not None,
        "cosine": site.is_cosine,
        "soft cap": site.soft_cap is not None,
        "sink": site.has_sink,
        "gate": site.has_gate,
    }
    terms = [name for name, has in own.items() if has]
    return " + ".join([f"softmax(scale={site.scale:.4g})", *terms])


def restore(
    model: nn.Module,
    *,
    readers: Sequence[Reader] = (),
    ignore: Collection[type[nn.Module]] = (),
) -> list[str]:
    """Undo ``convert``: the host's own attention runs again, on the weights as they are now.

    Parameters of the variant are dropped; a projection that was multiplied to make up for a
    neutral start is divided again, exactly. Right after ``convert`` the model is, bit by bit,
    what it was.

    Args:
        model: A converted model (or a deep copy of one).
        readers: As for ``convert``.
        ignore: As for ``convert``.

    Returns:
        Names of the attentions restored.

    Raises:
        ValueError: Nothing in the model is converted.
    """
    sites = find_attention(model, readers=readers, ignore=ignore)
    converted = [site for site in sites if installed_in(site.module) is not None]
    require(bool(converted), "restore needs a converted model", f"a {type(model).__name__}")
    for host, own in by_host(sites):
        host.leave(model, own)
    restored = []
    for site in converted:
        installed, host = installed_in(site.module), host_of(site)
        if installed is None or host is None:
            continue  # a neighbour that the host put into order in ``leave``
        multiply(factored(site, installed.factor_on), 1 / installed.factor)
        uninstall(site, host)
        restored.append(site.name)
    stop_tracking(model)
    return restored

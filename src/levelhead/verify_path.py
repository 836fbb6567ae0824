"""The proof that a converted attention is on the path: nudge it, see the output move."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from levelhead.sites.host import Installed
from levelhead.sites.sites import AttentionSite
from levelhead.verify_batch import run
from levelhead.verify_nudge import nudged, nudged_parameters
from levelhead.verify_report import FAILED, PASSED, SKIPPED, Check
from levelhead.verify_subject import UNSEEN, Subject, distance

NUDGES = (1.0, 1e3)
"""Sizes of noise, relative to what it is added to; the next is tried where one moves nothing."""


def check_on_path(subject: Subject) -> Check:
    """Nudge the attention of each layer, then its parameters: the output must move each time.

    Parameters are nudged alone, then on top of the nudged attention: where weights are nearly
    uniform, or a norm follows, hardly anything depends on them otherwise.

    Args:
        subject: What is checked.

    Returns:
        The row "on path".
    """
    before = run(subject.model, subject.batch)
    unmoved, silent = [], []
    nudgeable = [(site, installed) for site, installed in subject.parts()
                 if site.kind != "landmark" or installed.variant.terms]  # fmt: skip
    if not nudgeable:
        return Check("on path", SKIPPED, "the host's own attention runs, nothing was put in")
    for site, installed in nudgeable:
        missing = _unmoved(subject, installed, before)
        if missing and (_ends_in_zeros(site) or not _moves(subject, site.module, before)):
            silent.append(site.name)
        else:
            unmoved += [f"{site.name} ({what})" for what in missing]
    if unmoved:
        return Check("on path", FAILED, f"the output does not depend on {', '.join(unmoved)}")
    if len(silent) == len(subject.sites):
        return Check("on path", SKIPPED, "the output of this model depends on no attention at all")
    detail = f"nudging any of {len(subject.sites) - len(silent)} attentions moves the output"
    beside = f"; nothing depends on {', '.join(silent)}, whatever it computes" if silent else ""
    return Check("on path", PASSED, detail + beside)


def _unmoved(subject: Subject, installed: Installed, before: Any) -> list[str]:
    """Return what of an attention the output does not depend on."""
    has_parameters = any(True for _ in installed.parameters())
    missing = ["attention"] + (["parameters"] if has_parameters else [])
    with nudged_parameters(installed):
        if has_parameters and _movement(run(subject.model, subject.batch), before) > 1:
            missing.remove("parameters")
    for size in NUDGES:
        with _nudged_attention(installed, size):
            moved = run(subject.model, subject.batch)
            if "parameters" in missing:
                with nudged_parameters(installed):
                    if 1 < _movement(run(subject.model, subject.batch), moved) < math.inf:
                        missing.remove("parameters")
        if "attention" in missing and _movement(moved, before) > 1:
            missing.remove("attention")
        if not missing:
            break
    return missing


def _moves(subject: Subject, module: nn.Module, before: Any) -> bool:
    with _nudged_module(module):
        return _movement(run(subject.model, subject.batch), before) > 1


def _movement(found: Any, expected: Any) -> float:
    """Return the distance over what counts as standing still; inf where numbers overflowed."""
    difference, dtype = distance(found, expected)
    return difference / UNSEEN[dtype]


def _ends_in_zeros(site: AttentionSite) -> bool:
    """Whether the host multiplies what its attention computes by zero."""
    output = site.layout.o
    return output is not None and not bool(output.weight.read().any())


@contextmanager
def _nudged_attention(installed: Installed, size: float) -> Iterator[None]:
    """Add noise to what the parts compute, whichever of them the host comes by, and to values.

    Values that differ let every change of the weights show.
    """
    inner = installed.inner
    places = [
        (inner.norm, "prepare_query"), (installed.early_norm, "prepare_query"),
        (inner.normaliser, "plain"),
        (installed.projections, "adjust"),
        *((part, "forward") for part in inner.outputs()),
    ]  # fmt: skip
    with ExitStack() as undo:
        for part, method in places:
            if part is not None:
                undo.callback(_put_back, part, method, vars(part).get(method))
                setattr(part, method, _followed_by_noise(getattr(part, method), size))
        undo.callback(_put_back, inner, "mix", vars(inner).get("mix"))
        setattr(inner, "mix", _with_nudged_values(inner.mix, size))  # noqa: B010
        yield


def _put_back(part: nn.Module, method: str, before: Any) -> None:
    vars(part).pop(method)
    if before is not None:
        setattr(part, method, before)


def _followed_by_noise(method: Callable[..., Tensor], size: float) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: nudged(method(*args, **kwargs), size)


def _with_nudged_values(mix: Callable[..., Tensor], size: float) -> Callable[..., Tensor]:
    return lambda query, key, value, *others: mix(query, key, nudged(value, size), *others)


@contextmanager
def _nudged_module(module: nn.Module) -> Iterator[None]:
    def nudge(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return nudged(output)
        return type(output)([nudged(output[0]), *output[1:]])

    handle = module.register_forward_hook(nudge)
    try:
        yield
    finally:
        handle.remove()

"""The proof that a converted attention is on the path: nudge it, see the output move."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.sites.host import Installed
from levelhead.sites.sites import AttentionSite
from levelhead.verify_batch import run
from levelhead.verify_report import FAILED, PASSED, SKIPPED, Check
from levelhead.verify_subject import STILL, Subject, distance


def check_on_path(subject: Subject) -> Check:
    """Nudge the attention of each layer, then its parameters: the output must move each time.

    Args:
        subject: What is checked.

    Returns:
        The row "on path".
    """
    before = run(subject.model, subject.batch)

    def moves(nudged: AbstractContextManager[Any]) -> bool:
        with nudged:
            difference, dtype = distance(run(subject.model, subject.batch), before)
        return difference > STILL[dtype]

    unmoved, silent = [], []
    for site, installed in subject.parts():
        probes = {"attention": _nudged_attention} | (
            {"parameters": _nudged_parameters} if any(True for _ in installed.parameters()) else {}
        )
        missing = [what for what, nudged in probes.items() if not moves(nudged(installed))]
        if missing and (_ends_in_zeros(site) or not moves(_nudged_module(site.module))):
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


def _noise(like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(like.shape, generator=generator).to(like)


def _nudged(tensor: Tensor) -> Tensor:
    return tensor + (1 + tensor.abs().amax()) * _noise(tensor)


def _ends_in_zeros(site: AttentionSite) -> bool:
    """Whether the host multiplies what its attention computes by zero."""
    output = site.layout.o
    return output is not None and not bool(output.weight.read().any())


@contextmanager
def _nudged_attention(installed: Installed) -> Iterator[None]:
    """Add noise to what the parts compute, whichever of them the host comes by."""
    inner = installed.inner
    places = [
        (inner.norm, "prepare_query"), (installed.early_norm, "prepare_query"),
        (inner.normaliser, "fused"), (inner.normaliser, "plain"),
        (installed.projections, "adjust"),
        *((part, "forward") for part in inner.outputs()),
    ]  # fmt: skip
    with ExitStack() as undo:
        for part, method in places:
            if part is not None:
                undo.callback(_put_back, part, method, vars(part).get(method))
                setattr(part, method, _followed_by_noise(getattr(part, method)))
        yield


def _put_back(part: nn.Module, method: str, before: Any) -> None:
    vars(part).pop(method)
    if before is not None:
        setattr(part, method, before)


def _followed_by_noise(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: _nudged(method(*args, **kwargs))


@contextmanager
def _nudged_module(module: nn.Module) -> Iterator[None]:
    def nudge(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return _nudged(output)
        return type(output)([_nudged(output[0]), *output[1:]])

    handle = module.register_forward_hook(nudge)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _nudged_parameters(installed: Installed) -> Iterator[None]:
    parameters: Sequence[Tensor] = list(installed.parameters())
    kept = [parameter.clone() for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.add_(parameter.abs() + 0.5 + 0.5 * _noise(parameter))
        yield
    finally:
        for parameter, values in zip(parameters, kept, strict=True):
            parameter.copy_(values)

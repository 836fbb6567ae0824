"""The single checks of the self-check: each returns what it found, in one line."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.capture import capture
from levelhead.convert import convert, restore
from levelhead.parts.scores import DotProduct
from levelhead.sites.calls import AttentionCall
from levelhead.sites.host import Installed, installed_in
from levelhead.sites.sites import AttentionSite
from levelhead.verify_batch import Tokens, find_padding, find_tokens, run, tensors_in

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
TOLERANCE = {
    torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2,
}  # fmt: skip
"""Largest difference of two right answers, relative to the largest value."""
STILL = {
    torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3,
}  # fmt: skip
"""Largest difference, likewise, that counts as "did not move"."""
PROBED_ROWS = 16
LAST_STEPS = 3


@dataclass(frozen=True)
class Check:
    """What one check found.

    Attributes:
        name: What was checked.
        status: "passed", "failed" or "skipped".
        detail: Figures, or the reason.
    """

    name: str
    status: str
    detail: str


@dataclass
class Subject:
    """What is checked.

    Attributes:
        model: The converted model, in evaluation mode.
        batch: One batch for it.
        sites: Its converted attentions.
        is_causal: Whether the future must be hidden; None to take the sites' word.
        options: ``readers`` and ``ignore`` of ``find_attention``.
        stock: A copy that runs its own attention again.
    """

    model: nn.Module
    batch: Any
    sites: list[AttentionSite]
    is_causal: bool | None
    options: dict[str, Any] = field(default_factory=dict)
    stock: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        self.stock = copy.deepcopy(self.model)
        restore(self.stock, **self.options)

    @property
    def hides_the_future(self) -> bool:
        """Whether no output may depend on a later token."""
        if self.is_causal is not None:
            return self.is_causal
        own = [site for site in self.sites if site.kind == "self"]
        return bool(own) and all(site.is_causal for site in own)


def _verdict(name: str, holds: bool, detail: str) -> Check:
    return Check(name, PASSED if holds else FAILED, detail)


def distance(found: Any, expected: Any) -> tuple[float, torch.dtype]:
    """Return the largest difference of two outputs, relative to the largest value expected.

    Args:
        found: Tensors, in any nesting.
        expected: The same.

    Returns:
        The difference (inf where it is NaN or shapes differ), and the narrowest dtype.
    """
    worst, dtype = 0.0, torch.float64
    pairs = list(zip(tensors_in(found), tensors_in(expected), strict=True))
    for one, other in pairs:
        if one.shape != other.shape:
            return float("inf"), other.dtype
        scale = other.abs().max().clamp_min(torch.finfo(other.dtype).tiny).double()
        difference = float(((one.double() - other.double()).abs().max() / scale).item())
        worst = max(worst, difference if difference == difference else float("inf"))
        dtype = min(dtype, other.dtype, key=lambda d: torch.finfo(d).bits)
    return worst, dtype


def check_parity(subject: Subject) -> list[Check]:
    """Convert a copy of the stock model to plain softmax: outputs and scores must be the stock's.

    Args:
        subject: What is checked.

    Returns:
        Two rows: "parity" and "scale".
    """
    stock_scores, stock_output = _scores_and_output(subject.stock, subject.batch, subject)
    neutral = copy.deepcopy(subject.stock)
    convert(neutral, "softmax", [site.name for site in subject.sites], **subject.options)
    scores, output = _scores_and_output(neutral, subject.batch, subject)
    difference, dtype = distance(output, stock_output)
    allowed = TOLERANCE[dtype]
    parity = _verdict(
        "parity",
        difference <= allowed,
        f"neutral and stock differ by {difference:.1e} of the largest output (at most {allowed})",
    )
    return [parity, _scale_row(subject, scores, stock_scores, allowed)]


def _scale_row(
    subject: Subject, scores: dict[str, Tensor], stock: dict[str, Tensor], allowed: float
) -> Check:
    used = sorted({installed.inner.norm.score_scale(s.scale) for s, installed in _parts(subject)})
    in_use = "scale in use: " + ", ".join(f"{scale:.6g}" for scale in used)
    if not stock or set(scores) != set(stock):
        return Check("scale", SKIPPED, f"{in_use}; the scores of stock could not be seen")
    worst = max(distance(scores[name], stock[name])[0] for name in stock)
    return _verdict(
        "scale", worst <= allowed, f"{in_use}; neutral and stock scores differ by {worst:.1e}"
    )


def _scores_and_output(
    model: nn.Module, batch: Any, subject: Subject
) -> tuple[dict[str, Tensor], Any]:
    """Run a model, and keep a corner of the scores of each converted attention's first call."""
    scores: dict[str, Tensor] = {}
    wanted = {site.name for site in subject.sites}

    def keep(call: AttentionCall) -> None:
        if call.site.name in wanted and call.site.name not in scores:
            query = call.query[:, :, :PROBED_ROWS].double()
            groups = call.query.shape[1] // call.key.shape[1]
            key = call.key[:, :, :PROBED_ROWS].double().repeat_interleave(groups, dim=1)
            scores[call.site.name] = call.scale * query @ key.mT

    try:
        with capture(model, keep, readers=subject.options.get("readers", ())):
            return scores, run(model, batch)
    except ValueError:
        return {}, run(model, batch)


def check_leak(subject: Subject) -> Check:
    """Change a token: outputs must move where the stock's do, and never before it if causal.

    Args:
        subject: What is checked.

    Returns:
        The row "mask leak".
    """
    name, tokens = "mask leak", find_tokens(subject.model, subject.batch)
    if tokens is None or tokens.num_tokens < 2:
        return Check(name, SKIPPED, "the batch has no sequence of tokens")
    if tokens.positions_of(run(subject.stock, subject.batch)) is None:
        return Check(name, SKIPPED, "no output has a row for each token")
    last = tokens.num_tokens - 1
    reached = []
    for position in sorted({last, last // 2 + 1}):
        moved, moved_in_stock = (
            _moved(model, tokens, position) for model in (subject.model, subject.stock)
        )
        if not moved.any():
            return Check(name, FAILED, f"changing token {position} moved no output at all")
        early = moved[..., :position].any(dim=0).nonzero().flatten().tolist()
        if subject.hides_the_future and early:
            return Check(
                name, FAILED, f"changing token {position} moved outputs before it: {early}"
            )
        beyond = (moved & ~moved_in_stock).any(dim=0).nonzero().flatten().tolist()
        if beyond:
            detail = f"changing token {position} moved outputs that stock does not move: {beyond}"
            return Check(name, FAILED, detail)
        reached.append(f"{position} (moved {int(moved.any(dim=0).sum())} of {last + 1})")
    rule = "no output before it moved" if subject.hides_the_future else "as far as in stock"
    return Check(name, PASSED, f"changed tokens {', '.join(reached)}: {rule}")


def _moved(model: nn.Module, tokens: Tokens, position: int) -> Tensor:
    where = torch.zeros(tokens.num_tokens, dtype=torch.bool, device=tokens.tensor.device)
    where[position] = True
    return _moved_by(model, tokens, where)


def _moved_by(model: nn.Module, tokens: Tokens, where: Tensor) -> Tensor:
    """Which output positions move, ``[B, T]``, when tokens at some positions change."""
    before, after = (
        tokens.positions_of(run(model, batch)) for batch in (tokens.batch, tokens.changed(where))
    )
    assert before is not None
    assert after is not None
    still = STILL[before.dtype] * before.abs().max()
    difference = (after - before).abs().flatten(2).amax(dim=-1)
    return ~(difference <= still)


def check_padding(subject: Subject) -> Check:
    """Change what stands in the padding: nothing that is not padding may move.

    Args:
        subject: What is checked.

    Returns:
        The row "padding".
    """
    name, padded = "padding", find_padding(subject.model, subject.batch)
    if padded is None:
        return Check(name, SKIPPED, "the batch has no tokens that could be padding")
    tokens, is_padding = padded.tokens, padded.is_padding
    outputs = [run(subject.model, b) for b in (tokens.batch, tokens.changed(is_padding))]
    if not padded.shares_positions:
        difference, dtype = distance(outputs[1], outputs[0])
        return _verdict(name, difference <= STILL[dtype], f"outputs moved by {difference:.1e}")
    if tokens.positions_of(outputs[0]) is None:
        return Check(name, SKIPPED, "no output has a row for each token")
    before, after = (tokens.positions_of(output) for output in outputs)
    assert before is not None
    assert after is not None
    moved = (after - before).abs().flatten(2).amax(dim=-1).masked_fill(is_padding, 0.0)
    worst = float((moved.max() / before.abs().max()).item())
    detail = f"{int(is_padding.sum())} padding tokens changed: others moved by {worst:.1e}"
    return _verdict(name, worst <= STILL[before.dtype], detail)


def check_on_path(subject: Subject) -> Check:
    """Nudge the attention of each layer, then its parameters: the output must move each time.

    Args:
        subject: What is checked.

    Returns:
        The row "on path".
    """
    before = run(subject.model, subject.batch)
    unmoved = []
    for site, installed in _parts(subject):
        probes: list[tuple[str, Callable[..., Any]]] = [("attention", _nudged_queries)]
        if next(installed.parameters(), None) is not None:
            probes.append(("parameters", _nudged_parameters))
        for what, nudged in probes:
            with nudged(installed):
                difference, dtype = distance(run(subject.model, subject.batch), before)
            if difference <= STILL[dtype]:
                unmoved.append(f"{site.name} ({what})")
    if unmoved:
        return Check("on path", FAILED, f"the output does not depend on {', '.join(unmoved)}")
    return Check(
        "on path", PASSED, f"nudging any of {len(subject.sites)} attentions moves the output"
    )


def _parts(subject: Subject) -> Iterator[tuple[AttentionSite, Installed]]:
    for site in subject.sites:
        installed = installed_in(site.module)
        assert installed is not None
        yield site, installed


class _NudgedNorm(DotProduct):
    """A norm part followed by noise on the queries."""

    def __init__(self, norm: DotProduct):
        super().__init__()
        self.norm = norm

    def prepare_query(self, query: Tensor) -> Tensor:
        query = self.norm.prepare_query(query)
        return query + 2 * query.std() * _noise(query)

    def prepare_key(self, key: Tensor) -> Tensor:
        return self.norm.prepare_key(key)

    def score_scale(self, scale: float) -> float:
        return self.norm.score_scale(scale)


def _noise(like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(like.shape, generator=generator).to(like)


@contextmanager
def _nudged_queries(installed: Installed) -> Iterator[None]:
    norm = installed.inner.norm
    installed.inner.norm = _NudgedNorm(norm)
    try:
        yield
    finally:
        installed.inner.norm = norm


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


def check_cache(subject: Subject) -> Check:
    """Feed a sequence in pieces through the cache: logits must be those of the full pass.

    Args:
        subject: What is checked.

    Returns:
        The row "cache".
    """
    name, model = "cache", subject.model
    reason = _no_cache(subject)
    if reason:
        return Check(name, SKIPPED, reason)
    ids = subject.batch["input_ids"]
    full = model(input_ids=ids, use_cache=False).logits
    past, pieces = None, []
    for piece in ids.split([ids.shape[1] - LAST_STEPS, LAST_STEPS - 1, 1], dim=1):
        output = model(input_ids=piece, past_key_values=past, use_cache=True)
        past = output.past_key_values
        pieces.append(output.logits)
    difference, dtype = distance(torch.cat(pieces, dim=1), full)
    sizes = f"{ids.shape[1] - LAST_STEPS} + {LAST_STEPS - 1} + 1 tokens"
    return _verdict(
        name, difference <= TOLERANCE[dtype], f"{sizes}: logits differ by {difference:.1e}"
    )


def _no_cache(subject: Subject) -> str:
    """Why there is no cache to check, or nothing."""
    can_generate = getattr(subject.model, "can_generate", None)
    if can_generate is None or not can_generate():
        return "the model does not generate"
    batch, config = subject.batch, getattr(subject.model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        return "the model has an encoder"
    has_ids = isinstance(batch, dict) and isinstance(batch.get("input_ids"), Tensor)
    if not has_ids or batch["input_ids"].shape[1] <= LAST_STEPS:
        return f"the batch has no input_ids of more than {LAST_STEPS} tokens"
    for _, installed in _parts(subject):
        if installed.inner.weights is not None and not installed.inner.weights.counts_visible:
            return "affine(count='keys') depends on the number of keys so far, by definition"
    return ""

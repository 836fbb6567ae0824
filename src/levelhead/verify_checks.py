"""The checks that compare with stock: each returns what it found, in one line."""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.capture import capture
from levelhead.convert_start import factored, multiply
from levelhead.sites.build import build_installed
from levelhead.sites.calls import AttentionCall
from levelhead.sites.find import find_attention
from levelhead.sites.host import host_of, installed_in
from levelhead.variants import parse_variant
from levelhead.verify_batch import Padded, Tokens, find_padding, find_tokens, run, tensors_in
from levelhead.verify_nudge import all_nudged, has_parameters
from levelhead.verify_report import FAILED, PASSED, SKIPPED, Check, verdict
from levelhead.verify_subject import STILL, TOLERANCE, UNSEEN, Subject, distance

PROBED_ROWS = 16
LAST_STEPS = 3


def check_parity(subject: Subject) -> list[Check]:
    """Neutralise every part of a copy: outputs and scores must be those of the stock model.

    Args:
        subject: What is checked.

    Returns:
        Two rows: "parity" and "scale".
    """
    stock_scores, stock_output = _scores_and_output(subject.stock, subject.batch, subject)
    scores, output = _scores_and_output(neutral_copy(subject), subject.batch, subject)
    difference, dtype = distance(output, stock_output)
    allowed = TOLERANCE[dtype]
    parity = verdict(
        "parity",
        difference <= allowed,
        f"neutral and stock differ by {difference:.1e} of the largest output (at most {allowed})",
    )
    return [parity, _scale_row(subject, scores, stock_scores, allowed)]


def neutral_copy(subject: Subject) -> nn.Module:
    """Return a copy in which every converted attention is plain softmax, by the same path.

    What was installed stays: its scale, its masks, its place in the host. Only its parts give way
    to those of plain softmax (beside a cap and a sink of the host's own), and a projection that
    makes up for a neutral start is divided again.

    Args:
        subject: What is checked.

    Returns:
        The copy.
    """
    model = copy.deepcopy(subject.model)
    for site in find_attention(model, **subject.options):
        installed, host = installed_in(site.module), host_of(site)
        if installed is None or host is None:
            continue
        multiply(factored(site, installed.factor_on), 1 / installed.factor)
        plain = build_installed(site, host, parse_variant("softmax"))
        inner, own = installed.inner, plain.inner
        inner.variant, inner.norm, inner.cap = own.variant, own.norm, own.cap
        inner.normaliser, inner.weights = own.normaliser, None
        inner.precondition = inner.gate = None
        installed.projections, installed.early_norm = plain.projections, None
        installed.early_scale = plain.early_scale
    return model


def _scale_row(
    subject: Subject, scores: dict[str, Tensor], stock: dict[str, Tensor], allowed: float
) -> Check:
    used = sorted({installed.inner.norm.score_scale(s.scale) for s, installed in subject.parts()})
    in_use = "scale in use: " + ", ".join(f"{scale:.6g}" for scale in used)
    if not stock or set(scores) != set(stock):
        return Check("scale", SKIPPED, f"{in_use}; the scores of stock could not be seen")
    worst = max(distance(scores[name], stock[name])[0] for name in stock)
    return verdict(
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


def nudged_too(check: Callable[[Subject], Check], subject: Subject) -> Check:
    """Run a check, and where it passes once more with the parameters of the variant nudged.

    A part that starts neutral (affine and gate with ``start="preserve"``) multiplies by zero what
    it takes from the wrong place: only nudged does it show.

    Args:
        check: One whose claim holds whatever the parameters are.
        subject: What is checked.

    Returns:
        Its row.
    """
    found = check(subject)
    if found.status != PASSED or not has_parameters(subject):
        return found
    with all_nudged(subject):
        if not all(out.isfinite().all() for out in tensors_in(run(subject.model, subject.batch))):
            return replace(found, detail=f"{found.detail}; nudged parameters overflow")
        again = check(subject)
    if again.status == FAILED:
        return replace(again, detail=f"with nudged parameters: {again.detail}")
    return replace(found, detail=f"{found.detail}; also with nudged parameters")


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
        moved = _moved(subject.model, tokens, position, STILL)
        # In half precision, what lies a little above a threshold in the one and a little below
        # it in the other is no leak.
        moved_in_stock = _moved(subject.stock, tokens, position, UNSEEN)
        if not moved.any():
            return Check(name, FAILED, f"changing token {position} moved no output at all")
        early = moved[..., :position].any(dim=0).nonzero().flatten().tolist()
        if subject.hides_the_future and early:
            as_stock = ", as in stock" if moved_in_stock[..., :position].any() else ""
            detail = f"changing token {position} moved outputs before it: {early}{as_stock}"
            return Check(name, FAILED, detail)
        beyond = (moved & ~moved_in_stock).any(dim=0).nonzero().flatten().tolist()
        if beyond:
            detail = f"changing token {position} moved outputs that stock does not move: {beyond}"
            return Check(name, FAILED, detail)
        reached.append(f"{position} (moved {int(moved.any(dim=0).sum())} of {last + 1})")
    rule = "no output before it moved" if subject.hides_the_future else "as far as in stock"
    return Check(name, PASSED, f"changed tokens {', '.join(reached)}: {rule}")


def _moved(
    model: nn.Module, tokens: Tokens, position: int, still: Mapping[torch.dtype, float]
) -> Tensor:
    """Which output positions move, ``[B, T]``, when the token at a position changes."""
    where = torch.zeros(tokens.num_tokens, dtype=torch.bool, device=tokens.tensor.device)
    where[position] = True
    before, after = (
        tokens.positions_of(run(model, batch)) for batch in (tokens.batch, tokens.changed(where))
    )
    assert before is not None
    assert after is not None
    difference = (after - before).abs().flatten(2).amax(dim=-1)
    return ~(difference <= still[before.dtype] * before.abs().max())


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
    moved, moved_in_stock = (_moved_by_padding(m, padded) for m in (subject.model, subject.stock))
    if moved is None or moved_in_stock is None:
        return Check(name, SKIPPED, "no output has a row for each token")
    detail = f"{int(padded.is_padding.sum())} padding tokens changed: others moved by {moved:.1e}"
    still = STILL[next(tensors_in(run(subject.stock, subject.batch))).dtype]
    if moved_in_stock > still:
        return Check(name, SKIPPED, f"{detail}, and in stock by {moved_in_stock:.1e}")
    return verdict(name, moved <= still, detail)


def _moved_by_padding(model: nn.Module, padded: Padded) -> float | None:
    """By how much outputs of tokens that are not padding move, relative to the largest."""
    tokens, is_padding = padded.tokens, padded.is_padding
    outputs = [run(model, batch) for batch in (tokens.batch, tokens.changed(is_padding))]
    rows = tokens if padded.shares_positions else find_tokens(model, tokens.batch)
    before, after = (rows and rows.positions_of(output) for output in outputs)
    if before is None or after is None:
        return None
    difference = (after - before).abs().flatten(2).amax(dim=-1)
    if padded.shares_positions:
        difference = difference.masked_fill(is_padding, 0.0)
    return float((difference.max() / before.abs().max()).item())


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
    keyword, past, pieces = _cache_keyword(model), None, []
    for piece in ids.split([ids.shape[1] - LAST_STEPS, LAST_STEPS - 1, 1], dim=1):
        output = model(input_ids=piece, use_cache=True, **{keyword: past})
        past = getattr(output, keyword)
        pieces.append(output.logits)
    difference, dtype = distance(torch.cat(pieces, dim=1), full)
    sizes = f"{ids.shape[1] - LAST_STEPS} + {LAST_STEPS - 1} + 1 tokens"
    return verdict(
        name, difference <= TOLERANCE[dtype], f"{sizes}: logits differ by {difference:.1e}"
    )


def _cache_keyword(model: nn.Module) -> str:
    """What this version of transformers calls the cache."""
    known = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in known else "past_key_values"


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
    for _, installed in subject.parts():
        if installed.inner.weights is not None and not installed.inner.weights.counts_visible:
            return "affine(count='keys') depends on the number of keys so far, by definition"
    return ""

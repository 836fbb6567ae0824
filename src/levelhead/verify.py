"""The self-check of a converted model: that it runs what it says, and leaks nothing."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from levelhead.shapes import require
from levelhead.sites.find import find_attention
from levelhead.sites.host import installed_in
from levelhead.sites.reading import Reader
from levelhead.store_checksum import checksum
from levelhead.verify_batch import require_tokens
from levelhead.verify_checks import (
    check_cache,
    check_leak,
    check_padding,
    check_parity,
    nudged_too,
)
from levelhead.verify_path import check_on_path
from levelhead.verify_report import FAILED, PASSED, Check, Verification, VerificationError
from levelhead.verify_subject import Subject


def verify(
    model: nn.Module,
    batch: Any,
    *,
    is_causal: bool | None = None,
    readers: Sequence[Reader] = (),
    ignore: Collection[type[nn.Module]] = (),
) -> Verification:
    """Check a converted model on one batch.

    Parity: with every part set to plain softmax, the model gives the outputs of the stock model.
    Scale: and the scores. Mask leak: a changed token moves no output that it does not move in the
    stock model and, in a causal model, none before it. On path: nudging the attention of any layer
    moves the output, and so do its parameters. Padding: what stands in the padding moves nothing
    else. Cache: a sequence fed in pieces gives the logits of the full pass. Checksum: all of this
    changed no bit of the model.

    Leak, padding and cache are checked as the model is, and again with the parameters of the
    variant nudged: a part that starts neutral hides what it does.

    Runs in evaluation mode without gradients, on two copies of the model, one after the other.

    Args:
        model: A model converted by ``levelhead.convert``; not compiled.
        batch: One batch: a mapping of keyword arguments, a tuple of positional ones, or the one
            argument. More than a few tokens or images make it slow, not better.
        is_causal: Whether the future must be hidden. By default the model is asked, and the masks
            of its calls: all of them must forbid the future. Say True where a mask in the batch
            should (``nn.TransformerEncoder``).
        readers: As for ``convert``.
        ignore: As for ``convert``.

    Returns:
        The table; print it.

    Raises:
        ValueError: The model is not converted, or the batch is empty.
        VerificationError: A check failed; it holds the table.

    Example:
        >>> import torch, levelhead as lh
        >>> layer = torch.nn.TransformerEncoderLayer(48, 3, batch_first=True)
        >>> conversion = lh.convert(layer, "quest")
        >>> [check.status for check in lh.verify(layer, torch.randn(2, 7, 48)).checks[:4]]
        ['passed', 'passed', 'passed', 'passed']
    """
    found = find_attention(model, readers=readers, ignore=ignore)
    sites = [site for site in found if installed_in(site.module) is not None]
    require(
        bool(sites), "verify needs a model converted by levelhead.convert",
        f"a {type(model).__name__} whose {len(found)} attentions are all stock",
    )  # fmt: skip
    require_tokens(batch)
    before = checksum(model.state_dict())
    with _evaluating(model):
        options = {"readers": readers, "ignore": ignore}
        subject = Subject(model, batch, sites, is_causal, options)
        checks = [
            *check_parity(subject),
            nudged_too(check_leak, subject),
            check_on_path(subject),
            nudged_too(check_padding, subject),
            nudged_too(check_cache, subject),
        ]
    after = checksum(model.state_dict())
    holds = PASSED if before == after else FAILED
    checks.append(Check("checksum", holds, f"{after[:16]} before and after"))
    variants = sorted({str(installed.variant) for _, installed in subject.parts()})
    title = f"{'; '.join(variants)}: {len(sites)} of {len(found)} attentions converted"
    verification = Verification(title, tuple(checks))
    if verification.failed:
        raise VerificationError(verification)
    return verification


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Run without gradients in evaluation mode, and give every module its own mode back."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode

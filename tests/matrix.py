"""Every architecture with every variant: what holds, cell by cell, and the tables of it.

``python tests/matrix.py`` writes the tables of README.md and docs/support.md.
"""

import copy
import re
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

import levelhead as lh
from hosts import HOSTS, OWN, run
from levelhead.sites.combining import refusal
from levelhead.sites.host import host_of, installed_in
from levelhead.store_checksum import checksum

ALL = HOSTS | OWN
ARCHITECTURES = tuple(ALL)
FAST = ("quest", "affine + gate", "sigma_reparam")
VARIANTS = (
    "softmax", "off_by_one", "sink", "quest", "qnorm", "qknorm", "qknorm_hs", "qknorm_ds",
    "soft_cap(cap=2.0)", "affine", "precondition", "gate", "gate(granularity='headwise')",
    "spectral(strength=0.5)", "spectral(form='svd')", "sigma_reparam", "affine + gate",
    "quest + sink + gate", "sigma_reparam + quest + affine",
)  # fmt: skip
PROJECTION_TERMS = ("spectral", "sigma_reparam")
OUTPUT_TERMS = ("affine", "gate")
"""What merges: the latter only where no norm stands between the heads and their projection."""
TOLERANCE = 1e-5
TOKENS = 6


def output_of(result):
    """The tensor a model is asked for."""
    if isinstance(result, torch.Tensor):
        return result
    names = ("logits", "logits_per_image", "last_hidden_state")
    return next(v for v in (getattr(result, n, None) for n in names) if v is not None)


@torch.no_grad()
def outputs(model, batch):
    """The model's output on a batch."""
    return output_of(run(model, batch))


@torch.no_grad()
def randomise(model, seed=3):
    """Move what a variant added away from its start, so that every part does something."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".levelhead." in name:
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.add_(0.2 * noise * parameter.abs().clamp_min(1.0))
    for part in model.modules():
        if hasattr(part, "alpha_mean"):
            part.set_state("alpha_mean", 0.4)


def worst(a, b):
    """Largest absolute difference."""
    return (a - b).abs().max().item()


def walk(architecture, variant):
    """Put one variant into one architecture and assert all that must hold.

    Returns:
        "yes", or the reason of the refusal; anything else is an AssertionError.
    """
    host = ALL[architecture]
    model, batch = host.build(), host.batch()
    before, stock = checksum(model.state_dict()), outputs(model, batch)
    conversion = convert_or_reason(model, variant)
    promised, _ = cell(architecture, variant)
    if isinstance(conversion, str):
        assert promised == "-"
        assert checksum(model.state_dict()) == before
        assert torch.equal(outputs(model, batch), stock)
        return conversion
    assert promised == ("partly" if conversion.left else "yes")
    check_start(conversion, worst(outputs(model, batch), stock))
    trained = copy.deepcopy(model)
    check_restore(model, batch, before, stock)
    check_merge(copy.deepcopy(trained), batch, variant)
    check_training(trained, batch)
    randomise(trained)
    check_verify(trained, batch)
    check_causality(trained, batch)
    check_generation(trained, batch)
    check_saving(trained, host.build(), batch)
    return "yes"


@cache
def sites_of(architecture):
    """The attentions of one architecture."""
    return lh.find_attention(ALL[architecture].build())


@cache
def cell(architecture, variant):
    """What conversion will answer: "yes", "partly" or "-", and the reasons of what it refuses."""
    variant, sites = lh.parse_variant(variant), sites_of(architecture)
    reasons = [refusal(site, variant) or host_of(site).refuses(site, variant) for site in sites]
    refused = [reason for reason in reasons if reason is not None]
    word = "yes" if not refused else "-" if len(refused) == len(sites) else "partly"
    return word, tuple(dict.fromkeys(refused))


def convert_or_reason(model, variant):
    """Convert, or return why no attention takes the variant."""
    try:
        return lh.convert(model, variant)
    except ValueError as refused:
        head, _, reasons = str(refused).partition(" cannot go into these attentions: ")
        if not reasons:
            raise
        return f"{head}: {reasons}"


def check_start(conversion, moved):
    """A layer that says "preserved" must be so."""
    words = {layer.function for layer in conversion.layers}
    assert all(word == "preserved" or word.startswith("moved by") for word in words)
    if words == {"preserved"}:
        assert moved < TOLERANCE


def check_restore(model, batch, before, stock):
    """Restored right away: bit by bit the model that came."""
    lh.restore(model)
    assert checksum(model.state_dict()) == before
    assert torch.equal(outputs(model, batch), stock)
    assert all(installed_in(module) is None for module in model.modules())


def check_merge(model, batch, variant):
    """Folded terms leave the output where it was."""
    has_norm = any(site.output_norm is not None for site in lh.find_attention(model))
    mergeable = PROJECTION_TERMS if has_norm else PROJECTION_TERMS + OUTPUT_TERMS
    terms = [term.name for term in lh.parse_variant(variant).terms]
    folded = [term for term in terms if term in mergeable]
    if not folded:
        with pytest.raises(ValueError, match="merge_ needs a"):
            lh.merge_(model)
        return
    before = outputs(model, batch)
    assert len(lh.merge_(model).merged) == len(folded)
    assert worst(outputs(model, batch), before) < TOLERANCE * max(1.0, before.abs().max().item())


def check_training(model, batch):
    """One backward pass reaches every parameter of the variant."""
    model.train()
    output_of(run(model, batch)).square().mean().backward()
    ours = {name: p for name, p in model.named_parameters() if ".levelhead." in name}
    assert all(p.grad is not None and p.grad.isfinite().all() for p in ours.values()), ours.keys()
    model.zero_grad()
    model.eval()


def check_verify(model, batch):
    """The self-check passes, and what it must not skip it does not."""
    found = {check.name: check.status for check in lh.verify(awake(model), batch).checks}
    has_terms = any(
        installed.variant.terms for installed in map(installed_in, model.modules()) if installed
    )
    always = {"parity", "checksum"} | ({"on path"} if has_terms else set())
    assert {name for name in always if found[name] != "passed"} == set()


@torch.no_grad()
def awake(model):
    """A copy whose attentions count: some hosts start with scales of (nearly) zero behind them."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if ".levelhead." not in name and parameter.ndim == 1 and parameter.abs().max() < 1e-2:
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model


def check_causality(model, batch):
    """A causal model does not move before the token that changed."""
    if not type(model).__name__.endswith("CausalLM") and "GPT2" not in type(model).__name__:
        return
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    changed["input_ids"][:, -2] = 5 + (changed["input_ids"][:, -2] == 5).long()
    old, new = outputs(model, batch), outputs(model, changed)
    assert worst(old[:, :-2], new[:, :-2]) < TOLERANCE
    assert worst(old[:, -2:], new[:, -2:]) > 0


def check_generation(model, batch):
    """Greedy decoding over a cache is that of full forward passes."""
    if not getattr(model, "can_generate", bool)():
        return
    prompt = {k: v for k, v in batch.items() if not k.startswith("decoder")}
    found = [
        model.generate(
            **prompt, use_cache=use_cache, max_new_tokens=TOKENS, min_new_tokens=TOKENS,
            do_sample=False, output_logits=True, return_dict_in_generate=True, pad_token_id=0,
        )
        for use_cache in (True, False)
    ]  # fmt: skip
    for cached, full in zip(*(f.logits for f in found), strict=True):
        assert worst(cached, full) < TOLERANCE * max(1.0, full.abs().max().item())
    assert torch.equal(found[0].sequences, found[1].sequences)


def check_saving(model, stock, batch):
    """Saved and loaded: every tensor bit by bit (BLAS may sum otherwise in other memory)."""
    is_transformers = hasattr(model, "save_pretrained")
    with tempfile.TemporaryDirectory() as folder:
        lh.save(model, folder)
        loaded = lh.load(folder) if is_transformers else lh.load(folder, stock)
    assert checksum(loaded.state_dict()) == checksum(model.state_dict())
    assert worst(outputs(loaded.eval(), batch), outputs(model, batch)) < 1e-6


def support_table(architectures=ARCHITECTURES, variants=VARIANTS):
    """One row an architecture: "yes", "partly" or "-" in each column, the reasons below."""
    rows, reasons = [], {}
    for architecture in architectures:
        cells = [cell(architecture, variant) for variant in variants]
        rows.append([architecture, *(word for word, _ in cells)])
        reasons |= dict.fromkeys(reason for _, whys in cells for reason in whys)
    header = ["", *(f"`{variant}`" for variant in variants)]
    lines = [header, ["---"] * len(header), *rows]
    table = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([*table, "", "Reasons:", "", *(f"- {reason}" for reason in reasons)])


def short_table():
    """Architectures that answer alike in one row: what they refuse, all over or in places."""
    terms = [variant for variant in VARIANTS if len(lh.parse_variant(variant).terms) == 1]
    names = {variant: f"`{lh.parse_variant(variant).terms[0].name}`" for variant in terms}
    groups = {}
    for architecture in ARCHITECTURES:
        cells = {variant: cell(architecture, variant)[0] for variant in terms}
        refused, partly = (
            ", ".join(dict.fromkeys(names[v] for v, word in cells.items() if word == wanted))
            for wanted in ("-", "partly")
        )
        groups.setdefault((ALL[architecture].library, refused, partly), []).append(architecture)
    rows = [
        (library, ", ".join(members), refused or "none", partly)
        for (library, refused, partly), members in groups.items()
    ]
    header = ("library", "architectures", "terms refused", "in some layers only")
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


ROOT = Path(__file__).parent.parent
WRITTEN = {ROOT / "README.md": short_table, ROOT / "docs" / "support.md": support_table}
"""Files with a table, between two comments."""


def with_table(path):
    """The text of a file with its table as it must be now."""
    between = re.compile(r"(<!-- table: python tests/matrix.py -->\n).*?(<!-- /table -->)", re.S)
    text, count = between.subn(lambda m: f"{m[1]}{WRITTEN[path]()}\n{m[2]}", path.read_text())
    assert count == 1, path
    return text


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    for written in WRITTEN:
        written.write_text(with_table(written))

"""Every architecture with every variant: what holds, cell by cell, and the table of it.

``python tests/matrix.py`` walks the whole matrix and prints the support table of the README.
"""

import copy
import sys
import tempfile
from pathlib import Path

import torch

import levelhead as lh
from hosts import HOSTS, run
from levelhead.sites.host import installed_in
from levelhead.store_checksum import checksum

ARCHITECTURES = tuple(name for name, host in HOSTS.items() if host.library == "transformers")
FAST = ("quest", "affine + gate", "sigma_reparam")
VARIANTS = (
    "softmax", "off_by_one", "sink", "quest", "qnorm", "qknorm", "qknorm_hs", "qknorm_ds",
    "soft_cap(cap=2.0)", "affine", "precondition", "gate", "gate(granularity='headwise')",
    "spectral(strength=0.5)", "spectral(form='svd')", "sigma_reparam", "affine + gate",
    "quest + sink + gate", "sigma_reparam + quest + affine",
)  # fmt: skip
MERGEABLE = ("spectral", "sigma_reparam", "affine", "gate")
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
    host = HOSTS[architecture]
    model, batch = host.build(), host.batch()
    before, stock = checksum(model.state_dict()), outputs(model, batch)
    conversion = convert_or_reason(model, variant)
    if isinstance(conversion, str):
        assert checksum(model.state_dict()) == before
        assert torch.equal(outputs(model, batch), stock)
        return conversion
    check_start(conversion, worst(outputs(model, batch), stock))
    trained = copy.deepcopy(model)
    check_restore(model, batch, before, stock)
    check_merge(copy.deepcopy(trained), batch, variant)
    check_training(trained, batch)
    randomise(trained)
    check_on_path(trained, batch)
    check_causality(trained, batch)
    check_generation(trained, batch)
    check_saving(trained, batch)
    return "yes"


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
    terms = [term.name for term in lh.parse_variant(variant).terms]
    if not any(term in MERGEABLE for term in terms):
        return
    before = outputs(model, batch)
    merge = lh.merge_(model)
    assert len(merge.merged) == sum(term in MERGEABLE for term in terms)
    assert worst(outputs(model, batch), before) < TOLERANCE * max(1.0, before.abs().max().item())


def check_training(model, batch):
    """One backward pass reaches every parameter of the variant."""
    model.train()
    output_of(run(model, batch)).square().mean().backward()
    ours = {name: p for name, p in model.named_parameters() if ".levelhead." in name}
    assert all(p.grad is not None and p.grad.isfinite().all() for p in ours.values()), ours.keys()
    model.zero_grad()
    model.eval()


def check_on_path(model, batch):
    """Every converted attention is asked: disturb the child of any, and the output moves."""
    before = outputs(model, batch)
    for name, module in list(model.named_modules()):
        installed = installed_in(module)
        if installed is not None and (installed.variant.terms or not is_landmark(module)):
            undo = disturb(installed, is_landmark(module))
            assert worst(outputs(model, batch), before) > 0, f"{name} is not on the path"
            undo()
    assert torch.equal(outputs(model, batch), before)


def is_landmark(module):
    """Whether the host has no place for an inner attention, only for what is around it."""
    return type(module).__name__ == "NystromformerSelfAttention"


@torch.no_grad()
def disturb(installed, is_landmark):
    """Let an installed attention do something else; return how to undo it."""
    if not is_landmark:
        handle = installed.inner.register_forward_hook(lambda module, args, output: 2 * output)
        return handle.remove
    kept = copy.deepcopy(installed)
    installed.early_scale *= 2
    for part in (installed.projections, installed.inner):
        for parameter in part.parameters():
            parameter.mul_(2)
        for inside in part.modules():
            for name in ("strength", "eps"):
                if hasattr(inside, name):
                    setattr(inside, name, 2 * getattr(inside, name) + 1)
        for name, buffer in part.named_buffers():
            if name.endswith("correction"):
                buffer.mul_(0)
    return lambda: (installed.__dict__.clear(), installed.__dict__.update(kept.__dict__))


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


def check_saving(model, batch):
    """Saved and loaded: every tensor bit by bit (BLAS may sum otherwise in other memory)."""
    with tempfile.TemporaryDirectory() as folder:
        lh.save(model, folder)
        loaded = lh.load(folder)
    assert checksum(loaded.state_dict()) == checksum(model.state_dict())
    assert worst(outputs(loaded, batch), outputs(model, batch)) < 1e-6


def support_table(architectures=ARCHITECTURES, variants=VARIANTS):
    """Walk the matrix and write it down in Markdown.

    Returns:
        One row an architecture, "yes" or "-" in each column, the reasons of "-" below.
    """
    rows, reasons = [], {}
    for architecture in architectures:
        cells = [walk(architecture, variant) for variant in variants]
        rows.append([architecture, *("yes" if cell == "yes" else "-" for cell in cells)])
        for cell in cells:
            if cell != "yes":
                reasons[cell.partition(": ")[2].partition(";")[0]] = None
    header = ["", *(f"`{variant}`" for variant in variants)]
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(["| " + " | ".join(line) + " |" for line in lines] + ["", *reasons])


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    print(support_table())

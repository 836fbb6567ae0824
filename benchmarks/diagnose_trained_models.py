"""Diagnose two trained models and write down what was found.

    make weights
    python benchmarks/diagnose_trained_models.py --record records/diagnose_trained_models.md

MiniLM reads four rows of unequal length, padded; Whisper's decoder reads random words said twice,
over silence. What each number means: docs/measures.md; the thresholds: docs/diagnosing.md.
"""

import argparse
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import torch

from levelhead.diagnose import diagnose
from levelhead.diagnosis import Diagnosis

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import trained_models as trained  # noqa: E402

SILENCE = -1.5
"""What Whisper's log-mel spectrogram of silence holds."""

HEADER = """# What diagnose says of two trained models

    make weights
    python benchmarks/diagnose_trained_models.py --record records/diagnose_trained_models.md

torch {torch}, transformers {transformers}, float32. Thresholds and their sources:
docs/diagnosing.md; the same models by single measures: measure_on_trained_models.md."""


def diagnose_minilm() -> Diagnosis:
    """Diagnose the encoder on three sentences and a paragraph, padded to one length.

    Returns:
        The diagnosis.
    """
    batch = trained.minilm_batch((*trained.SENTENCES, trained.PROSE))
    return diagnose(trained.minilm(), batch, name="all-MiniLM-L6-v2", num_queries=None)


def diagnose_whisper() -> Diagnosis:
    """Diagnose the decoder (and, on the way, the encoder) on random words said twice.

    Returns:
        The diagnosis.
    """
    tokens = trained.repeated_tokens()
    batch = {
        "input_features": torch.full((len(tokens), 80, 3000), SILENCE),
        "decoder_input_ids": tokens,
        "use_cache": False,
    }
    return diagnose(trained.whisper(), batch, name="Whisper tiny.en", num_queries=128)


def heads_table(diagnosis: Diagnosis, metric: str, layers: Iterable[str]) -> str:
    """Show one number of every head.

    Args:
        diagnosis: Of a model.
        metric: Which.
        layers: Names of the rows.

    Returns:
        A table in Markdown.
    """
    values = {(r.layer, r.head): r.value for r in diagnosis.records if r.metric == metric}
    heads = sorted({head for _, head in values})
    lines = [f"| {metric} | " + " | ".join(f"head {head}" for head in heads) + " |"]
    lines.append("| :-- |" + " --: |" * len(heads))
    for layer in [layer for layer in layers if (layer, heads[0]) in values]:
        numbers = " | ".join(f"{values[layer, head]:.2f}" for head in heads)
        lines.append(f"| {layer} | {numbers} |")
    return "\n".join(lines)


def findings_table(diagnosis: Diagnosis) -> str:
    """Show the findings.

    Args:
        diagnosis: Of a model.

    Returns:
        A table in Markdown.
    """
    lines = ["| finding | where (the worst head) | heads | number | threshold |"]
    lines.append("| :-- | :-- | --: | --: | --: |")
    for f in diagnosis.findings:
        kind = f"{f.severity}: {f.kind.replace('_', ' ')}"
        number = f"{f.metric} = {f.value:.4g}"
        lines.append(f"| {kind} | {f.where} | {f.num_heads} | {number} | {f.threshold:g} |")
    return "\n".join(lines)


def describe(title: str, diagnosis: Diagnosis, metrics: Iterable[str], layers: str) -> str:
    """Write one model's section.

    Args:
        title: Heading.
        diagnosis: Of the model.
        metrics: Numbers to show of every head.
        layers: Layers whose name ends so are shown.

    Returns:
        Markdown.
    """
    meta = diagnosis.meta
    names = list(dict.fromkeys(record.layer for record in diagnosis.records if record.layer))
    shown = [name for name in names if name.endswith(layers)]
    looked = (
        f"{meta['batch']}: {meta['num_tokens']} tokens, {meta['num_padding']} of padding left out."
    )
    tables = [heads_table(diagnosis, metric, shown) for metric in metrics]
    unmeasured = [f"- not measured: {reason}" for reason in meta["not_measured"]]
    parts = [f"## {title}", looked, f"**{diagnosis.verdict}**", findings_table(diagnosis)]
    return "\n\n".join([*parts, *tables, *(["\n".join(unmeasured)] if unmeasured else [])])


def main() -> None:
    """Print the record, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path, help="write it here instead of printing it")
    chosen = parser.parse_args()
    versions = {name: version(name) for name in ("torch", "transformers")}
    text = "\n\n".join([
        HEADER.format(**versions),
        describe(
            "MiniLM (post-LN encoder)", diagnose_minilm(), ["sink_mass_mean"], "self",
        ),
        describe(
            "Whisper tiny.en (pre-LN, causal decoder)", diagnose_whisper(),
            ["induction_mean", "sink_mass_mean"], "self_attn",
        ),
    ])  # fmt: skip
    if chosen.record is None:
        print(text)
    else:
        chosen.record.write_text(text + "\n")


if __name__ == "__main__":
    main()

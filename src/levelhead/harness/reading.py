"""What a table shows, in sentences that claim no more than the numbers do."""

from collections.abc import Mapping
from typing import Any

SATURATED = 0.8  # share of a row on its strongest key, averaged: nearly one-hot everywhere
SIGNIFICANT = 0.05
FEW_SEEDS = 5  # below this the interval is wide whatever the variant does


def read_task(summary: Mapping[str, Any]) -> list[str]:
    """Read one task's rows.

    Args:
        summary: What ``compare.summarise`` has put together.

    Returns:
        Sentences: one for each variant, then what holds for all of them.
    """
    rows = [row for row in summary["rows"] if row["verdict"] != "baseline"]
    lines = [sentence for row in rows for sentence in _row_sentences(row, summary)]
    return [*lines, *_common_sentences(rows, summary)]


def row_name(row: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """Name a row: the variant, and the init where there are several.

    Args:
        row: Of the table.
        summary: The table's.

    Returns:
        For example ``"quest"`` or ``"quest, mimetic"``.
    """
    several = len({other["init"] for other in summary["rows"]}) > 1
    return f"{row['variant']}, {row['init']}" if several else row["variant"]


def counted(number: int, noun: str) -> str:
    """Put a number before its noun.

    Args:
        number: How many.
        noun: In the singular.

    Returns:
        For example ``"1 seed"`` or ``"3 seeds"``.
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _row_sentences(row: Mapping[str, Any], summary: Mapping[str, Any]) -> list[str]:
    name = row_name(row, summary)
    sentences = [f"{name}: {_difference_words(row, summary)}"]
    if row["diverged_seeds"]:
        seeds = ", ".join(map(str, row["diverged_seeds"]))
        sentences.append(
            f"{name}: diverged with seed {seeds}; its mean and difference leave that out, "
            "which flatters it."
        )
    start, end = row["concentration_start"], row["concentration_end"]
    if start is not None and start >= SATURATED:
        after = "not measured" if end is None else f"{end:.2f}"
        sentences.append(
            f"{name}: saturated from the start: a row puts {start:.2f} of its attention on one "
            f"key before training (1 = one-hot), {after} after it.{_remedy(row)}"
        )
    return sentences


def _remedy(row: Mapping[str, Any]) -> str:
    if row["variant"] != "spectral":
        return ""
    return (
        " The paper's strength of 10 does that to LayerNormed inputs; "
        "try --variants 'spectral(strength=1)'."
    )


def _difference_words(row: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    difference, digits, unit = row["difference"], summary["digits"], summary["unit"]
    if difference["n"] == 0:
        return "no seed finished, so nothing can be compared."
    mean = f"{difference['mean']:+.{digits}f} {unit}"
    if difference["n"] == 1:
        return f"{mean} with one pair of runs, which shows nothing: chance cannot be told apart."
    if difference["t_interval"] is None:
        return f"{mean} in each of {difference['n']} pairs, so chance cannot be estimated."
    low, high = difference["t_interval"]
    interval = f"{mean} ({low:+.{digits}f} to {high:+.{digits}f}, n = {difference['n']})"
    if row["verdict"] == "no difference shown":
        return (
            f"no difference shown: {interval}; less than {difference['half_width']:.{digits}f} "
            "could not have shown."
        )
    return f"{row['verdict']} than softmax: {interval}."


def _common_sentences(rows: list[Mapping[str, Any]], summary: Mapping[str, Any]) -> list[str]:
    sentences = []
    judged = [row for row in rows if row["difference"].get("p_holm") is not None]
    if len(judged) > 1:
        stand = [
            row_name(row, summary)
            for row in judged
            if row["difference"]["p_holm"] < SIGNIFICANT and row["verdict"] in ("better", "worse")
        ]
        sentences.append(
            f"{len(judged)} comparisons were made, so one interval in twenty misses by chance; "
            f"corrected for that (Holm): {', '.join(stand) or 'none'} "
            f"{'stands' if len(stand) < 2 else 'stand'}."
        )
    if summary["num_seeds"] < FEW_SEEDS:
        sentences.append(
            f"{counted(summary['num_seeds'], 'seed')} "
            f"{'is' if summary['num_seeds'] == 1 else 'are'} few: only large effects can show; "
            "--seeds 10 trains what is missing."
        )
    sentences.append(
        f"One learning rate ({summary['learning_rate']:g}) and "
        f"{counted(summary['steps'], 'step')} for all: "
        "a variant may do better with its own. The spread is over starts and data order; the "
        "test data are the same throughout."
    )
    if summary["num_versions"] > 1:
        sentences.append(
            f"These trainings come from {summary['num_versions']} versions of levelhead or torch; "
            "cells.jsonl says which, and a new --out trains all of them with one."
        )
    return sentences

"""What a table shows, in sentences that claim no more than the numbers do."""

from collections.abc import Mapping, Sequence
from typing import Any

from levelhead.harness.controls import control_sentences
from levelhead.harness.statistics import POWER

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
    lines = [f"{row_name(row, summary)}: {_difference_words(row, summary)}" for row in rows]
    for row in summary["rows"]:
        name = row_name(row, summary)
        lines += [f"{name}: {sentence}" for sentence in _row_sentences(row)]
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


def _row_sentences(row: Mapping[str, Any]) -> list[str]:
    """What is to be known about one row beside its difference."""
    return [*_choice_sentences(row), *_loss_sentences(row), *_saturation_sentences(row)]


def _choice_sentences(row: Mapping[str, Any]) -> list[str]:
    choice = row["selection"]
    if choice is None:
        return []
    rate, sentences = f"{choice['learning_rate']:g}", []
    if choice["at_edge"]:
        sentences.append(
            f"best at the {choice['at_edge']} learning rate of the grid ({rate}): a better one "
            "may lie outside, so widen the grid."
        )
    if choice["tied_with"]:
        others = ", ".join(f"{other:g}" for other in choice["tied_with"])
        sentences.append(f"learning rates {rate} and {others} were equally good; {rate} is taken.")
    lost = sum(tried["num_missing"] for tried in choice["tried"])
    if lost:
        sentences.append(
            f"{counted(lost, 'training')} died while its learning rate was chosen, so it had "
            "less to choose by than the others; the same command tries again."
        )
    diverged = [
        f"{t['num_diverged']} of {t['n'] + t['num_diverged']} at {t['learning_rate']:g}"
        for t in choice["tried"]
        if t["num_diverged"]
    ]
    if diverged:
        sentences.append(f"diverged while its learning rate was chosen: {', '.join(diverged)}.")
    return sentences


def _loss_sentences(row: Mapping[str, Any]) -> list[str]:
    sentences = []
    if row["diverged_seeds"]:
        seeds = ", ".join(map(str, row["diverged_seeds"]))
        sentences.append(
            f"diverged with seed {seeds}; its mean and difference leave that out, which "
            "flatters it."
        )
    for lost in row["unfinished"]:
        sentences.append(
            f"seed {lost['seed']} is missing: its process died {_times(lost['deaths'])}; "
            "the same command tries again."
        )
    for again in row["retried"]:
        sentences.append(
            f"seed {again['seed']} was trained again, from its start: its process died "
            f"{_times(again['deaths'])}."
        )
    return sentences


def _times(deaths: Sequence[str]) -> str:
    return f"{counted(len(deaths), 'time')} ({'; '.join(dict.fromkeys(deaths))})"


def _saturation_sentences(row: Mapping[str, Any]) -> list[str]:
    start, end = row["concentration_start"], row["concentration_end"]
    if row["verdict"] == "baseline" or start is None or start < SATURATED:
        return []
    after = "not measured" if end is None else f"{end:.2f}"
    return [
        f"saturated from the start: a row puts {start:.2f} of its attention on one key before "
        f"training (1 = one-hot), {after} after it.{_remedy(row)}"
    ]


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
    interval = (
        f"{mean} ({_ends(difference['t_interval'], digits)}, bootstrap "
        f"{_ends(difference['bootstrap_interval'], digits)}, n = {difference['n']})"
    )
    if row["verdict"] == "no difference shown":
        return (
            f"no difference shown: {interval}; at this spread a true difference of "
            f"{difference['detectable']:.{digits}f} shows in {POWER:.0%} of such experiments, "
            "a smaller one less often."
        )
    after_holm = "" if row["stands"] else ", not after Holm"
    return f"{row['verdict']} than softmax{after_holm}: {interval}."


def _ends(interval: Sequence[float], digits: int) -> str:
    low, high = interval
    return f"{low:+.{digits}f} to {high:+.{digits}f}"


def _common_sentences(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> list[str]:
    return [
        *_holm_sentences(rows, summary),
        *_seed_sentences(summary["num_seeds"]),
        *_rate_sentences(summary),
        "The spread is over starts and data order; the test data are the same throughout.",
        *control_sentences(summary["rows"]),
        *_version_sentences(summary["num_versions"]),
    ]


def _holm_sentences(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> list[str]:
    if summary["num_comparisons"] < 2:
        return []
    stand = [row_name(row, summary) for row in rows if row["stands"]]
    return [
        f"{summary['num_comparisons']} comparisons were made in the whole grid, so one interval "
        f"in twenty misses by chance; corrected for that (Holm): {', '.join(stand) or 'none'} "
        f"{'stands' if len(stand) < 2 else 'stand'}."
    ]


def _seed_sentences(num_seeds: int) -> list[str]:
    if num_seeds >= FEW_SEEDS:
        return []
    return [
        f"{counted(num_seeds, 'seed')} {'is' if num_seeds == 1 else 'are'} few: only large "
        "effects can show; --seeds 10 trains what is missing."
    ]


def _rate_sentences(summary: Mapping[str, Any]) -> list[str]:
    rates, steps = summary["learning_rates"], counted(summary["steps"], "step")
    if len(rates) > 1:
        seeds = counted(summary["num_selection_seeds"], "seed")
        return [
            f"Each row at its own best of {len(rates)} learning rates "
            f"({', '.join(f'{rate:g}' for rate in rates)}), {steps} each, chosen by the mean over "
            f"{seeds} that {'is' if seeds.startswith('1 ') else 'are'} not reported, on a fifth "
            "of the training data that those runs did not train on: "
            f"{counted(len(rates) * summary['num_selection_seeds'], 'training')} for every row. "
            "The reported runs train on all of it."
        ]
    rate = summary["rows"][0]["learning_rate"]
    tries = " ".join(f"{factor * rate:g}" for factor in (0.3, 1, 3))
    said = (
        f"One learning rate ({rate:g}) and {steps} for all: a variant may do better with its own"
    )
    if not summary.get("can_choose_rates", True):
        return [f"{said}; these training data have no part to choose one by."]
    return [f"{said}; --learning-rates {tries} gives each row its own."]


def _version_sentences(num_versions: int) -> list[str]:
    if num_versions < 2:
        return []
    return [
        f"These trainings come from {num_versions} versions of levelhead or torch; "
        "cells.jsonl says which, and a new --out trains all of them with one."
    ]

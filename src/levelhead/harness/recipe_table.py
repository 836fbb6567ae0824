"""The table of recipes: the papers' figures, both forms, and what was measured last."""

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from levelhead.harness.config import RUNS_FOLDER
from levelhead.harness.recipe import IMAGES, TEXTS, Form, Recipe, load_recipe
from levelhead.harness.recipe_files import recipe_names
from levelhead.harness.recipe_training import data_word, model_word

RESULTS = Path(__file__).parent / "paper_results.yaml"
RECORDS_FOLDER = Path("records")
COLUMNS = ("name", "title", "paper", "full", "small", "measured")
METRICS = ((IMAGES, "accuracy_pct"), (TEXTS, "perplexity"))
"""What of a result is shown; else the share of settings solved."""


@cache
def paper_results() -> dict[str, Any]:
    """Read the figures of the papers.

    Returns:
        ``rows``: name to metric, source and values; ``left_out``: what has no recipe, and why.
    """
    return yaml.safe_load(RESULTS.read_text("utf-8"))


def recipe_rows(
    folders: Iterable[Path] = (RUNS_FOLDER, RECORDS_FOLDER),
) -> list[dict[str, Any]]:
    """Return a row for each recipe, and one for each table that has none, with the reason.

    Args:
        folders: Where finished trainings lie, each in a folder of its own.

    Returns:
        Plain values under ``COLUMNS``; ``figures`` and ``last`` hold the same for programs.
    """
    measured = last_results(folders)
    rows = [_row(name, measured) for name in recipe_names()]
    return rows + [
        {"name": "-", "title": what, "paper": f"left out: {why}", "full": "", "small": "",
         "measured": "", "figures": {}, "last": {}}
        for what, why in paper_results()["left_out"].items()
    ]  # fmt: skip


def _row(name: str, measured: Mapping[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    full, small = load_recipe(name, "full"), load_recipe(name, "small")
    figures = {row: paper_results()["rows"][row] for row in full.rows}
    forms: tuple[Form, ...] = ("full", "small")
    last = {form: measured[name, form] for form in forms if (name, form) in measured}
    return {
        "name": name,
        "title": full.title,
        "paper": "\n".join(map(_figures, figures.values())) or "no paper's table",
        "full": _form(full),
        "small": _form(small),
        "measured": "\n".join(f"{form}: {_result(found)}" for form, found in last.items()),
        "figures": figures,
        "last": last,
    }


def _figures(row: Mapping[str, Any]) -> str:
    values = ", ".join(
        f"{name} {'-' if value is None else f'{value:g}'}" for name, value in row["values"].items()
    )
    return f"{row['metric']}: {values} ({row['source']})"


def _form(recipe: Recipe) -> str:
    plan = recipe.training
    count = recipe.model.num_params
    size = f" ({count / 1e6:,.1f} M)" if count else ""
    length = f"{plan.epochs:g} epochs" if plan.epochs else f"{plan.steps:,} steps"
    return f"{model_word(recipe)}{size}, {data_word(recipe)}, {length}, batch {plan.batch_size}"


def _result(found: Mapping[str, Any]) -> str:
    value = "diverged" if found["value"] is None else f"{found['metric']} {found['value']:.4g}"
    return f"{value} ({found['variant']}, {found['init']}, seed {found['seed']})"


def last_results(folders: Iterable[Path]) -> dict[tuple[str, str], dict[str, Any]]:
    """Find the result that finished last for each recipe and form.

    Args:
        folders: Where finished trainings lie, each in a folder of its own.

    Returns:
        ``(name, form)`` to metric, value (None after divergence), variant, init, seed, folder
        and time. Folders of other things are passed over.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for folder in folders:
        for path in sorted(folder.glob("*/cells.jsonl")):
            for key, result in _results(path):
                if key not in found or found[key]["finished_at"] <= result["finished_at"]:
                    found[key] = result
    return found


def _results(path: Path) -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    try:
        tasks = yaml.safe_load((path.parent / "config.yaml").read_text("utf-8"))["settings"][
            "tasks"
        ]
        recipes = {task["name"]: task["recipe"] for task in tasks if task.get("recipe")}
        records = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return  # a folder of something else, or one that is being written
    for record in records:
        values = recipes.get(record.get("task"))
        if values is None or "finished_at" not in record:
            continue
        recipe = Recipe.from_resolved(values)
        metric = metric_name(recipe)
        yield (
            (recipe.name, recipe.form),
            {
                "metric": metric,
                "value": (record.get("final") or {}).get(metric),
                **{name: record.get(name) for name in ("variant", "init", "seed")},
                "folder": str(path.parent),
                "finished_at": record["finished_at"],
            },
        )


def metric_name(recipe: Recipe) -> str:
    """Name the number that a recipe is judged by.

    Args:
        recipe: The recipe.

    Returns:
        Its key in results.
    """
    return next((name for kinds, name in METRICS if isinstance(recipe.data, kinds)), "solved_pct")

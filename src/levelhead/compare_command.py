"""``levelhead compare``: variants side by side on the same seeds, batches and data."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from levelhead.exits import BAD_INPUT, FAILED, INTERRUPTED, explain
from levelhead.options import ListCommand, is_program, split_list
from levelhead.shapes import require, require_known
from levelhead.terms import parse_terms


def add_to(app: typer.Typer) -> None:
    """Add the command to the command line.

    Args:
        app: The command line.
    """
    app.command(
        cls=ListCommand,
        epilog="Example: levelhead compare --variants quest 'spectral(strength=1)' --seeds 5",
    )(compare)


def compare(
    context: typer.Context,
    variants: Annotated[
        list[str] | None,
        typer.Option(help="Variant strings (`levelhead list variants`); softmax is always in."),
    ] = None,
    inits: Annotated[
        list[str] | None,
        typer.Option(help="Initialisers (`levelhead list initializers`), crossed with variants."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of paired seeds.")] = 3,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimiser steps of each training.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="digits, topics, fashion_mnist, shakespeare, a folder of IDX files, a text file. "
            "Default: digits topics."
        ),
    ] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            help="Recipes (`levelhead list recipes`) in place of --data; their own variants and "
            "inits, unless given."
        ),
    ] = None,
    form: Annotated[str, typer.Option(help="Of the recipes: full or small.")] = "small",
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change of a recipe: --set training.epochs=2; repeatable."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="vit, gpt or both, with options: 'vit(num_layers=4) + gpt'."),
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Peak learning rate, for all variants alike.")
    ] = None,
    learning_rates: Annotated[
        list[str] | None,
        typer.Option(
            help="Several peak learning rates: each variant and init is reported at its own best, "
            "chosen by --selection-seeds on a part of the training data kept for it."
        ),
    ] = None,
    selection_seeds: Annotated[
        int, typer.Option(min=1, help="Seeds that choose among --learning-rates; never reported.")
    ] = 2,
    controls: Annotated[
        bool,
        typer.Option(
            "--controls",
            help="Add what tells conditioning from scale: conditioned(gain='match') beside "
            "conditioned, strengths 0, 1 and 10 of spectral.",
        ),
    ] = False,
    retries: Annotated[
        int, typer.Option(min=0, help="How often a training whose process died is begun again.")
    ] = 2,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; default runs/DATA-HASH.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Trainings side by side; default one for each core.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Train variants side by side on the same seeds and batches, and say what differs.

    Without arguments: a small ViT on handwritten digits and a small GPT on technical English, six
    variants, three seeds; no download. Finished trainings are kept in the run's folder: the same
    command goes on where it was stopped, and more seeds or variants only train what is missing.
    Exit code 1 where a training died at every attempt; the table leaves it out and says so.
    """
    require(
        learning_rate is None or not learning_rates,
        "either --learning-rate or --learning-rates must be given",
        "both",
    )
    from levelhead.harness.workers import new_crew

    crew = context.with_resource(new_crew(workers, is_at_start=is_program(context)))
    from levelhead.harness.config import DEFAULT_VARIANTS, CompareSettings
    from levelhead.harness.controls import with_controls
    from levelhead.harness.show import show_summary, stdout_console

    given = {"data": data, "model": model, "steps": steps, "learning_rate": learning_rate}
    recipes = _load_recipes(split_list(recipe), form, overrides, given)
    names = _names(split_list(variants), split_list(inits), recipes, DEFAULT_VARIANTS)
    names = with_controls(*names) if controls else names
    changed = {"steps": steps, "learning_rate": learning_rate}
    settings = CompareSettings(
        tasks=_recipe_tasks(recipes) or _resolve_tasks(split_list(data), model, changed),
        variants=names[0],
        inits=names[1],
        seeds=seeds,
        learning_rates=tuple(
            _number("--learning-rates", rate) for rate in split_list(learning_rates)
        ),
        selection_seeds=selection_seeds,
    )
    folder = out or settings.default_folder()
    summary = _run_comparison(settings, folder, workers, retries, crew)
    if as_json:
        print(json.dumps(summary, indent=2, allow_nan=False))
    else:
        show_summary(stdout_console(), summary)
    _exit_unless(summary["num_unfinished"] == 0)


def _load_recipes(
    names: tuple[str, ...], form: str, overrides: list[str] | None, given: dict[str, Any]
) -> list[Any]:
    if not names:
        require(not overrides, "--set changes a --recipe", f"--set {' '.join(overrides or [])}")
        return []
    from levelhead.harness.recipe import FORMS, load_recipe

    require_known("form", form, FORMS)
    taken = [
        f"--{name.replace('_', '-')}" for name, value in given.items() if value not in (None, [])
    ]
    require(
        not taken,
        "a --recipe names its own data, model and training",
        f"{', '.join(taken)} as well",
        "--set key=value",
    )
    return [load_recipe(name, form, overrides or ()) for name in names]  # pyright: ignore


def _recipe_tasks(recipes: list[Any]) -> tuple[Any, ...]:
    if not recipes:
        return ()
    from levelhead.harness.recipe_tasks import make_recipe_task

    return tuple(make_recipe_task(recipe).settings for recipe in recipes)


def _names(
    variants: tuple[str, ...], inits: tuple[str, ...], recipes: list[Any], default: Any
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What is compared: as given, else as the recipes say, else the default."""
    own_variants = tuple(name for recipe in recipes for name in recipe.variants)
    own_inits = tuple(name for recipe in recipes for name in recipe.inits)
    chosen = variants or own_variants or tuple(default), inits or own_inits or ("default",)
    return tuple(dict.fromkeys(chosen[0])), tuple(dict.fromkeys(chosen[1]))


def _exit_unless(well: bool) -> None:
    if not well:
        raise typer.Exit(FAILED)


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{option} must be numbers, got {text!r}") from None


def _resolve_tasks(names: tuple[str, ...], model: str | None, overrides: dict[str, Any]) -> Any:
    from levelhead.harness.tasks import DEFAULT_DATA, MODELS, resolve_task

    terms = parse_terms(model) if model else ()
    for term in terms:
        require_known("model", term.name, MODELS)
    wanted = [term.name for term in terms] or list(MODELS)
    options = {term.name: dict(term.options) for term in terms}
    given = {name: value for name, value in overrides.items() if value is not None}
    names = names or tuple(DEFAULT_DATA[name] for name in wanted)
    tasks = tuple(resolve_task(name, options, **given) for name in names)
    for task in tasks:
        require(
            task.model in wanted, f"{task.data} needs the model {task.model}", f"--model {model}"
        )
    return tasks


def _run_comparison(
    settings: Any, folder: Path, workers: int | None, retries: int, crew: Any
) -> dict[str, Any]:
    from levelhead.harness.compare import compare as compare_grid
    from levelhead.harness.show import progress_bar

    console = Console(stderr=True, highlight=False)
    kept = f"finished trainings are safe in {folder}/"
    again = shlex.join(["levelhead", *sys.argv[1:]])
    try:
        with progress_bar(console) as on_event:
            return compare_grid(settings, folder, workers, on_event, retries, crew)
    except KeyboardInterrupt:
        _say(f"stopped; {kept}; go on with: {again}")
        raise typer.Exit(INTERRUPTED) from None
    except OSError as error:
        if not (folder / "config.yaml").exists():
            raise
        _say(f"{explain(error)[1]}; {kept}; once that is mended, go on with: {again}")
        raise typer.Exit(BAD_INPUT) from error


def _say(line: str) -> None:
    print(f"levelhead: {line}", file=sys.stderr)

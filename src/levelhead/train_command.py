"""``levelhead train``: one training of a recipe or of the embedded default, resumable."""

import json
import os
import shlex
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from levelhead.exits import BAD_INPUT, FAILED, INTERRUPTED, explain
from levelhead.shapes import require

NEEDED = ("accelerate", "safetensors")
SLOW_DATA = 0.05  # a larger share of waiting for data is worth a word
STEPS_TO_TELL = 50  # fewer are mostly the start of the data's own processes


def add_to(app: typer.Typer) -> None:
    """Add the command to the command line.

    Args:
        app: The command line.
    """
    app.command(epilog="Example: levelhead train --small --steps 50 --out runs/first")(train)


def train(
    recipe: Annotated[
        str | None,
        typer.Argument(
            help="Name of a recipe (`levelhead list recipes`) or its file; without one, with "
            "--small: a small ViT on handwritten digits, no download."
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the recipe, by dotted keys."),
    ] = None,
    small: Annotated[bool, typer.Option("--small", help="The form that fits two cores.")] = False,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimiser steps.")] = None,
    variant: Annotated[
        str, typer.Option(help="Variant string (`levelhead list variants`).")
    ] = "softmax",
    init: Annotated[
        str, typer.Option(help="Initialiser (`levelhead list initializers`).")
    ] = "default",
    seed: Annotated[int, typer.Option(min=0, help="Of start, data order and dropout.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; default runs/train-NAME-HASH.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the training in the folder.")
    ] = False,
    save_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between checkpoints; default a tenth.")
    ] = None,
    micro_batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Most samples a device takes at a time; the batch stays as is."),
    ] = None,
    shard: Annotated[
        bool, typer.Option("--shard", help="FSDP2: spread weights over the processes.")
    ] = False,
    monitor: Annotated[
        int | None, typer.Option(min=1, help="Watch the attention every so many steps.")
    ] = None,
    tracker: Annotated[
        list[str] | None, typer.Option(help="tensorboard, wandb or trackio; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train one model; killed at any moment, --resume goes on with the same numbers.

    On several devices start it with `torchrun --no-python --nproc-per-node N levelhead train ...`
    or `accelerate launch --no_python levelhead train ...`: the global batch stays the same. Exit
    code 1 when the training diverged, 130 when it was stopped.
    """
    _require_installed()
    from levelhead.harness.config import Cell
    from levelhead.harness.engine.folder import training_hash
    from levelhead.harness.engine.options import EngineOptions

    task = _task(recipe, overrides or [], small, steps)
    cell = Cell(task=task.settings.name, variant=_canonical(variant), init=init, seed=seed)
    name = task.settings.name.replace("/", "-")
    folder = out or Path("runs", f"train-{name}-{training_hash(task.settings, cell)[:8]}")
    options = EngineOptions(
        resume=resume, save_every=save_every, micro_batch_size=micro_batch_size, shard=shard,
        monitor_every=monitor, trackers=tuple(tracker or ()),
    )  # fmt: skip
    record = _run(task, cell, folder, options)
    _show(record, task, folder, as_json)
    _exit_unless(not record["diverged_step"])


def _require_installed() -> None:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ImportError(f"{missing[0]} is not installed: pip install 'levelhead[train]'")


def _exit_unless(well: bool) -> None:
    if not well:
        raise typer.Exit(FAILED)


def _canonical(variant: str) -> str:
    from levelhead.variants import parse_variant

    return str(parse_variant(variant))


def _task(recipe: str | None, overrides: list[str], small: bool, steps: int | None) -> Any:
    if recipe is not None and "=" in recipe:
        recipe, overrides = None, [recipe, *overrides]
    if recipe is not None:
        from levelhead.harness.recipe_tasks import make_recipe_task

        return make_recipe_task(_recipe(recipe, overrides, "small" if small else "full", steps))
    require(
        small, "train needs a recipe, or --small for the embedded default", "neither",
        "levelhead list recipes",
    )  # fmt: skip
    from levelhead.harness.engine.embedded import embedded_settings
    from levelhead.harness.tasks import make_task

    given = [*overrides, *([f"steps={steps}"] if steps else [])]
    return make_task(embedded_settings(given))


def _recipe(name: str, overrides: list[str], form: Any, steps: int | None) -> Any:
    """Read a recipe; --steps keeps the share of its steps that warms up."""
    from levelhead.harness.recipe import load_recipe

    recipe = load_recipe(name, form, overrides)
    if steps is None:
        return recipe
    plan = recipe.training
    whole = plan.epochs or plan.steps or steps
    warmup = round(steps * (plan.warmup_epochs or plan.warmup_steps or 0) / whole)
    given = {
        "epochs": "null", "warmup_epochs": "null", "steps": steps, "warmup_steps": warmup,
        "decay_steps": round(steps * plan.decay_steps / whole) if plan.steps else 0,
    }  # fmt: skip
    changes = [f"training.{key}={value}" for key, value in given.items()]
    return load_recipe(name, form, [*overrides, *changes])


def _run(task: Any, cell: Any, folder: Path, options: Any) -> dict[str, Any]:
    from rich.console import Console

    from levelhead.harness.config import TaskSettings
    from levelhead.harness.engine.engine import train as run_training
    from levelhead.harness.engine.prepare import leave_group
    from levelhead.harness.engine.progress import training_bar
    from levelhead.harness.engine.stop import Stopped
    from levelhead.modes import one_thread

    console = Console(stderr=True, highlight=False)
    is_tiny = isinstance(task.settings, TaskSettings)
    try:
        threads = one_thread() if is_tiny else nullcontext()
        with training_bar(console, task.settings.steps) as on_event, threads:
            return run_training(task, cell, folder, options, on_event)
    except Stopped as stopped:
        saved = f"step {stopped.step} is saved" if stopped.is_saved else "it could not be saved"
        _say(f"stopped; {saved} in {folder}/; go on with: {_again()}")
        raise typer.Exit(INTERRUPTED) from None
    except KeyboardInterrupt:
        _say(f"stopped at once; the last checkpoint stands; go on with: {_again()}")
        raise typer.Exit(INTERRUPTED) from None
    except OSError as error:
        if not (folder / "checkpoints").exists():
            raise
        line = explain(error)[1]
        _say(f"{line}; the last checkpoint stands; once that is mended, go on with: {_again()}")
        raise typer.Exit(BAD_INPUT) from error
    finally:
        leave_group()


def _again() -> str:
    given = [argument for argument in sys.argv[1:] if argument != "--resume"]
    launched = " (with the same launcher)" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    return shlex.join(["levelhead", *given, "--resume"]) + launched


def _say(line: str) -> None:
    from levelhead.harness.engine.progress import is_first_process

    if is_first_process():
        print(f"levelhead: {line}", file=sys.stderr)


def _show(record: Mapping[str, Any], task: Any, folder: Path, as_json: bool) -> None:
    from levelhead.harness.engine.progress import is_first_process

    if not is_first_process():
        return
    if as_json:
        print(json.dumps({"folder": str(folder), **record}, indent=2, allow_nan=False))
        return
    for line in _told(record, task, folder):
        print(line)


def _told(record: Mapping[str, Any], task: Any, folder: Path) -> list[str]:
    settings, metric = task.settings, task.metric
    if record["diverged_step"]:
        result = f"diverged at step {record['diverged_step']}"
    else:
        result = f"{metric.label}: {record['final'][metric.name]:.{metric.digits}f}"
    head = f"{settings.name}: {settings.model} with {record['num_params']:,} parameters"
    waited = record["data_wait_frac"]
    lines = [
        f"{head}, {record['variant']}, {record['init']} start, seed {record['seed']}: {result}",
        f"{settings.steps} steps of {settings.batch_size} samples in {record['seconds']:.1f} s on "
        f"{record['num_processes']} process(es), {100 * waited:.1f} % of it waiting for data",
    ]
    if waited > SLOW_DATA and settings.steps >= STEPS_TO_TELL:
        lines.append(
            "the data come too slowly for this model; a recipe's images are prepared by more "
            "processes with data.num_workers=N"
        )
    following = shlex.join(["levelhead", "diagnose", str(folder)])
    return [*lines, f"{folder}/: settings, curve, checkpoints; next: {following}"]

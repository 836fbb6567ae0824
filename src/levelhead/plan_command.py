"""``levelhead plan``: what a recipe costs and where it differs from the paper."""

import json
from typing import Annotated

import typer


def add_to(app: typer.Typer) -> None:
    """Add the command to the command line.

    Args:
        app: The command line.
    """
    app.command(epilog="Example: levelhead plan vit_b_imagenet --devices 8")(plan)


def plan(
    recipe: Annotated[
        str, typer.Argument(help="Name of a recipe (`levelhead list recipes`) or its file.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the recipe, by dotted keys."),
    ] = None,
    small: Annotated[bool, typer.Option("--small", help="The form that fits two cores.")] = False,
    devices: Annotated[int, typer.Option(min=1, help="That share each step.")] = 1,
    peak_tflops: Annotated[
        float, typer.Option(help="Of one device, at the recipe's precision; default H100, bf16.")
    ] = 989.0,
    efficiency: Annotated[float, typer.Option(help="Share of the peak that is reached.")] = 0.4,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Say what a training needs before a GPU is rented: nothing is computed, no data are read.

    Parameters, FLOPs, memory of each device, steps, hours at the stated efficiency, and every
    deviation from the paper.
    """
    from levelhead.harness.plan import make_plan
    from levelhead.harness.recipe import load_recipe

    chosen = load_recipe(recipe, "small" if small else "full", overrides or [])
    made = make_plan(chosen, devices, peak_tflops, efficiency)
    print(json.dumps(made.as_dict(), indent=2, allow_nan=False) if as_json else made)

"""``levelhead list``: what there is to choose from."""

import json
from typing import Annotated, Any

import typer
from rich.table import Table

from levelhead.shapes import require_known


def add_to(app: typer.Typer) -> None:
    """Add the command to the command line.

    Args:
        app: The command line.
    """
    app.command(name="list", epilog="Example: levelhead list variants --json")(list_)


def list_(
    what: Annotated[str, typer.Argument(help="variants, initializers or recipes.")] = "variants",
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """List what there is: variants, initialisers, or recipes with the papers' figures."""
    require_known("list", what, TABLES)
    rows, columns = TABLES[what]()
    if as_json:
        print(json.dumps(rows, indent=2, default=str))
        return
    from levelhead.harness.show import stdout_console

    table = Table(title=what, title_justify="left", show_lines=True)
    for column in columns:
        table.add_column(column.replace("_", " "), overflow="fold", no_wrap=column == "name")
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    stdout_console().print(table, markup=False)


def _variants() -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    from levelhead.variants import variants

    columns = ("name", "stage", "equation", "parameters", "neutral", "when", "source")
    return [info.as_dict() for info in variants()], columns


def _initializers() -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    from levelhead.init.table import initializers

    columns = ("name", "equation", "touches", "when", "source")
    return [info.as_dict() for info in initializers()], columns


def _recipes() -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    from levelhead.harness.recipe_table import COLUMNS, recipe_rows

    return recipe_rows(), COLUMNS


TABLES = {"variants": _variants, "initializers": _initializers, "recipes": _recipes}

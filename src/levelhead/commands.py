"""The command line: all commands, those of a few lines right here."""

import importlib
import json
import pkgutil
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

import levelhead.bench
from levelhead.compare_command import add_to as add_compare_to
from levelhead.diagnose_command import add_to as add_diagnose_to
from levelhead.exits import BAD_INPUT, FAILED
from levelhead.list_command import add_to as add_list_to
from levelhead.plan_command import add_to as add_plan_to
from levelhead.shapes import require_known
from levelhead.train_command import add_to as add_train_to

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Stable, well-conditioned, visible attention for Transformers.",
    epilog="Start with: levelhead compare",
)


def _say_version(is_asked: bool) -> None:
    if is_asked:
        print(f"levelhead {version('levelhead')}")
        raise typer.Exit


@app.callback()
def _common(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks (also LEVELHEAD_DEBUG=1).")
    ] = False,
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Say the version."),
    ] = False,
) -> None:
    """Stable, well-conditioned, visible attention for Transformers."""


add_compare_to(app)
add_list_to(app)


@app.command(epilog="Example: levelhead report runs/digits-1a2b3c4d --out report.html")
def report(
    path: Annotated[
        Path,
        typer.Argument(help="Folder of a `levelhead compare`, or a diagnosis saved as JSON."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="File to write; default report.html in the folder, or beside the JSON."),
    ] = None,
) -> None:
    """Write one HTML page that shows a comparison or a diagnosis; it opens without a network."""
    from levelhead.report_command import write_report

    written, size = write_report(path, out)
    print(f"{written}: {size / 1000:.0f} kB; open it in a browser.")


@app.command(epilog="Example: levelhead verify vit_tiny_patch16_224 --variant 'quest + gate'")
def verify(
    model: Annotated[
        str,
        typer.Argument(
            help="A folder of levelhead, of transformers or of a run; module:function (returns a "
            "model, or a model and a batch); a name of timm (random weights) or transformers."
        ),
    ],
    variant: Annotated[
        str | None,
        typer.Option(help="What to convert a stock model to; default quest."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="The batch: .safetensors of named arguments, .npy, or .txt. Made when missing."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
) -> None:
    """Check a converted model on one batch: parity, scale, leaks, path, padding, cache."""
    from levelhead.verify_command import verify_named
    from levelhead.verify_report import VerificationError

    try:
        found = verify_named(model, variant, data)
    except VerificationError as error:
        found = error.verification
    _show_checks(found, as_json)


def _show_checks(found: Any, as_json: bool) -> None:
    rows = [vars(check) for check in found.checks]
    print(json.dumps({"title": found.title, "checks": rows}, indent=2) if as_json else found)
    if found.failed:
        raise typer.Exit(FAILED)


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    add_help_option=False,
    epilog="Example: levelhead bench attention --tokens 1024 --json",
)
def bench(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Which benchmark.")] = None,
) -> None:
    """Run a benchmark: ratios measured in one process. Its options: `bench NAME --help`."""
    if name in (None, "--help"):
        print(context.get_help())
        print(f"Benchmarks: {', '.join(benchmarks())}")
        context.exit(0 if name else BAD_INPUT)
    require_known("benchmark", name, benchmarks())
    module = importlib.import_module(f"levelhead.bench.{name}")
    context.exit(module.main(context.args) or 0)


def benchmarks() -> list[str]:
    """List the modules of ``levelhead.bench`` that can be run.

    Returns:
        Their names, sorted.
    """
    names = [module.name for module in pkgutil.iter_modules(levelhead.bench.__path__)]
    found = [n for n in names if hasattr(importlib.import_module(f"levelhead.bench.{n}"), "main")]
    return sorted(found)


add_diagnose_to(app)
add_train_to(app)
add_plan_to(app)

"""``levelhead diagnose``: load, measure, print, write the report."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from levelhead.exits import BAD_INPUT, FAILED


def add_to(app: typer.Typer) -> None:
    """Add the command to the command line.

    Args:
        app: The command line.
    """
    app.command(epilog="Example: levelhead diagnose runs/my-run --out report.html")(diagnose)


def diagnose(
    model: Annotated[
        str,
        typer.Argument(
            help="A folder of transformers, of levelhead or of a run; module:function (returns a "
            "model, or a model and a batch); a name of timm or transformers."
        ),
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            help="The batch: .safetensors of named arguments, .npy, or .txt. Made when missing."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the report here: one HTML file, works offline.")
    ] = None,
    jacobian_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens for each head's Jacobian; 0: none.")
    ] = 8,
    num_queries: Annotated[
        int, typer.Option(min=1, help="Queries looked at in each sample, evenly spaced.")
    ] = 128,
    random_weights: Annotated[
        bool, typer.Option(help="A timm model as built, without its trained weights.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Say which layer and head of a model is unhealthy, by what number, and what to try.

    Exit code 1 when a finding is severe, 2 when the model refused its batch (what its weights say
    is still told).
    """
    from levelhead.diagnose import diagnose as diagnose_model
    from levelhead.diagnose_command_models import load_named

    if out is not None:
        _check_out(out)
    loaded = load_named(model, data, random_weights)
    diagnosis = diagnose_model(
        loaded.model,
        loaded.batch,
        num_queries=num_queries,
        jacobian_tokens=jacobian_tokens,
        name=model,
        curves=loaded.curves,
    )
    diagnosis.meta["batch_from"] = loaded.origin
    if out is not None:
        diagnosis.to_html(out)
    if as_json:
        print(json.dumps(diagnosis.summary(), indent=2, allow_nan=False))
    else:
        print(diagnosis)
        print(f"  batch: {loaded.origin}")
        if out is not None:
            print(f"  report: {out}")
    refused = any(reason.startswith("the forward") for reason in diagnosis.meta["not_measured"])
    if diagnosis.is_severe or refused:
        sys.exit(FAILED if diagnosis.is_severe else BAD_INPUT)


def _check_out(out: Path) -> None:
    """Find now, and not when all is measured, that a report cannot be written.

    Raises:
        ValueError: Its folder is not there.
        OSError: Its folder takes no file.
    """
    from levelhead.shapes import require

    folder = out.absolute().parent
    require(folder.is_dir(), "--out must be a file in a folder that exists", str(out))
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(out)) from error

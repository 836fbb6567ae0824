"""What ``levelhead report`` does: the page of a comparison's folder or of a saved diagnosis."""

from pathlib import Path

from levelhead.diagnosis import Diagnosis
from levelhead.harness.runs import replace_text
from levelhead.report import render_diagnosis, render_run
from levelhead.shapes import require


def write_report(path: Path, out: Path | None = None) -> tuple[Path, int]:
    """Write the page of what lies at a path.

    Args:
        path: Folder of a comparison, or a file of ``Diagnosis.to_json``.
        out: File to write; ``report.html`` in the folder, or beside the file, by default.

    Returns:
        The file written and its size in bytes.

    Raises:
        ValueError: There is neither.
    """
    require(
        path.exists(),
        f"{path} must be the folder of a run or a diagnosis saved as JSON",
        "nothing there",
        "what `levelhead compare`, `levelhead train` or `Diagnosis.to_json` wrote",
    )
    if path.is_dir():
        html, place = render_run(path), path / "report.html"
    else:
        html, place = render_diagnosis(Diagnosis.from_json(path)), path.with_suffix(".html")
    replace_text(out or place, html)
    return out or place, len(html.encode())

"""One HTML file that shows a diagnosis or a comparison; it loads nothing from elsewhere."""

from pathlib import Path

from levelhead.report_comparison import run_page
from levelhead.report_diagnosis import Diagnosed, diagnosis_page
from levelhead.report_render import render_page
from levelhead.report_runs import read_run


def render_diagnosis(diagnosis: Diagnosed) -> str:
    """Write a diagnosis as a page.

    Args:
        diagnosis: For example of ``lh.diagnose``.

    Returns:
        A whole HTML document without any reference to another file. Names of layers, metrics and
        models are shown as they are and never run.
    """
    return render_page(diagnosis_page(diagnosis))


def render_run(folder: str | Path) -> str:
    """Write the folder of a comparison as a page.

    Args:
        folder: What ``levelhead compare`` wrote; nothing in it is changed.

    Returns:
        A whole HTML document without any reference to another file.

    Raises:
        ValueError: Not such a folder, or a file in it that cannot be read.
    """
    return render_page(run_page(read_run(Path(folder))))


def write_html(diagnosis: Diagnosed, path: str | Path) -> None:
    """Write a diagnosis' page into a file.

    Args:
        diagnosis: For example of ``lh.diagnose``.
        path: The file; replaced where there is one.

    Raises:
        OSError: It cannot be written.
    """
    Path(path).write_text(render_diagnosis(diagnosis), encoding="utf-8")

"""Take the pictures of docs/images from real runs, in a headless browser.

    make weights
    levelhead compare --data digits --variants quest qknorm gate off_by_one --seeds 5 \\
        --steps 150 --out runs/pictures
    python benchmarks/report_pictures.py --run runs/pictures

Whisper tiny.en reads random words said twice, over silence; all-MiniLM-L6-v2 three sentences and a
paragraph: the two diagnoses of records/diagnose_trained_models.md. Needs Chromium of the system
and playwright (the extra "dev").
"""

import argparse
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from levelhead.report import render_run

sys.path.insert(0, str(Path(__file__).parent))
from diagnose_trained_models import diagnose_minilm, diagnose_whisper  # noqa: E402

IMAGES = Path(__file__).parents[1] / "docs" / "images"
FLAGS = ["--no-sandbox", "--disable-gpu"]
DESKTOP, PHONE = (1180, 1000), (390, 844)


@dataclass(frozen=True)
class Picture:
    """One file of docs/images.

    Attributes:
        name: Of the file, without ".png".
        page: Which page: "decoder", "encoder" or "comparison".
        size: Width and height of the window, in pixels.
        scheme: "light" or "dark".
        metric: To show on the map, or "".
        head: Layer and head to open, or None for the one that the page opens with.
        only: Selector of the part to show; "" for the top of the page.
    """

    name: str
    page: str
    size: tuple[int, int] = DESKTOP
    scheme: str = "light"
    metric: str = ""
    head: tuple[int, int] | None = None
    only: str = ""


PICTURES = (
    Picture("report-findings", "decoder"),
    Picture("report-phone", "decoder", size=PHONE, scheme="dark"),
    Picture("report-heads", "encoder", metric="sink_mass_mean", head=(2, 4), only="#heads"),
    Picture("report-comparison", "comparison", size=(1180, 1640), scheme="dark"),
)


def take(browser: Any, picture: Picture, path: Path, folder: Path) -> None:
    """Open a page and take one picture of it.

    Args:
        browser: Of Playwright.
        picture: Which.
        path: The page.
        folder: For the file.
    """
    width, height = picture.size
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=picture.scheme,
        reduced_motion="reduce",
    )  # fmt: skip
    page = context.new_page()
    page.goto(path.as_uri())
    page.wait_for_selector(".plot svg")
    page.wait_for_timeout(500)
    if picture.metric:
        page.select_option("#metric", picture.metric)
    if picture.head:
        page.click('.cell[data-layer="{}"][data-head="{}"]'.format(*picture.head))
        page.mouse.move(0, 0)
        page.evaluate("document.activeElement.blur()")
    file = folder / f"{picture.name}.png"
    if picture.only:
        page.locator(picture.only).screenshot(path=file)
    else:
        page.evaluate("scrollTo(0, 0)")
        page.screenshot(path=file)
    context.close()
    print(file)


def write_pages(run: Path, folder: Path) -> dict[str, Path]:
    """Write the three pages.

    Args:
        run: Folder of the comparison.
        folder: For the pages.

    Returns:
        Name to file.
    """
    pages = {name: folder / f"{name}.html" for name in ("decoder", "encoder", "comparison")}
    diagnose_whisper().to_html(pages["decoder"])
    diagnose_minilm().to_html(pages["encoder"])
    pages["comparison"].write_text(render_run(run), encoding="utf-8")
    return pages


def main() -> None:
    """Write the pages, open them and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder of the comparison")
    parser.add_argument("--out", type=Path, default=IMAGES)
    chosen = parser.parse_args()
    from playwright.sync_api import sync_playwright

    executable = shutil.which("chromium") or shutil.which("chromium-browser")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as running:
        pages = write_pages(chosen.run, Path(folder))
        browser = running.chromium.launch(executable_path=executable, args=FLAGS)
        for picture in PICTURES:
            take(browser, picture, pages[picture.page], chosen.out)
        browser.close()


if __name__ == "__main__":
    main()

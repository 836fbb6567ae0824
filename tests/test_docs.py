"""The tables of the documentation say what the code says.

``LEVELHEAD_WRITE_DOCS=1 pytest tests/test_docs.py`` writes them anew.
"""

import os
import re
from pathlib import Path

import pytest

import levelhead as lh

ROOT = Path(__file__).parents[1]
HEAD = """# The variants

A variant is a string of terms, `term (+ term)*`, with `term = name | name(key=value, ...)`; each
term sits in one stage, two terms of one slot are refused with both names, and so is `precondition`
with a sink (row equilibration cancels any positive factor of a row exactly). Letters: `B` batch,
`H` heads, `T` queries, `S` keys, `D` head_dim, `E` embed_dim.

The fused form never builds a T x S floating-point matrix of its own. Besides `soft_cap`, torch's
own kernels build one for attention dropout on a CPU, for a bias that needs a gradient, and for
values of another width than the keys; from 1,024 x 1,024 scores on a warning says so.

"""


def variants_page() -> str:
    """Return docs/variants.md as the table in the code has it."""
    blocks = []
    for info in lh.variants():
        options = ", ".join(f"`{k}={v!r}`" for k, v in info.as_dict()["options"].items())
        blocks.append(
            f"## `{info.name}`\n\n"
            f"    {info.equation}\n\n"
            f"- stage: {info.stage}\n"
            f"- options: {options or 'none'}\n"
            f"- parameters added: {info.parameters}\n"
            f"- plain softmax attention at: {info.neutral}\n"
            f"- when: {info.when}\n"
            f"- fused form: {info.fused}\n"
            f"- source: {info.source}\n"
        )
    return HEAD + "\n".join(blocks)


def test_the_page_of_variants_is_the_table():
    page = ROOT / "docs" / "variants.md"
    if os.environ.get("LEVELHEAD_WRITE_DOCS"):
        page.write_text(variants_page())
    assert page.read_text() == variants_page()


def test_the_readme_lists_every_term_in_its_stage():
    readme = (ROOT / "README.md").read_text()
    for info in lh.variants():
        (row,) = re.findall(rf"^\| {info.stage} \|(.*)\|$", readme, flags=re.M)
        assert f"`{info.name}`" in row


PAGES = [path for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readme_names_every_benchmark_that_exists():
    from levelhead.commands import benchmarks

    readme = (ROOT / "README.md").read_text()
    assert [name for name in benchmarks() if f"levelhead bench {name}" not in readme] == []

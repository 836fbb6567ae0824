"""The contents page of the measures."""

from pathlib import Path

import levelhead as lh

PAGE = Path(__file__).parents[2] / "docs" / "measures.md"


def test_the_contents_page_lists_each_public_name_once():
    names = lh.measure.__all__
    assert len(names) == len(set(names))
    own = {name for name in vars(lh.measure) if not name.startswith("_")}
    modules = {name for name in own if type(getattr(lh.measure, name)).__name__ == "module"}
    assert own - modules == set(names)


def test_measures_are_functions_even_where_a_file_has_the_same_name():
    for name in ("sensitivity", "concentration"):
        assert callable(getattr(lh.measure, name))


def test_the_page_of_measures_mentions_every_function():
    functions = [name for name in lh.measure.__all__ if name[0].islower()]
    assert [name for name in functions if f"`{name}`" not in PAGE.read_text()] == []

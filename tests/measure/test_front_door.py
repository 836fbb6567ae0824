"""The contents page of the measures."""

import levelhead as lh


def test_the_contents_page_lists_each_public_name_once():
    names = lh.measure.__all__
    assert len(names) == len(set(names))
    own = {name for name in vars(lh.measure) if not name.startswith("_")}
    modules = {name for name in own if type(getattr(lh.measure, name)).__name__ == "module"}
    assert own - modules == set(names)


def test_measures_are_functions_even_where_a_file_has_the_same_name():
    for name in ("sensitivity", "concentration"):
        assert callable(getattr(lh.measure, name))

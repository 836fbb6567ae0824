"""C files: compiled once, loaded, and their compiler's words where it fails."""

import ctypes
import sys
import warnings

import pytest
import torch

from levelhead.capped_compiled import has_compiled_kernel
from levelhead.compiled import load_library

needs_compiler = pytest.mark.skipif(
    not has_compiled_kernel(), reason="no C compiler for this processor"
)


@pytest.fixture
def load(monkeypatch, tmp_path):
    """Load with a cache folder of the test's own, as if for the first time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return load_library.__wrapped__


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "answer.c"
    path.write_text("int answer(void) { return 42; }\n")
    return path


def libraries(tmp_path):
    return sorted((tmp_path / "cache" / "levelhead").iterdir())


@needs_compiler
def test_a_library_is_compiled_once_for_all_processes(load, source, tmp_path):
    library = load(source)
    assert isinstance(library, ctypes.CDLL)
    assert library.answer() == 42
    (path,) = libraries(tmp_path)
    before = path.stat().st_mtime_ns
    assert load(source).answer() == 42
    assert libraries(tmp_path) == [path]
    assert path.stat().st_mtime_ns == before


@needs_compiler
def test_a_source_that_changed_is_compiled_anew(load, source, tmp_path):
    load(source)
    source.write_text("int answer(void) { return 43; }\n")
    assert load(source).answer() == 43
    assert len(libraries(tmp_path)) == 2


@needs_compiler
def test_where_the_cache_cannot_be_written_it_is_compiled_for_this_time(load, source, tmp_path):
    (tmp_path / "cache").write_text("in the way")
    assert load(source).answer() == 42
    assert (tmp_path / "cache").read_text() == "in the way"


@needs_compiler
def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(load, source, tmp_path):
    source.write_text("int answer(void) { return forty_two; }\n")
    words = (
        r"(?s)could not compile answer\.c, and goes a slower way with the same result: .*forty_two"
    )
    with pytest.warns(RuntimeWarning, match=words):
        assert load(source) is None
    assert libraries(tmp_path) == []


@needs_compiler
def test_a_library_that_cannot_be_loaded_is_told(load, source, tmp_path, monkeypatch):
    load(source)
    (path,) = libraries(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    (tmp_path / "other" / "levelhead").mkdir(parents=True)
    (tmp_path / "other" / "levelhead" / path.name).write_bytes(b"cut off")
    with pytest.warns(RuntimeWarning, match=r"answer\.c.*(file too short|invalid ELF header)"):
        assert load(source) is None


@pytest.mark.parametrize("compiler", ["", "no-such-compiler"])
def test_without_a_compiler_there_is_no_library_and_no_warning(
    load, source, tmp_path, monkeypatch, compiler
):
    monkeypatch.setenv("CC", compiler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(source) is None
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("what", ["platform", "processor"])
def test_elsewhere_there_is_no_library(load, source, monkeypatch, what):
    if what == "platform":
        monkeypatch.setattr(sys, "platform", "win32")
    else:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert load(source) is None

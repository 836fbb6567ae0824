"""C files: compiled once, loaded, and their compiler's words where it fails."""

import ctypes
import sys
import warnings

import pytest
import torch

from levelhead import compiled
from levelhead.compiled import find_compiler, load_library

needs_compiler = pytest.mark.skipif(
    find_compiler() is None, reason="no C compiler for this processor"
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
def test_a_library_is_compiled_once_and_stays_for_other_processes(load, source, tmp_path):
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
@pytest.mark.parametrize("trouble", ["a file in the way", "others may write", "not absolute"])
def test_where_the_cache_is_no_place_it_is_compiled_for_this_time(
    load, source, tmp_path, monkeypatch, trouble
):
    cache = tmp_path / "cache"
    if trouble == "a file in the way":
        cache.write_text("in the way")
    elif trouble == "others may write":
        (cache / "levelhead").mkdir(parents=True)
        (cache / "levelhead").chmod(0o777)
    else:
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.setenv("XDG_CACHE_HOME", "cache")
        monkeypatch.chdir(tmp_path)
    assert load(source).answer() == 42
    assert not list(cache.rglob("*.so"))
    assert (trouble == "not absolute") == bool(list((tmp_path / "home").rglob("*.so")))


@needs_compiler
def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(load, source, tmp_path):
    source.write_text("int answer(void) { return forty_two; }\n")
    with pytest.warns(RuntimeWarning, match=r"(?s)compile and load answer\.c, .*forty_two"):
        assert load(source) is None
    assert libraries(tmp_path) == []


@needs_compiler
def test_a_compiler_may_fail_in_any_encoding(load, source, tmp_path, monkeypatch):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\nprintf 'erreur \\351\\n' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.warns(RuntimeWarning, match="erreur \N{REPLACEMENT CHARACTER}"):
        assert load(source) is None


@needs_compiler
def test_a_compiler_that_hangs_is_given_up(load, source, tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "_SECONDS", 0.05)
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\nexec sleep 60\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.warns(RuntimeWarning, match="timed out"):
        assert load(source) is None
    assert libraries(tmp_path) == []


@needs_compiler
def test_a_source_that_is_not_there_is_told(load, tmp_path):
    with pytest.warns(RuntimeWarning, match=r"gone\.c.*No such file"):
        assert load(tmp_path / "gone.c") is None


@needs_compiler
def test_a_damaged_library_is_told_and_made_anew_next_time(load, source, tmp_path, monkeypatch):
    load(source)
    (path,) = libraries(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    (tmp_path / "other" / "levelhead").mkdir(parents=True, mode=0o700)
    (tmp_path / "other" / "levelhead").chmod(0o700)
    (tmp_path / "other" / "levelhead" / path.name).write_bytes(b"cut off")
    with pytest.warns(RuntimeWarning, match=r"answer\.c.*(file too short|invalid ELF header)"):
        assert load(source) is None
    assert load(source).answer() == 42


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CC", ""), ("CC", "no-such-compiler"), ("CC", "cc '-O2"), ("LEVELHEAD_COMPILE", "0"),
    ],
)  # fmt: skip
def test_without_a_compiler_there_is_no_library_and_no_warning(
    load, source, tmp_path, monkeypatch, name, value
):
    monkeypatch.setenv(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_compiler() is None
        assert load(source) is None
    assert not (tmp_path / "cache").exists()


@needs_compiler
@pytest.mark.parametrize("what", ["platform", "processor"])
def test_elsewhere_there_is_no_library(load, source, monkeypatch, what):
    assert find_compiler() is not None
    if what == "platform":
        monkeypatch.setattr(sys, "platform", "win32")
    else:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert find_compiler() is None
    assert load(source) is None

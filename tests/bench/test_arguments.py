"""A benchmark refuses what it could not measure or keep before it measures anything."""

import importlib
import os
from pathlib import Path

import pytest
import torch

from levelhead.commands import benchmarks


def refused(name, arguments, capsys):
    module = importlib.import_module(f"levelhead.bench.{name}")
    with pytest.raises(SystemExit) as stopped:
        module.main(arguments)
    assert stopped.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("name", benchmarks())
def test_a_record_that_cannot_be_kept(name, tmp_path, capsys):
    lost = str(tmp_path / "nowhere" / "record.json")
    words = refused(name, ["--out", lost], capsys)
    assert "must lie in a folder that exists and can be written" in words
    assert lost in words
    assert "must be a file" in refused(name, ["--out", str(tmp_path)], capsys)


def test_a_record_in_a_folder_that_may_not_be_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may always
    words = refused("attention", ["--out", str(tmp_path / "a.json")], capsys)
    assert "can be written" in words


@pytest.mark.parametrize("tokens", ["0", "-3", "x"])
def test_sizes_that_are_none(tokens, capsys):
    words = refused("attention", ["--tokens", tokens], capsys)
    assert f"must be an integer of at least 1, got '{tokens}'" in words


def test_memory_may_be_left_out_but_not_owed(monkeypatch, capsys):
    words = refused("attention", ["--memory-tokens", "-1"], capsys)
    assert "must be an integer of at least 0, got '-1'" in words


@pytest.mark.parametrize("name", ["attention", "projections", "measure"])
def test_a_device_that_is_not_there(name, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = refused(name, ["--device", "cuda"], capsys)
    assert "must be cpu here, got 'cuda'" in words

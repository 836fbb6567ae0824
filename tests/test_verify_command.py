"""``levelhead verify``: a table, an exit code, JSON."""

import json

import pytest
import torch

from hosts import HOSTS
from levelhead.cli import main
from levelhead.convert import convert
from levelhead.sites.find import find_attention
from levelhead.sites.host import installed_in
from levelhead.store import save


def exit_code(*arguments):
    try:
        return main(["verify", *arguments])
    except SystemExit as stopped:
        return stopped.code


@pytest.fixture
def tiny_vit(monkeypatch):
    model = HOSTS["timm_vit"].build()
    model.default_cfg["input_size"] = (3, 16, 16)
    monkeypatch.setattr("timm.create_model", lambda name: model)
    return model


def test_a_timm_model_is_converted_and_checked(tiny_vit, capsys):
    assert exit_code("vit_tiny_patch16_224", "--variant", "sink", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["title"] == "sink: 2 of 2 attentions converted"
    assert found["checks"][0]["status"] == "passed"


def test_a_failed_check_is_printed_and_ends_with_one(tiny_vit, capsys, monkeypatch):
    def broken(model, variant):
        convert(model, variant)
        installed_in(find_attention(model)[0].module).inner.scale = 2.0

    monkeypatch.setattr("levelhead.verify_command.convert", broken)
    assert exit_code("vit_tiny_patch16_224") == 1
    assert "parity     failed" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["gpt2", "vit", "t5"])
def test_a_saved_model_is_loaded_and_checked(name, tmp_path, capsys):
    model = HOSTS[name].build()
    convert(model, "affine")
    save(model, tmp_path)
    torch.manual_seed(3)
    assert exit_code(str(tmp_path)) == 0
    assert "affine: " in capsys.readouterr().out


def test_bad_input_ends_with_two_and_one_line(tmp_path, capsys):
    assert exit_code("vit_tiny_patch16_2") == 2
    assert "valid: vit_tiny_patch16_224" in capsys.readouterr().err
    assert exit_code(str(tmp_path), "--variant", "quest") == 2
    assert "--variant must be left out" in capsys.readouterr().err

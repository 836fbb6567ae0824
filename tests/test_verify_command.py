"""``levelhead verify``: a table, an exit code, JSON."""

import json
import sys

import numpy as np
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
    monkeypatch.setattr("timm.create_model", lambda name, pretrained: model)
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


MODULE = """
import torch, levelhead as lh

def stock():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(30, 5, 13, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 7, 30)

def converted():
    model, batch = stock()
    lh.convert(model, "gate")
    return model, batch

def alone():
    return stock()[0]
"""


@pytest.fixture
def written(tmp_path, monkeypatch):
    (tmp_path / "models_to_verify.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("models_to_verify", None)


def test_a_function_hands_over_a_model_and_a_batch(written, capsys, tmp_path):
    assert exit_code("models_to_verify:stock", "--variant", "sink") == 0
    assert "sink: 2 of 2 attentions converted" in capsys.readouterr().out
    assert exit_code("models_to_verify:converted") == 0
    assert "gate: 2 of 2 attentions converted" in capsys.readouterr().out
    assert exit_code("models_to_verify:converted", "--variant", "sink") == 2
    assert "--variant must be left out" in capsys.readouterr().err
    assert exit_code("models_to_verify:alone") == 2
    assert "verify needs a batch, got none: the model does not say" in capsys.readouterr().err
    np.save(tmp_path / "batch.npy", np.random.default_rng(0).normal(size=(2, 7, 30)).astype("f4"))
    assert exit_code("models_to_verify:alone", "--data", str(tmp_path / "batch.npy")) == 0


def test_bad_input_ends_with_two_and_one_line(tmp_path, capsys):
    assert exit_code("./nowhere") == 2
    assert "MODEL must be a folder that exists, module:function, or a name" in (
        capsys.readouterr().err
    )
    assert exit_code(str(tmp_path)) == 2
    assert "has none of them" in capsys.readouterr().err

"""Saved and loaded bit by bit, or refused; nothing unpickled."""

import json
import subprocess
import sys

import pytest
import torch

import levelhead as lh
from hosts import HOSTS
from levelhead import store
from levelhead.sites.host import installed_in
from levelhead.store_checksum import checksum
from matrix import outputs, randomise, worst


def converted(architecture, variant="affine + gate", dtype=torch.float32):
    model = HOSTS[architecture].build().to(dtype)
    lh.convert(model, variant)
    randomise(model)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "vit", "t5", "clip"])
def test_transformers_models_come_back_bit_by_bit(architecture, dtype, tmp_path):
    model = converted(architecture, dtype=dtype)
    folder = lh.save(model, tmp_path / "deep" / "folder")
    loaded = lh.load(folder)
    assert type(loaded) is type(model)
    assert checksum(loaded.state_dict()) == checksum(model.state_dict())
    assert not loaded.training
    lh.restore(loaded)
    lh.restore(model)
    assert checksum(loaded.state_dict()) == checksum(model.state_dict())


@pytest.mark.parametrize("architecture", ["timm_vit", "swin", "torch_encoder"])
def test_other_models_come_back_into_a_stock_model(architecture, tmp_path):
    model, batch = converted(architecture, "sigma_reparam + affine"), HOSTS[architecture].batch()
    lh.save(model, tmp_path)
    loaded = lh.load(tmp_path, HOSTS[architecture].build())
    assert checksum(loaded.state_dict()) == checksum(model.state_dict())
    assert worst(outputs(loaded, batch), outputs(model, batch)) < 1e-6
    with pytest.raises(ValueError, match=r"must be built before.*levelhead.load\(folder, model\)"):
        lh.load(tmp_path)


def test_the_description_can_be_read(tmp_path):
    lh.save(converted("llama", "quest + gate"), tmp_path)
    spec = json.loads((tmp_path / "levelhead.json").read_text())
    assert spec["variant"] == "quest + gate"
    assert spec["layers"] == {"0": [2.0, "o"], "1": [2.0, "o"]}
    assert spec["model"].endswith("LlamaForCausalLM")
    assert len(spec["checksum"]) == 64
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["attn_implementation"] == "levelhead:quest + gate"
    assert config["levelhead"]["host_implementation"] == "sdpa"
    kinds = {path.suffix for path in tmp_path.iterdir()}
    assert kinds == {".json", ".safetensors"}


def test_some_layers_converted_come_back_as_they_were(tmp_path):
    model, batch = HOSTS["llama"].build(), HOSTS["llama"].batch()
    lh.convert(model, "quest", layers=[1])
    lh.save(model, tmp_path)
    loaded = lh.from_pretrained(tmp_path)
    assert torch.equal(outputs(loaded, batch), outputs(model, batch))
    assert loaded.config._attn_implementation == "levelhead:quest in layers 1"
    lh.restore(loaded)
    assert loaded.config._attn_implementation == "sdpa"


def test_dtype_and_device_of_the_loaded_model(tmp_path):
    lh.save(converted("llama"), tmp_path)
    loaded = lh.from_pretrained(tmp_path, dtype=torch.bfloat16, device="cpu")
    assert loaded.lm_head.weight.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="takes device and dtype, got torch_dtype"):
        lh.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)


def test_what_transformers_saves_itself_can_be_loaded_too(tmp_path):
    """As a Trainer does; without a checksum."""
    model = converted("vit")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert checksum(lh.from_pretrained(tmp_path).state_dict()) == checksum(model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["quest", "affine", "sigma_reparam"])
def test_a_plain_loader_in_another_process_fails_loudly(variant, tmp_path):
    lh.save(converted("llama", variant), tmp_path)
    code = f"import transformers; transformers.AutoModel.from_pretrained({str(tmp_path)!r})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode != 0
    assert f'attn_implementation="levelhead:{variant}"` is not supported' in ran.stderr


def test_a_changed_tensor_is_found(tmp_path):
    from safetensors.torch import load_file, save_file

    lh.save(converted("llama"), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name][3, 5] += 1e-6
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"bit by bit, got checksum [0-9a-f]{16}..., saved"):
        lh.load(tmp_path)


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        (
            "model.layers.1.self_attn.levelhead.inner.gate.gate_proj.weight",
            "missing .'model.layer",
        ),
        ("model.layers.0.mlp.up_proj.weight", "must hold every tensor of its model"),
    ],
)
def test_a_lost_tensor_is_an_error(lost, message, tmp_path):
    from safetensors.torch import load_file, save_file

    lh.save(converted("llama"), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors[lost]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        lh.load(tmp_path)


def test_another_architecture_is_refused_and_left_as_it_was(tmp_path):
    lh.save(converted("timm_vit", "gate"), tmp_path)
    other = HOSTS["swin"].build()
    with pytest.raises(ValueError, match="positions or names of attentions|must be those of the"):
        lh.load(tmp_path, other)


def test_files_of_strangers_are_looked_at_before_they_are_believed(tmp_path):
    model = converted("timm_vit", "gate")
    lh.save(model, tmp_path)
    path = tmp_path / "levelhead.json"
    spec = json.loads(path.read_text())
    for change, message in (
        ({"format": 99}, "format 1 or older, got format=99"),
        ({"layers": {"0": ["__import__", 1]}}, "written as variant and layers"),
        ({"layers": {"0": [2.0, "q"]}}, "written as variant and layers"),
        ({"variant": "__import__('os').getcwd()"}, "variant"),
        ({"variant": 3}, "written as variant and layers"),
    ):
        path.write_text(json.dumps(spec | change))
        fresh = HOSTS["timm_vit"].build()
        with pytest.raises(ValueError, match=message):
            lh.load(tmp_path, fresh)
        assert not any(installed_in(module) for module in fresh.modules())
    path.unlink()
    with pytest.raises(ValueError, match="must hold levelhead.json, got none in"):
        lh.load(tmp_path, HOSTS["timm_vit"].build())


def test_classes_out_of_transformers_are_not_looked_up(tmp_path):
    lh.save(converted("llama", "gate"), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("LlamaForCausalLM", "os"))
    with pytest.raises(ValueError, match="must be of a class of transformers itself"):
        lh.from_pretrained(tmp_path)


def test_stock_models_and_stock_folders_are_refused(tmp_path):
    model = HOSTS["llama"].build()
    with pytest.raises(ValueError, match="save needs a converted model, got a LlamaForCausalLM"):
        lh.save(model, tmp_path)
    assert not list(tmp_path.iterdir())
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="needs a folder with a converted model"):
        lh.from_pretrained(tmp_path)


def test_without_safetensors_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"pip install 'levelhead\[transformers\]'"):
        lh.save(converted("timm_vit", "gate"), tmp_path)


def test_the_checksum_sees_names_shapes_dtypes_and_bits():
    tensors = {"a": torch.arange(6.0), "b": torch.tensor(True)}
    first = checksum(tensors)
    assert checksum(dict(reversed(tensors.items()))) == first
    others = [
        {"c": tensors["a"], "b": tensors["b"]},
        {**tensors, "a": tensors["a"].view(2, 3)},
        {**tensors, "a": tensors["a"].int()},
        {**tensors, "a": tensors["a"].nextafter(torch.tensor(9.0))},
        {**tensors, "b": torch.tensor(False)},
    ]
    assert len({first, *(checksum(other) for other in others)}) == 6


def test_the_version_of_the_format_is_that_of_the_file(tmp_path):
    lh.save(converted("timm_vit", "gate"), tmp_path)
    assert store.read_spec(tmp_path)["format"] == store.FORMAT

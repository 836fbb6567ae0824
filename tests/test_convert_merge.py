"""Folding back: what a variant has learned, held by stock weights alone."""

import pytest
import torch

import levelhead as lh
from hosts import HOSTS
from levelhead.sites.host import installed_in
from levelhead.store_checksum import checksum
from matrix import outputs, randomise, worst

SLOW = ("phi3", "bert", "timm_vit", "xcit", "torch_encoder", "nystromformer")
LAYOUTS = [
    *("llama", "gpt2", "gpt_neox", "swin", "davit"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
]
FACTORS = [layout for layout in LAYOUTS if "nystromformer" not in str(layout)]


def stock(model):
    """Whether nothing of this library is left in a model."""
    return not any(installed_in(module) for module in model.modules())


@pytest.mark.parametrize("architecture", LAYOUTS)
@pytest.mark.parametrize(
    "variant", ["spectral(strength=0.3)", "spectral(form='svd', layout='per_head')",
                "sigma_reparam"],
)  # fmt: skip
def test_projection_terms_become_weights(architecture, variant):
    model, batch = HOSTS[architecture].build(), HOSTS[architecture].batch()
    keys = list(model.state_dict())
    lh.convert(model, variant)
    randomise(model)
    before = outputs(model, batch)
    merge = lh.merge_(model)
    assert list(merge.merged) == [str(lh.parse_variant(variant))]
    assert stock(model)
    assert list(model.state_dict()) == keys
    assert worst(outputs(model, batch), before) < 2e-6 * max(1, before.abs().max())


@pytest.mark.parametrize("architecture", FACTORS)
def test_constant_gates_and_alphas_become_an_output_projection(architecture):
    model, batch = HOSTS[architecture].build(), HOSTS[architecture].batch()
    first = outputs(model, batch)
    lh.convert(model, "affine + gate(bias=True, granularity='headwise')")
    for name, parameter in model.named_parameters():
        if name.endswith("gate_proj.bias"):
            torch.nn.init.normal_(parameter)
    before = outputs(model, batch)
    lh.merge_(model)
    assert stock(model)
    assert worst(outputs(model, batch), before) < 2e-6 * max(1, before.abs().max())
    if architecture not in ("timm_vit", "swin", "xcit", "davit"):  # their LayerScale hides it
        assert worst(before, first) > 1e-4


def test_merging_right_after_a_preserving_start_gives_back_every_bit():
    model = HOSTS["llama"].build()
    before = checksum(model.state_dict())
    lh.convert(model, "affine + gate")
    lh.merge_(model)
    assert checksum(model.state_dict()) == before


def test_what_cannot_be_folded_stays_and_goes_on_working(tmp_path):
    model, batch = HOSTS["llama"].build(), HOSTS["llama"].batch()
    lh.convert(model, "spectral(strength=0.5) + quest + gate")
    randomise(model)
    before = outputs(model, batch)
    merge = lh.merge_(model)
    assert merge.merged == {
        "spectral(strength=0.5)": ("model.layers.0.self_attn", "model.layers.1.self_attn")
    }
    assert str(merge).splitlines() == [
        "spectral(strength=0.5): folded into 2 attentions",
        "quest: kept, it is no linear change of a weight",
        "gate: kept, it depends on the input, as it was trained (model.layers.0.self_attn)",
    ]
    assert worst(outputs(model, batch), before) < 1e-6
    assert model.config._attn_implementation == "levelhead:quest + gate"
    assert model.config.levelhead["variant"] == "quest + gate"
    lh.save(model, tmp_path)
    assert worst(outputs(lh.load(tmp_path), batch), before) < 1e-6
    with pytest.raises(ValueError, match=r"merge_ needs a term.*quest: it is no linear change"):
        lh.merge_(model)
    lh.restore(model)
    assert stock(model)


def test_a_restored_model_after_a_merge_keeps_only_what_is_left_to_undo():
    """The factor that made up for alpha goes with alpha; the one for the gate stays."""
    model, batch = HOSTS["gpt2"].build(), HOSTS["gpt2"].batch()
    first = outputs(model, batch)
    lh.convert(model, "affine + gate + quest")
    for name, parameter in model.named_parameters():
        if name.endswith("gate_proj.weight"):
            torch.nn.init.normal_(parameter, std=0.1)
    lh.merge_(model)
    lh.restore(model)
    assert worst(outputs(model, batch), first) == 0


def test_an_alpha_that_moved_is_not_constant():
    model, batch = HOSTS["llama"].build(), HOSTS["llama"].batch()
    lh.convert(model, "affine")
    before, state = outputs(model, batch), checksum(model.state_dict())
    installed_in(model.model.layers[1].self_attn).inner.weights.set_state("alpha_mean", 0.4)
    with pytest.raises(ValueError, match=r"affine: it depends on the input.*layers.1"):
        lh.merge_(model)
    installed_in(model.model.layers[1].self_attn).inner.weights.set_state("alpha_mean", 0.5)
    assert checksum(model.state_dict()) == state
    assert worst(outputs(model, batch), before) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_spectral_is_not_folded_in_half_precision(dtype):
    model = HOSTS["llama"].build().to(dtype)
    lh.convert(model, "spectral")
    before = checksum(model.state_dict())
    with pytest.raises(ValueError, match="a correction of this size would be lost in torch"):
        lh.merge_(model)
    assert checksum(model.state_dict()) == before
    lh.restore(model)
    lh.convert(model, "sigma_reparam")
    assert list(lh.merge_(model).merged) == ["sigma_reparam"]


def test_a_stock_model_has_nothing_to_merge():
    with pytest.raises(ValueError, match="merge_ needs a converted model, got a LlamaForCausalLM"):
        lh.merge_(HOSTS["llama"].build())

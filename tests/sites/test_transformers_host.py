"""Converted models of transformers against equations written here, and what is refused."""

import copy
import sys

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

import levelhead as lh
from hosts import HOSTS, run
from levelhead.sites.host import installed_in
from levelhead.sites.transformers_call import HARMLESS, run_installed
from matrix import outputs, randomise, worst

EXACT = 1e-11


def plain_quest(module, query, key, value, attention_mask, scaling=None, **host):
    """Unit keys, raw queries, scale one; the host's cap, bias and sink as the host means them."""
    groups = query.shape[1] // key.shape[1]
    key = key / key.norm(dim=-1, keepdim=True)
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    # Whisper multiplies its queries before the call and sends scaling=1.
    scores = query @ key.mT * (scaling / getattr(module, "scaling", scaling))
    if host.get("softcap") is not None:
        scores = host["softcap"] * torch.tanh(scores / host["softcap"])
    if host.get("position_bias") is not None:
        scores = scores + host["position_bias"]
    if attention_mask is not None:
        scores = scores + attention_mask
    if host.get("s_aux") is not None:
        sink = host["s_aux"].view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


@pytest.mark.parametrize(
    "architecture",
    ["gpt2", "gpt2_cross", "llama", "mistral", "qwen3", "gemma2", "gemma3", "gpt_neox", "gpt_oss",
     "phi3", "bert", "vit", "clip", "whisper", "t5"],
)  # fmt: skip
def test_quest_is_its_equation_beside_every_term_of_the_host(architecture):
    AttentionInterface.register("plain_quest", plain_quest)
    AttentionMaskInterface.register("plain_quest", eager_mask)
    model, batch, exact = build(architecture)
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("plain_quest")
    expected = outputs(twin, batch)
    stock = outputs(model, batch)
    lh.convert(model, "quest")
    scale = expected.abs().max()
    assert worst(outputs(model, batch), expected) < exact * scale
    assert worst(stock, expected) > 100 * exact * scale


def build(architecture):
    """A model and a batch in float64 where its own kernels take it, and what is exact there."""
    model, batch = HOSTS[architecture].build(), HOSTS[architecture].batch()
    if architecture in ("gpt_oss", "qwen3_next"):
        return model, batch, 2e-6
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    return model.double(), batch, EXACT


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "gpt_neox", "phi3", "qwen3_next"])
@pytest.mark.parametrize("layout", ["fused", "per_head"])
def test_spectral_is_the_identity_added_to_the_stored_weights(architecture, layout):
    model, batch, exact = build(architecture)
    expected = copy.deepcopy(model)
    for site in lh.find_attention(expected):
        weights = site.read()
        for which in "qkv":
            weight = getattr(weights, f"{which}_weight")
            eye = torch.eye(*weight.shape, dtype=weight.dtype)
            if layout == "per_head":
                one = torch.eye(len(weight), site.head_dim, dtype=weight.dtype)
                eye = one.repeat(1, weight.shape[1] // site.head_dim)
            weight += 0.3 * eye
        site.write(weights)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    lh.convert(model, f"spectral(strength=0.3, layout={layout!r})")
    assert worst(outputs(model, batch), outputs(expected, batch)) < exact
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "gpt_neox", "phi3", "bert"])
def test_sigma_reparam_has_the_gradients_of_its_equation(architecture):
    model, batch = HOSTS[architecture].build().double(), HOSTS[architecture].batch()
    twin = copy.deepcopy(model)
    lh.convert(model, "sigma_reparam")
    sigma = {}
    for name, parameter in model.named_parameters():
        if ".sigma." in name:
            parameter.data.mul_(1.3)
            sigma[name] = parameter
    outputs_of(model, batch).square().sum().backward()
    for site in lh.find_attention(twin):
        weights = site.read()
        for which in "qkv":
            getattr(weights, f"{which}_weight").mul_(1.3)
        site.write(weights)
    outputs_of(twin, batch).square().sum().backward()
    for site, other in zip(lh.find_attention(model), lh.find_attention(twin), strict=True):
        for which in "qkv":
            # d/dsigma of f(sigma W / ||W||) at sigma = 1.3 ||W||: <grad, W / ||W||>.
            stored, unscaled = (getattr(s.layout, which).weight for s in (other, site))
            weight = unscaled.rows(unscaled.parameter.detach()).flatten(0, -2)
            grad = stored.rows(stored.parameter.grad).flatten(0, -2)
            expected = (grad * weight).sum() / torch.linalg.matrix_norm(weight, 2)
            found = sigma[f"{site.name}.levelhead.projections.sigma.{which}"].grad
            torch.testing.assert_close(found, expected.reshape(1), atol=1e-9, rtol=1e-7)


def outputs_of(model, batch):
    return run(model, batch)["last_hidden_state" if "Bert" in type(model).__name__ else "logits"]


def test_gains_act_before_the_rotation_so_scores_stay_relative():
    """Shifting all positions must not move anything; gains behind the rotation would."""
    model, batch = HOSTS["llama"].build().double(), HOSTS["llama"].batch()
    lh.convert(model, "qknorm_ds")
    randomise(model)
    positions = torch.arange(11)[None]
    with torch.no_grad():
        near = model(**batch, position_ids=positions).logits
        far = model(**batch, position_ids=positions + 17).logits
    assert worst(near, far) < 1e-6  # the rotation itself is float32


def test_a_name_alone_runs_a_variant_without_parameters():
    assert lh.register("quest") == "levelhead:quest"
    for architecture in ("llama", "whisper", "t5", "bert"):
        by_name = HOSTS[architecture].build()
        converted, batch = copy.deepcopy(by_name), HOSTS[architecture].batch()
        by_name.set_attn_implementation("levelhead:quest")
        lh.convert(converted, "quest")
        assert worst(outputs(by_name, batch), outputs(converted, batch)) == 0


@pytest.mark.parametrize("variant", ["affine", "gate", "sink", "qknorm_ds", "spectral"])
def test_a_name_alone_cannot_carry_parameters(variant):
    with pytest.raises(ValueError, match=r"a name alone.*levelhead\.convert\(model, variant\)"):
        lh.register(variant)


@pytest.mark.parametrize(("architecture", "term"), [("gemma2", "softcap"), ("gpt_oss", "s_aux")])
def test_a_name_alone_cannot_take_in_terms_of_the_host(architecture, term):
    model = HOSTS[architecture].build()
    model.set_attn_implementation(lh.register("quest"))
    with pytest.raises(ValueError, match=f"sends {term}.*levelhead.convert"):
        outputs(model, HOSTS[architecture].batch())


def test_unknown_keywords_are_refused_and_harmless_ones_are_not():
    model, batch = HOSTS["llama"].build(), HOSTS["llama"].batch()
    lh.convert(model, "quest")
    with pytest.raises(ValueError, match="sends alibi=Tensor, whose meaning"):
        model(**batch, alibi=torch.ones(1))
    with pytest.raises(ValueError, match="cu_seq_lens_q says where packed documents begin"):
        model(**batch, cu_seq_lens_q=torch.tensor([0, 11]))
    assert "num_items_in_batch" in HARMLESS
    model(**batch, num_items_in_batch=torch.tensor(3))


def test_attention_weights_are_there_when_asked_for():
    """No implementation but eager returns them in stock transformers."""
    model, batch = HOSTS["llama"].build(), HOSTS["llama"].batch()
    lh.convert(model, "affine")
    for part in model.modules():
        if hasattr(part, "alpha_mean"):
            part.set_state("alpha_mean", 0.7)
    with torch.no_grad():
        plain = model(**batch, output_attentions=True)
    assert worst(plain.logits, outputs(model, batch)) < 1e-6
    assert len(plain.attentions) == 2
    rows = plain.attentions[0].sum(-1)
    torch.testing.assert_close(rows, torch.full_like(rows, 0.7))


def test_a_model_without_parts_under_a_name_with_parts_is_refused():
    converted, plain = HOSTS["llama"].build(), HOSTS["llama"].build()
    lh.convert(converted, "gate")
    plain.set_attn_implementation("levelhead:gate")
    with pytest.raises(ValueError, match=r"holds no 'levelhead' parts; load the checkpoint with"):
        outputs(plain, HOSTS["llama"].batch())
    with pytest.raises(ValueError, match="holds no"):
        run_installed(torch.nn.Identity(), *torch.zeros(3, 1, 1, 1, 1), None)


def test_neighbours_under_one_configuration_keep_their_maths():
    model, batch = HOSTS["gpt_oss"].build(), HOSTS["gpt_oss"].batch()
    stock = outputs(model, batch)
    conversion = lh.convert(model, "gate", layers=[1])
    assert [layer.name for layer in conversion.layers] == ["model.layers.1.self_attn"]
    assert conversion.left == (("model.layers.0.self_attn", "not among the layers asked for"),)
    assert model.config._attn_implementation == "levelhead:gate in layers 1"
    assert worst(outputs(model, batch), stock) < 1e-6
    assert not any(".0.self_attn.levelhead" in key for key in model.state_dict())
    assert lh.restore(model) == ["model.layers.1.self_attn"]
    assert worst(outputs(model, batch), stock) == 0
    assert model.config._attn_implementation == "eager"


def test_a_part_of_a_model_can_be_converted_alone():
    """CLIP keeps two configurations: the text model's attention alone changes its name."""
    model, batch = HOSTS["clip"].build(), HOSTS["clip"].batch()
    stock = outputs(model, batch)
    lh.convert(model.text_model, "affine + gate")
    assert model.config.text_config._attn_implementation == "levelhead:affine + gate"
    assert model.config.vision_config._attn_implementation == "sdpa"
    assert worst(outputs(model, batch), stock) < 1e-6
    lh.restore(model.text_model)
    assert model.config.text_config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["gpt2", "clip", "nystromformer"])
def test_models_of_one_configuration_are_converted_apart(name, tmp_path):
    first, batch = HOSTS[name].build(), HOSTS[name].batch()
    second = type(first)(first.config).eval()
    second.load_state_dict(first.state_dict())
    assert second.config is first.config
    before = first.config.to_dict()
    stock = outputs(first, batch)
    lh.convert(first, "precondition")
    assert second.config.to_dict() == before
    assert worst(outputs(second, batch), stock) == 0
    alone = outputs(first, batch)
    assert worst(alone, stock) > 0
    lh.convert(second, "gate", start="paper")
    assert worst(outputs(first, batch), alone) == 0
    lh.save(first, tmp_path)
    assert worst(outputs(lh.load(tmp_path).eval(), batch), alone) == 0
    lh.restore(first)
    assert worst(outputs(first, batch), stock) == 0
    assert worst(outputs(second, batch), stock) > 0
    lh.restore(second)
    assert second.config.to_dict() == before


def test_restoring_a_model_whose_part_was_converted_leaves_no_hook():
    model, batch = HOSTS["gpt2"].build(), HOSTS["gpt2"].batch()
    stock = outputs(model, batch)
    lh.convert(model.transformer, "quest")
    assert worst(outputs(model, batch), stock) > 0
    lh.restore(model)
    assert worst(outputs(model, batch), stock) == 0
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_old_transformers_without_mask_functions_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", None)
    model, batch = HOSTS["llama"].build(), HOSTS["llama"].batch()
    stock, keys = outputs(model, batch), list(model.state_dict())
    for attempt in (lambda: lh.register("quest"), lambda: lh.convert(model, "gate")):
        with pytest.raises(ImportError, match="transformers 5.0 or newer.*mask"):
            attempt()
    assert list(model.state_dict()) == keys
    assert worst(outputs(model, batch), stock) == 0
    assert all(installed_in(module) is None for module in model.modules())

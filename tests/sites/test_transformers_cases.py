"""Public bug reports about attention in transformers, as acceptance tests (see their numbers)."""

import copy

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import levelhead as lh
from hosts import HOSTS
from levelhead.sites.transformers_call import AnyShape, run_by_name
from matrix import outputs, randomise, worst

VOCAB = 67
NEUTRAL = ("softmax", "affine", "gate", "sigma_reparam", "sink(start=-1e4)", "soft_cap(cap=1e6)")
SMALL = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def gpt2(**more):
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=4, n_positions=64, **SMALL, **more)
    return GPT2LMHeadModel(config).eval()


def llama(**more):
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 48,
             "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**sizes, **SMALL, **more)).eval()


def tokens(length=12, batch=1):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, VOCAB, (batch, length), generator=generator)


@pytest.mark.parametrize("scale", [None, 0.125, 1.0])
@pytest.mark.parametrize("variant", ["softmax", "off_by_one", "quest", "soft_cap(cap=3.0)"])
def test_case_a02_every_form_uses_the_scale_of_the_call(variant, scale):
    query, key, value = torch.randn(3, 2, 3, 7, 64, dtype=torch.double)
    inner = lh.InnerAttention(variant, embed_dim=192, num_heads=3)
    fused = inner(query, key, value, scale=scale)
    plain = lh.reference_attention(inner, query, key, value, scale=scale).attn_output
    bare = AnyShape(variant, embed_dim=192, num_heads=3)
    call = {} if scale is None else {"scaling": scale}
    by_name, _ = run_by_name(bare, torch.nn.Identity(), query, key, value, None, **call,
                             is_causal=False)  # fmt: skip
    assert worst(fused, plain) < 1e-12
    assert worst(by_name.transpose(1, 2), plain) < 1e-12
    if variant == "softmax":
        factor = 64**-0.5 if scale is None else scale
        by_hand = (query @ key.mT * factor).softmax(-1) @ value
        assert worst(fused, by_hand) < 1e-12


def test_case_a02_a_module_with_a_scale_of_its_own():
    model = gpt2(scale_attn_by_inverse_layer_idx=True)
    ids = tokens()
    stock = outputs(model, {"input_ids": ids})
    conversion = lh.convert(model, "softmax")
    assert worst(outputs(model, {"input_ids": ids}), stock) < 1e-6
    assert [layer.before for layer in conversion.layers] == [
        "softmax(scale=0.3536)", "softmax(scale=0.1768)",
    ]  # fmt: skip
    lh.restore(model)
    model.transformer.h[1].attn.scale = 0.5
    with pytest.raises(ValueError, match="it keeps two different scales"):
        lh.convert(model, "softmax")


@pytest.mark.parametrize("build", [llama, pytest.param(gpt2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("variant", NEUTRAL)
def test_case_a05_left_padding_and_tokens_as_stock(build, variant):
    model = build()
    ids = tokens(9, 2)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    stock, written = outputs(model, batch), generate(model, **batch)
    lh.convert(model, variant)
    assert worst(outputs(model, batch)[mask.bool()], stock[mask.bool()]) < 2e-6
    for cache in ("dynamic", "static"):
        assert torch.equal(generate(model, **batch, cache_implementation=cache), written)
    changed = {**batch, "input_ids": ids.clone()}
    changed["input_ids"][:, 6] = 4
    assert worst(outputs(model, changed)[mask.bool()][:3], stock[mask.bool()][:3]) < 2e-6
    assert worst(outputs(model, changed)[1, :6], outputs(model, batch)[1, :6]) < 1e-6
    changed = {**batch, "input_ids": ids.clone()}
    changed["input_ids"][0, :3] = 5
    assert worst(outputs(model, changed)[0, 3:], outputs(model, batch)[0, 3:]) < 1e-6


def generate(model, **more):
    options = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False,
               "disable_compile": True}  # fmt: skip
    return model.generate(**(options | more))


@pytest.mark.parametrize("variant", ["affine", "quest + gate", "sink", "off_by_one"])
def test_case_a05_sampling_over_every_cache_is_sampling_without(variant):
    model = llama()
    lh.convert(model, variant)
    randomise(model)
    written = []
    for cache in ({"use_cache": False}, {}, {"cache_implementation": "static"}):
        torch.manual_seed(5)
        written.append(generate(model, input_ids=tokens(7, 2), do_sample=True, **cache))
    assert torch.equal(written[0], written[1])
    assert torch.equal(written[0], written[2])


def test_case_a05_static_prefill_without_a_mask_means_top_left():
    """transformers hands 1 < T < S and no mask: the keys beyond T are empty slots."""
    query = torch.randn(2, 3, 5, 8)
    key, value = torch.randn(2, 2, 3, 13, 8)
    inner = AnyShape("quest", embed_dim=24, num_heads=3)
    module = torch.nn.Identity()
    module.is_causal = True
    found, _ = run_by_name(inner, module, query, key, value, None, scaling=0.3)
    expected = inner(query, key[:, :, :5], value[:, :, :5], is_causal=True, scale=0.3)
    assert worst(found.transpose(1, 2), expected) == 0
    bottom_right = inner(query, key, value, is_causal=True, scale=0.3)
    assert worst(found.transpose(1, 2), bottom_right) > 0.1


@pytest.mark.parametrize("variant", ["softmax", "affine", "sink + gate", "quest"])
@pytest.mark.parametrize("mask", [None, "ones"])
@pytest.mark.parametrize("architecture", [llama, "mistral"])
def test_case_a06_packed_documents_do_not_see_each_other(architecture, mask, variant):
    model = HOSTS[architecture].build() if isinstance(architecture, str) else architecture()
    lh.convert(model, variant)
    randomise(model)
    ids = tokens(12)
    batch = {"input_ids": ids, "position_ids": torch.tensor([[*range(5), *range(7)]])}
    if mask:
        batch["attention_mask"] = torch.ones(1, 12, dtype=torch.long)
    changed = {**batch, "input_ids": ids.clone()}
    changed["input_ids"][0, :5] = torch.tensor([9, 8, 7, 6, 5])
    packed = outputs(model, batch)
    assert worst(packed[0, 5:], outputs(model, changed)[0, 5:]) == 0
    assert worst(packed[0, :5], outputs(model, changed)[0, :5]) > 0
    alone = outputs(model, {"input_ids": ids[:, 5:]})
    assert worst(packed[:, 5:], alone) < 1e-5


def test_case_a06_stock_leaks_so_the_test_can_fail():
    model, ids = llama(), tokens(12)
    batch = {"input_ids": ids, "position_ids": torch.tensor([[*range(5), *range(7)]]),
             "attention_mask": torch.ones(1, 12, dtype=torch.long)}  # fmt: skip
    changed = {**batch, "input_ids": ids.clone()}
    changed["input_ids"][0, :5] = 9
    assert worst(outputs(model, batch)[0, 5:], outputs(model, changed)[0, 5:]) > 1e-4


def test_case_a06_boundaries_that_would_not_be_seen_are_said_plainly():
    model, ids = llama(), tokens(12)
    lh.convert(model, "quest")
    positions = torch.tensor([[*range(5), *range(6), 0]])
    mask = torch.tensor([[1] * 11 + [0]])
    with pytest.raises(ValueError, match="beside padding: their boundaries would not be seen"):
        model(ids, position_ids=positions, attention_mask=mask)
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="over a cache: their boundaries would not be seen"):
        model(ids, position_ids=positions, past_key_values=cache)
    padded = torch.tensor([[1, 1, 1, *range(9)]])
    mask = torch.tensor([[0] * 3 + [1] * 9])
    model(ids, position_ids=padded, attention_mask=mask)  # one document behind padding


def test_case_a16_wide_grouped_heads_equal_expanded_heads():
    query = torch.randn(1, 8, 64, 320)
    key, value = torch.randn(2, 1, 2, 64, 320)
    for variant in ("softmax", "quest", "sink", "affine"):
        hidden = torch.randn(1, 64, 96)
        grouped = lh.InnerAttention(variant, embed_dim=96, num_heads=8, num_kv_heads=2,
                                    head_dim=320).eval()  # fmt: skip
        whole = lh.InnerAttention(variant, embed_dim=96, num_heads=8, head_dim=320).eval()
        whole.load_state_dict(grouped.state_dict())
        expanded = [t.repeat_interleave(4, dim=1) for t in (key, value)]
        found = grouped(query, key, value, hidden, is_causal=True)
        assert worst(found, whole(query, *expanded, hidden, is_causal=True)) < 1e-5


def test_case_a22_parameters_hold_what_they_were_given_after_every_route(tmp_path):
    model = llama()
    lh.convert(model, "sink(start=0.5) + gate(bias=True)", start="paper")
    for name, parameter in model.named_parameters():
        if name.endswith("gate_proj.bias"):
            torch.nn.init.constant_(parameter, 2.0)
    model.post_init()
    model.init_weights()
    model.resize_token_embeddings(VOCAB + 3)
    lh.save(model, tmp_path)
    for route in (model, lh.load(tmp_path), copy.deepcopy(model)):
        found = dict(route.named_parameters())
        scores = [p for name, p in found.items() if name.endswith("normaliser.score")]
        biases = [p for name, p in found.items() if name.endswith("gate_proj.bias")]
        assert len(scores) == len(biases) == 2
        assert all((score == 0.5).all() for score in scores)
        assert all((bias == 2.0).all() for bias in biases)


def test_case_a22_a_stock_checkpoint_goes_into_a_converted_model():
    """Load first, convert after: the table says what is new."""
    stock, model = llama(), llama()
    conversion = lh.convert(model, "gate")
    missing, unexpected = model.load_state_dict(stock.state_dict(), strict=False)
    assert unexpected == []
    assert all(".levelhead." in name for name in missing)
    assert len(missing) == 2
    assert sum(p.numel() for n, p in model.named_parameters() if n in missing) == (
        conversion.num_params
    )


def test_case_a23_bit_equal_by_our_loader_and_loud_by_the_plain_one(tmp_path):
    model, batch = llama(), {"input_ids": tokens()}
    lh.convert(model, "affine + sink")
    randomise(model)
    lh.save(model, tmp_path)
    loaded = lh.from_pretrained(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert torch.equal(outputs(loaded, batch), outputs(model, batch))
    plain = LlamaForCausalLM.from_pretrained(tmp_path)  # this process knows the name
    with pytest.raises(ValueError, match="holds no 'levelhead' parts; load the checkpoint with"):
        outputs(plain, batch)


def test_case_a27_conv1d_and_its_linear_twin_are_converted_alike():
    model = gpt2()
    twin = copy.deepcopy(model)
    for name, layer in list(twin.named_modules()):
        if type(layer).__name__ == "Conv1D":
            linear = torch.nn.Linear(*layer.weight.shape)
            linear.weight = torch.nn.Parameter(layer.weight.T.clone())
            linear.bias = layer.bias
            twin.set_submodule(name, linear)
    batch = {"input_ids": tokens()}
    for variant in ("spectral(strength=0.5)", "spectral(form='svd')", "sigma_reparam + quest"):
        assert len(lh.convert(model, variant).layers) == 2
        assert len(lh.convert(twin, variant).layers) == 2
        assert worst(outputs(model, batch), outputs(twin, batch)) < 1e-5
        lh.restore(model)
        lh.restore(twin)
    with pytest.raises(ValueError, match="no attention found in .*Linear x 1"):
        lh.convert(torch.nn.Linear(3, 3), "quest")

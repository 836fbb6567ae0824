"""The self-check passes for what is right, and each check fails for what it is there for."""

import re

import pytest
import torch
from torch import nn

from hosts import HOSTS, tokens
from levelhead.attention import Attention
from levelhead.convert import convert
from levelhead.harness.models.gpt import GPT, GPTConfig
from levelhead.parts import weights
from levelhead.parts.normalisers import Softmax
from levelhead.sites.find import find_attention
from levelhead.sites.host import installed_in
from levelhead.stages.masks import AttentionMask
from levelhead.store_checksum import checksum
from levelhead.verify import verify
from levelhead.verify_batch import find_padding, find_tokens
from levelhead.verify_report import VerificationError
from levelhead.verify_subject import distance

CHECKS = ["parity", "scale", "mask leak", "on path", "padding", "cache", "checksum"]


def converted(name, variant="quest"):
    model = HOSTS[name].build()
    convert(model, variant)
    return model, HOSTS[name].batch()


def statuses(verification):
    return {check.name: check.status for check in verification.checks}


def parts(model):
    found = [installed_in(site.module) for site in find_attention(model)]
    return [part for part in found if part is not None]


def failure(model, batch, name, **options):
    """Assert that exactly one check fails, and return what it says."""
    with pytest.raises(VerificationError) as raised:
        verify(model, batch, **options)
    failed = raised.value.verification.failed
    assert [check.name for check in failed] == [name], str(raised.value)
    assert failed[0].detail in str(raised.value)
    return failed[0].detail


@pytest.mark.parametrize(
    ("name", "skipped"),
    [
        ("gpt2", []),
        ("llama", []),
        ("gpt2_cross", []),
        ("bert", ["cache"]),
        ("t5", ["cache"]),
        ("whisper", ["padding", "cache"]),
        ("timm_vit", ["mask leak", "padding", "cache"]),
        ("swin", ["mask leak", "padding", "cache"]),
        ("xcit", ["mask leak", "padding", "cache"]),
        ("torch_encoder", ["padding", "cache"]),
        ("torch_pair", ["padding", "cache"]),
    ],
)
@pytest.mark.parametrize("variant", ["quest", "affine(phi='sigmoid') + gate", "sigma_reparam"])
def test_every_library_passes_and_is_left_as_it_was(name, skipped, variant):
    if (name, variant[:6]) == ("xcit", "affine"):
        variant = "gate"
    model, batch = converted(name, variant)
    model.train()
    before, names = checksum(model.state_dict()), [n for n, _ in model.named_modules()]
    found = statuses(verify(model, batch))
    assert list(found) == CHECKS
    assert [check for check in CHECKS if found[check] == "skipped"] == skipped
    assert checksum(model.state_dict()) == before
    assert [n for n, _ in model.named_modules()] == names
    assert all(module.training for module in model.modules())
    assert all(type(part.inner.normaliser) is Softmax for part in parts(model))


def test_the_table_names_what_ran_and_with_which_scale():
    model, batch = converted("llama", "softmax")
    text = str(verify(model, batch))
    assert text.startswith("softmax: 2 of 2 attentions converted")
    assert f"scale in use: {14**-0.5:.6g}" in text


def test_case_a02_a_forgotten_scale_is_found():
    model, batch = converted("torch_encoder")
    parts(model)[1].inner.scale = 1.0
    with pytest.raises(VerificationError, match=r"scale +failed +scale in use"):
        verify(model, batch)


def test_case_a03_the_right_mask_passes_and_the_inverted_one_fails_loudly():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(32, 4, 13, batch_first=True).eval()
    convert(model, "quest")
    mask = torch.ones(5, 5).triu(1).bool()
    batch = {"src": torch.randn(2, 5, 32), "src_mask": mask}
    assert statuses(verify(model, batch, is_causal=True))["mask leak"] == "passed"
    detail = failure(model, batch | {"src_mask": mask.mT}, "mask leak", is_causal=True)
    assert "changing token 3 moved outputs before it: [0, 1, 2]" in detail


def test_an_attention_that_forgets_its_mask_is_found(monkeypatch):
    """Parity cannot see it when the leak is in the variant's own part."""
    model, batch = converted("gpt2", "affine")
    part = parts(model)[1].inner.weights
    part.set_state("alpha_mean", 0.9)
    whole = AttentionMask(11, 11, torch.device("cpu"))
    then = type(part).then
    monkeypatch.setattr(part, "then", lambda value, mask, *rest: then(part, value, whole, *rest))
    assert "moved outputs before it" in failure_among(model, batch, "mask leak")


def sees_everything(mask):
    return AttentionMask(mask.num_queries, mask.num_keys, mask.device)


def sum_over_everything(monkeypatch):
    """Let affine sum V over all keys instead of the visible ones."""
    total = weights.visible_sum
    monkeypatch.setattr(weights, "visible_sum", lambda m, value: total(sees_everything(m), value))
    monkeypatch.setattr(weights, "visible_mean", lambda m, value, _: value.mean(2, keepdim=True))


def own_gpt():
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=31, embed_dim=24, num_heads=3, context_length=16)
    return GPT(config).eval(), torch.randint(31, (2, 11))


@pytest.mark.parametrize("start", ["preserve", "paper"])
@pytest.mark.parametrize("name", ["gpt2", "mistral", "torch_pair", "levelhead"])
def test_a_part_that_starts_neutral_cannot_hide_its_leak(monkeypatch, name, start):
    """What is taken from the wrong place is multiplied by zero."""
    if name == "levelhead":
        model, batch = own_gpt()
    else:
        model, batch = HOSTS[name].build(), HOSTS[name].batch()
    if name == "torch_pair":
        batch["tgt_mask"] = torch.ones(7, 7).triu(1).bool()
    convert(model, "affine", start=start)
    assert statuses(verify(model, batch))["mask leak"] == "passed"
    sum_over_everything(monkeypatch)
    detail = failure_among(model, batch, "mask leak")
    assert detail.startswith("with nudged parameters: ") == (start == "preserve")
    assert ("moved outputs before it" in detail) != (name == "torch_pair")


@pytest.mark.parametrize("start", ["preserve", "paper"])
def test_a_part_that_starts_neutral_cannot_hide_that_it_reads_padding(monkeypatch, start):
    model, batch = HOSTS["bert"].build(), HOSTS["bert"].batch()
    convert(model, "affine", start=start)
    sum_over_everything(monkeypatch)
    detail = failure_among(model, batch, "padding")
    assert detail.startswith("with nudged parameters: ") == (start == "preserve")


def test_calls_tell_whether_the_future_is_hidden_where_the_model_cannot():
    model, batch = own_gpt()
    convert(model, "quest + affine")
    (check,) = [check for check in verify(model, batch).checks if check.name == "mask leak"]
    assert check.detail == (
        "changed tokens 6 (moved 5 of 11), 10 (moved 1 of 11): no output before it moved; "
        "also with nudged parameters"
    )
    blind = parts(model)[1].inner
    attend = blind.attend
    blind.attend = lambda q, k, v, hidden, call: attend(
        q, k, v, hidden, call._replace(mask=sees_everything(call.mask))
    )
    assert "moved outputs before it: [0, 1, 2, 3, 4, 5]" in failure_among(
        model, batch, "mask leak"
    )


def test_states_in_place_of_ids_move_what_follows_them_behind_a_layer_norm():
    """A change that is the same in all coordinates would be taken back by the norm."""
    model, _ = converted("gpt2")
    checks = verify(model, {"inputs_embeds": torch.randn(2, 9, 30)}).checks
    (check,) = [check for check in checks if check.name == "mask leak"]
    assert check.detail.startswith("changed tokens 5 (moved 4 of 9), 8 (moved 1 of 9)")


def test_a_model_that_sees_the_future_beside_its_attention_is_told_apart():
    """Its causal attention makes a promise that stock breaks too: the user says what is meant."""

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.attention = Attention(12, 3)

        def forward(self, states):
            return self.attention(states + states.mean(dim=1, keepdim=True), is_causal=True)

    model, batch = Pooled().eval(), torch.randn(2, 7, 12)
    convert(model, "quest")
    assert failure(model, batch, "mask leak").endswith("[0, 1, 2, 3], as in stock")
    verify(model, batch, is_causal=False)


def test_nudged_parameters_that_overflow_prove_nothing():
    model, batch = converted("gpt2", "qknorm_hs")
    model.half()
    for part in parts(model):
        nn.init.constant_(part.inner.norm.head_scale, 5e4)
    (check,) = [check for check in verify(model, batch).checks if check.name == "mask leak"]
    assert check.detail.endswith("no output before it moved; nudged parameters overflow")


def test_an_attention_off_the_path_is_found():
    model, batch = converted("torch_encoder", "gate")
    site = find_attention(model)[1]
    plain = nn.MultiheadAttention(30, 5, batch_first=True).eval()
    plain.load_state_dict(site.module.state_dict(), strict=False)
    site.module.forward = plain.forward  # what a wrapper that kept the old forward would do
    detail = failure_among(model, batch, "on path")
    assert "layers.1.self_attn (attention), layers.1.self_attn (parameters)" in detail
    assert "layers.0" not in detail


def failure_among(model, batch, name):
    with pytest.raises(VerificationError) as raised:
        verify(model, batch)
    return next(c.detail for c in raised.value.verification.failed if c.name == name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_nobody_uses_is_found(dtype):
    model, batch = converted("bert", "gate")
    model.to(dtype)
    parts(model)[0].inner.gate.forward = lambda attn_output, hidden_states: attn_output / 2
    detail = failure(model, batch, "on path")
    assert detail == "the output does not depend on encoder.layer.0.attention.self (parameters)"


def test_attention_behind_a_zero_weight_is_no_failure_and_is_named():
    model, batch = converted("timm_vit")
    with torch.no_grad():
        model.blocks[1].attn.proj.weight.zero_()
        model.blocks[1].attn.proj.bias.zero_()
    found = verify(model, batch)
    (check,) = [check for check in found.checks if check.name == "on path"]
    assert check.status == "passed"
    assert check.detail.endswith("nothing depends on blocks.1.attn, whatever it computes")


def test_padding_that_matters_is_found():
    model, batch = converted("bert", "gate")
    part = parts(model)[0].inner.gate
    seen = type(part).forward
    part.forward = lambda out, hidden: (
        seen(part, out, hidden) + hidden.mean(dim=1)[:, None, None, :12]
    )
    assert "padding tokens changed: others moved by" in failure_among(model, batch, "padding")


def test_a_cache_that_is_not_used_is_found():
    model, batch = converted("gpt2")
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, **_without_cache(kwargs))
    assert "8 + 2 + 1 tokens: logits differ by" in failure(model, batch, "cache")


def _without_cache(kwargs):
    return {k: None if k in ("past_key_values", "cache") else v for k, v in kwargs.items()}


def test_affine_over_all_keys_has_no_cache_to_agree_with():
    model, batch = converted("gpt2", "affine(count='keys')")
    (check,) = [check for check in verify(model, batch).checks if check.name == "cache"]
    assert check.status == "skipped"
    assert "depends on the number of keys so far" in check.detail


def test_a_stock_model_is_refused():
    model = HOSTS["gpt2"].build()
    with pytest.raises(ValueError, match=r"needs a model converted.*2 attentions are all stock"):
        verify(model, HOSTS["gpt2"].batch())


@pytest.mark.parametrize("size", [(0, 7), (1, 0)])
def test_an_empty_batch_is_refused(size):
    model, _ = converted("gpt2", "quest")
    ids = torch.zeros(size, dtype=torch.long)
    rule = "at least one sample of at least one token.*'input_ids' is empty: "
    with pytest.raises(ValueError, match=rule + re.escape(f"Tensor{list(size)}")):
        verify(model, {"input_ids": ids})
    with pytest.raises(ValueError, match=r"argument 0 is empty"):
        verify(model, ids)


def test_half_a_model_is_checked_where_it_is_converted():
    model = HOSTS["llama"].build()
    convert(model, "quest", layers=[1])
    assert str(verify(model, tokens())).startswith(
        "quest; softmax: 2 of 2"
    )  # transformers runs all layers by one name


def test_low_precision_has_its_own_tolerance():
    model, batch = converted("llama", "quest")
    verify(model.bfloat16(), batch)


@pytest.mark.parametrize("variant", ["gate", "precondition"])
def test_what_moves_hardly_in_half_precision_is_no_leak(variant):
    """Of outputs that move by a few bits, some lie above a threshold in one model alone."""
    model, batch = converted("gpt2", variant)
    verify(model.bfloat16(), batch)


@pytest.mark.parametrize("name", ["gpt2", "torch_pair"])
def test_a_leak_is_found_in_half_precision_too(monkeypatch, name):
    model, batch = HOSTS[name].build(), HOSTS[name].batch()
    if name == "torch_pair":
        batch = {key: states.bfloat16() for key, states in batch.items()}
        batch["tgt_mask"] = torch.ones(7, 7).triu(1).bool()
    convert(model, "affine", start="paper")
    model.bfloat16()
    verify(model, batch)
    sum_over_everything(monkeypatch)
    beyond = "that stock does not move" if name == "torch_pair" else "before it"
    assert f"moved outputs {beyond}" in failure_among(model, batch, "mask leak")


@pytest.mark.parametrize(("name", "variant"), [("swin", "sink"), ("davit", "qknorm_hs")])
def test_parameters_that_move_few_bits_in_half_precision_are_on_the_path(name, variant):
    model, batch = converted(name, variant)
    verify(model.bfloat16(), batch.bfloat16())


def test_tokens_are_found_in_any_batch():
    model = nn.TransformerEncoderLayer(32, 4, 13)  # tokens first
    states = torch.randn(7, 2, 32)
    found = find_tokens(model, states)
    assert (found.axis, found.num_tokens) == (0, 7)
    where = torch.zeros(7, dtype=torch.bool)
    where[3] = True
    changed = found.changed(where)
    assert (changed != states).any(dim=(1, 2)).nonzero().flatten().tolist() == [3]
    attention = nn.MultiheadAttention(32, 4)
    query, key, value = find_tokens(attention, (states, states, states)).changed(where)
    assert query is key is value
    assert find_tokens(model, torch.randn(2, 3, 8, 8)) is None


def test_padding_of_torch_means_true_and_of_transformers_zero():
    model = nn.TransformerEncoderLayer(32, 4, 13, batch_first=True)
    states, padding = torch.randn(2, 7, 32), torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 5:] = True
    found = find_padding(model, {"src": states, "src_key_padding_mask": padding})
    assert torch.equal(found.is_padding, padding)
    ids = {"input_ids": torch.arange(14).view(2, 7), "attention_mask": (~padding).long()}
    assert torch.equal(find_padding(model, ids).is_padding, padding)
    made = find_padding(model, {"input_ids": ids["input_ids"]})
    assert made.is_padding.sum() == 1
    assert torch.equal(made.tokens.batch["attention_mask"], (~made.is_padding).long())


def test_distance_sees_nan_and_other_shapes():
    ones = torch.ones(3)
    assert distance(ones, ones)[0] == 0
    assert distance(ones * torch.nan, ones)[0] == float("inf")
    assert distance(torch.ones(2), ones)[0] == float("inf")
    assert distance({"a": 2 * ones}, {"a": ones})[0] == 1.0

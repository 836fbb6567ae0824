"""Capture of converted models: the record is what the new attention gets, after its norms."""

import pytest
import torch
from torch import nn

from capturing import (
    FLOAT32_SOFTMAX,
    HostOutputs,
    assert_put_back,
    built,
    double,
    neutralise_gates,
    plain_output,
    ways,
)
from hosts import HOSTS, run
from levelhead.capture import capture
from levelhead.convert import convert
from levelhead.sites.find import find_attention

NAMES = [
    "gpt2_cross", "llama", "gemma2", "olmo2", "bert", "clip", "whisper", "t5", "timm_vit", "swin",
    "davit", "eva", "torch_encoder",
]  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("variant", ["quest", "sink"])
@pytest.mark.parametrize("name", NAMES)
def test_records_of_a_converted_model_reproduce_it(name, variant):
    model, batch = built(name, ways(name)[-1]), double(HOSTS[name].batch())
    convert(model, variant, start="paper")
    sites = find_attention(model)
    neutralise_gates(sites)
    outputs, calls = HostOutputs(sites), []
    with capture(model, calls.append):
        run(model, batch)
    assert sorted(call.site.layer_idx for call in calls) == [site.layer_idx for site in sites]
    for call in calls:
        (expected,) = outputs.outputs[call.site.name]
        plain = plain_output(call)
        if isinstance(call.site.module, nn.MultiheadAttention):
            plain = call.site.module.out_proj(plain)
        atol = FLOAT32_SOFTMAX * expected.abs().max().item()
        torch.testing.assert_close(plain, expected, rtol=0, atol=atol, msg=call.site.name)
        if variant == "quest" and not call.site.has_rope:
            norms = call.key.norm(dim=-1)
            torch.testing.assert_close(norms, torch.ones_like(norms), atol=1e-3, rtol=0)
    for handle in outputs.handles:
        handle.remove()


def test_a_converted_model_is_put_back_too():
    model = HOSTS["timm_vit"].build()
    convert(model, "quest")
    before = {id(module): len(module._forward_pre_hooks) for module in model.modules()}
    with pytest.raises(RuntimeError, match="from the body"), capture(model, print):
        raise RuntimeError("from the body")
    assert before == {id(module): len(module._forward_pre_hooks) for module in model.modules()}
    assert not [module for module in model.modules() if "check" in vars(module)]
    assert_put_back(HOSTS["timm_vit"].build())

"""What is captured, put into plain attention, gives what the host's kernel gave."""

import pytest
import torch
from torch import Tensor, nn

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
from levelhead.sites.find import find_attention

CASES = [(name, way) for name in HOSTS for way in ways(name)]


@torch.no_grad()
@pytest.mark.parametrize(("name", "way"), CASES)
def test_records_reproduce_the_host_and_leave_it_alone(name, way):
    model, batch = built(name, way), double(HOSTS[name].batch())
    sites = find_attention(model)
    for site in sites:
        for parameter in site.module.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.2)
    neutralise_gates(sites)
    stock = run(model, batch)
    outputs, calls = HostOutputs(sites), []
    with capture(model, calls.append):
        watched = run(model, batch)
    assert sorted(call.site.layer_idx for call in calls) == [site.layer_idx for site in sites]
    for call in calls:
        (expected,) = outputs.outputs[call.site.name]
        plain = plain_output(call)
        if isinstance(call.site.module, nn.MultiheadAttention):
            plain = call.site.module.out_proj(plain)
        atol = FLOAT32_SOFTMAX * expected.abs().max().item()
        torch.testing.assert_close(plain, expected, rtol=0, atol=atol, msg=call.site.name)
        assert call.hidden_states.shape[-1] == call.site.embed_dim
        assert not call.query.requires_grad
    fast_path = 1e-12 if HOSTS[name].library == "torch" else 0.0
    for before, after in zip(tensors(stock), tensors(watched), strict=True):
        torch.testing.assert_close(before, after, rtol=0, atol=fast_path)
    for handle in outputs.handles:
        handle.remove()
    assert_put_back(model)


def tensors(output) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    return [value for value in output.values() if isinstance(value, Tensor)]

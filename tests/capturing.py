"""What the tests of capture share: plain attention from a record, and ears of their own."""

import torch
from torch import Tensor, nn

from hosts import HOSTS
from levelhead.sites.calls import AttentionCall

FLOAT32_SOFTMAX = 1e-5
"""Hosts that take their softmax in float32 agree to its precision only."""


def plain_output(call: AttentionCall) -> Tensor:
    """Heads side by side, from the equations and the record alone."""
    group = call.query.shape[1] // call.key.shape[1]
    key, value = (t.repeat_interleave(group, dim=1) for t in (call.key, call.value))
    scores = call.scale * call.query @ key.mT
    if call.soft_cap is not None:
        scores = call.soft_cap * (scores / call.soft_cap).tanh()
    if call.attn_bias is not None:
        scores = scores + call.attn_bias
    if call.attn_mask is not None:
        scores = scores.masked_fill(~call.attn_mask, -torch.inf)
    if call.is_causal:
        num_queries, num_keys = scores.shape[-2:]
        future = torch.ones(num_queries, num_keys).triu(num_keys - num_queries + 1).bool()
        scores = scores.masked_fill(future, -torch.inf)
    if call.sink_score is not None:
        sink = call.sink_score.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores, value = torch.cat([scores, sink], -1), nn.functional.pad(value, (0, 0, 0, 1))
    attn_output = scores.softmax(-1) @ value
    if call.site.kind in ("cross_covariance", "channel"):
        attn_output = attn_output.mT
    merged = attn_output.transpose(1, 2).flatten(2)
    if call.site.output_norm is not None:
        merged = call.site.output_norm(merged)
    return merged / 2 if call.site.has_gate else merged


class HostOutputs:
    """What goes into each output projection, seen by hooks of the test's own."""

    def __init__(self, sites):
        self.outputs: dict[str, list[Tensor]] = {site.name: [] for site in sites}
        self.handles = [self._hook(site) for site in sites]

    def _hook(self, site):
        into = self.outputs[site.name]
        if isinstance(site.module, nn.MultiheadAttention):
            return site.module.register_forward_hook(lambda m, args, out: into.append(out[0]))
        owner = site.layout.o.weight.owner
        return owner.register_forward_pre_hook(lambda m, args: into.append(args[0].clone()))


def neutralise_gates(sites) -> None:
    for site in sites:
        if site.has_gate:  # gate logits 0: a gate of one half
            weight = site.module.q_proj.weight
            weight.view(site.num_heads, 2, site.head_dim, -1)[:, 1] = 0.0
        if site.kind == "landmark":
            site.module.conv.weight.zero_()


EAGER_ONLY = ("gpt_oss", "gemma2", "nystromformer")


def ways(name: str) -> list[str]:
    library = HOSTS[name].library
    if library == "torch":
        return ["as it is"]
    if library == "timm":
        return ["fused", "by hand"]
    return ["eager"] if name in EAGER_ONLY else ["eager", "sdpa"]


def built(name: str, way: str) -> nn.Module:
    if HOSTS[name].library == "transformers":
        more = {"experts_implementation": "eager"} if name in ("qwen3_next", "gpt_oss") else {}
        return HOSTS[name].build(attn_implementation=way, **more).double()
    model = HOSTS[name].build().double()
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = way == "fused"
    return model


def double(batch):
    def widen(tensor):
        return tensor.double() if tensor.is_floating_point() else tensor

    if isinstance(batch, Tensor):
        return widen(batch)
    return {name: widen(tensor) for name, tensor in batch.items()}


def assert_put_back(model: nn.Module) -> None:
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
        assert "check" not in vars(module)
    from transformers.modeling_utils import AttentionInterface

    assert not hasattr(AttentionInterface.get_interface, "__wrapped__")
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch.overrides._get_current_function_mode_stack() == []

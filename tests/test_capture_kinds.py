"""Capture of attention written by hand, of our own, of several at once; and what is refused."""

import pytest
import torch
from torch import nn

from capturing import HostOutputs, assert_put_back, plain_output
from hosts import HOSTS, run
from levelhead.attention import Attention
from levelhead.capture import capture
from levelhead.inner import InnerAttention
from levelhead.sites.find import find_attention
from levelhead.sites.layout import Layout, fused, linear
from levelhead.sites.sites import AttentionSite
from levelhead.sites.transformers_calls import seen_in_interface
from levelhead.stages.masks import resolve_mask


class ByHand(nn.Module):
    """A user's attention, causal, written out: scale by division, masked_fill, softmax."""

    def __init__(self, heads_in_batch):
        super().__init__()
        self.qkv, self.out, self.heads_in_batch = (
            nn.Linear(30, 90),
            nn.Linear(30, 30),
            heads_in_batch,
        )

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (5, 6)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        forbidden = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        if self.heads_in_batch:
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
            scores = torch.bmm(q, k.transpose(1, 2)) / 6**0.5
        else:
            scores = (q @ k.transpose(-2, -1)) * (1.0 / 6**0.5)
        scores = scores.masked_fill(forbidden, float("-inf"))
        y = torch.softmax(scores.float(), dim=-1).type_as(v) @ v
        y = y.unflatten(0, (-1, 5)) if self.heads_in_batch else y
        return self.out(y.transpose(1, 2).flatten(2))


def read_by_hand(name, module, model):
    if not isinstance(module, ByHand):
        return None
    q, k, v = fused(module.qkv, 30, 30, 30)
    return AttentionSite(
        name=name, module=module, layout=Layout(q, k, v, linear(module.out)), num_heads=5,
        scale=6**-0.5,
    )  # fmt: skip


@pytest.mark.parametrize("heads_in_batch", [False, True])
def test_attention_written_by_hand(heads_in_batch):
    model, calls = ByHand(heads_in_batch), []
    with torch.no_grad(), capture(model, calls.append, readers=[read_by_hand]):
        output = model(torch.randn(2, 7, 30))
    (call,) = calls
    assert call.query.shape == (2, 5, 7, 6)
    torch.testing.assert_close(model.out(plain_output(call)), output, atol=1e-6, rtol=0)


class OtherKernel(ByHand):
    """Not softmax attention at all."""

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (5, 6)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out((q.relu() @ (k.relu().mT @ v)).transpose(1, 2).flatten(2))


def test_what_cannot_be_seen_is_an_error_and_not_an_empty_report():
    model = OtherKernel(False)
    with (
        pytest.raises(ValueError, match=r"the attention ''.*\(OtherKernel\) ran.*not be seen"),
        capture(model, print, readers=[read_by_hand]),
    ):
        model(torch.randn(2, 7, 30))
    assert_put_back(model)


@pytest.mark.parametrize("name", ["gpt2", "timm_vit", "swin", "torch_encoder"])
def test_captures_may_overlap_in_any_order(name):
    model, batch, counts = HOSTS[name].build(), HOSTS[name].batch(), [0, 0]

    def count(index):
        def on_attention(call):
            counts[index] += 1

        return on_attention

    first, second = capture(model, count(0)), capture(model, count(1))
    first.__enter__()
    second.__enter__()
    run(model, batch)
    first.__exit__(None, None, None)
    run(model, batch)
    second.__exit__(None, None, None)
    run(model, batch)
    assert counts == [HOSTS[name].num_sites, 2 * HOSTS[name].num_sites]
    assert_put_back(model)


@pytest.mark.parametrize(
    "variant", ["softmax", "quest", "qknorm_hs", "sink(start=0.5)", "soft_cap(cap=2.0)"]
)
def test_own_attention_of_any_variant(variant):
    host = Attention(30, 5, variant=variant, num_kv_heads=1)
    hidden, calls = torch.randn(2, 7, 30), []
    with torch.no_grad(), capture(host, calls.append):
        output = host(hidden, is_causal=True)
        with_weights, weights = host(hidden, is_causal=True, need_weights=True)
    torch.testing.assert_close(host.o_proj(plain_output(calls[0])), output, atol=1e-6, rtol=0)
    assert len(calls) == 2
    assert torch.equal(calls[0].hidden_states, hidden)
    assert_put_back(host)


class HostOfInner(ByHand):
    """What a converted host is: its own projections around an inner attention."""

    def __init__(self):
        super().__init__(False)
        self.inner = InnerAttention("qknorm", embed_dim=30, num_heads=5)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (5, 6)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(self.inner(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def test_an_inner_attention_in_a_host_is_seen_after_its_norms():
    model, calls = HostOfInner(), []
    with torch.no_grad(), capture(model, calls.append, readers=[read_by_hand]):
        output = model(torch.randn(2, 7, 30))
    (call,) = calls
    torch.testing.assert_close(call.query.norm(dim=-1), torch.ones(2, 5, 7), atol=1e-5, rtol=0)
    torch.testing.assert_close(model.out(plain_output(call)), output, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["llama", "timm_vit", "torch_encoder"])
def test_the_callback_computes_in_full_precision_under_autocast(name):
    model, batch, dtypes = HOSTS[name].build(), HOSTS[name].batch(), []

    def on_attention(call):
        assert not torch.is_grad_enabled()
        dtypes.append((torch.randn(2, 3) @ torch.randn(3, 2)).dtype)

    with torch.autocast("cpu", dtype=torch.bfloat16), capture(model, on_attention):
        run(model, batch)
    assert set(dtypes) == {torch.float32}


def test_bad_input():
    model = HOSTS["gpt2"].build()
    with (
        pytest.raises(ValueError, match=r"sites must be those of this model.*h.0.attn"),
        capture(HOSTS["gpt2"].build(), print, sites=find_attention(model)),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"at least one attention.*sites=\[\]"),
        capture(model, print, sites=[]),
    ):
        pass
    with (
        pytest.raises(ValueError, match="compiled modules: .*_orig_mod"),
        capture(torch.compile(model), print),
    ):
        pass


def test_flash_attention_of_transformers_is_translated():
    query, key = torch.randn(2, 4, 5, 6), torch.randn(2, 2, 7, 6)
    padding = torch.ones(2, 7, dtype=torch.long)
    padding[0, :3] = 0
    seen = seen_in_interface(
        "flash_attention_2", nn.Module(), query, key, key, padding, sliding_window=3
    )
    mask = resolve_mask(query, key, seen.attn_mask, seen.attn_bias, seen.is_causal)
    for t in range(5):  # query t sits on key t + 2 and sees three keys, its own included
        keys = [t <= s <= t + 2 for s in range(7)]
        assert mask.visible()[1, 0, t].tolist() == keys
        assert mask.visible()[0, 0, t].tolist() == [k and s > 2 for s, k in enumerate(keys)]
    with pytest.raises(ValueError, match=r"whole sequences.*'paged\|sdpa'"):
        seen_in_interface("paged|sdpa", nn.Module(), query, key, key, None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_block_masks_of_flex_attention():
    model = HOSTS["llama"].build(attn_implementation="flex_attention", head_dim=16)
    batch = HOSTS["llama"].batch()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, :4] = 0
    outputs, calls = HostOutputs(find_attention(model)), []
    with torch.no_grad(), capture(model, calls.append):
        run(model, batch)
    assert len(calls) == 2
    for call in calls:
        plain, (host,) = plain_output(call), outputs.outputs[call.site.name]
        rows = plain.isfinite().all(-1)
        assert rows.sum() == 2 * 11 - 4
        torch.testing.assert_close(plain[rows], host[rows], atol=1e-5, rtol=0)

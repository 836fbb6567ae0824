"""Capture where it is known to go wrong: public cases, masks, caches, checkpoints, memory."""

import gc
import weakref
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from capturing import HostOutputs, assert_put_back, plain_output
from hosts import HOSTS, run, tokens
from levelhead.capture import capture
from levelhead.sites.calls import AttentionCall
from levelhead.sites.find import find_attention


def attn_weights(call) -> Tensor:
    group = call.query.shape[1] // call.key.shape[1]
    scores = call.scale * call.query @ call.key.repeat_interleave(group, dim=1).mT
    return call.mask().apply(scores.float()).softmax(-1)


def scores_and_value(call) -> tuple[Tensor, Tensor]:
    return call.mask().apply(call.scale * call.query @ call.key.mT), call.value


def entropy_nats(weights: Tensor) -> Tensor:
    return -torch.special.xlogy(weights, weights).sum(-1)


def assert_reproduces(model: nn.Module, run_it) -> list[AttentionCall]:
    """Compares every call with the host, in rows that may attend to something."""
    sites, calls, plains = find_attention(model), [], {}

    def on_attention(call):  # at once: a static cache overwrites the tensors of a record
        calls.append(call)
        plains.setdefault(call.site.name, []).append(plain_output(call))

    outputs = HostOutputs(sites)
    with torch.no_grad(), capture(model, on_attention):
        run_it()
    for handle in outputs.handles:
        handle.remove()
    for name, expected in outputs.outputs.items():
        assert len(plains[name]) == len(expected)
        for plain, host in zip(plains[name], expected, strict=True):
            rows = plain.isfinite().all(-1)
            assert rows.any()
            torch.testing.assert_close(plain[rows], host[rows], atol=2e-5, rtol=0)
    return calls


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-3)])
def test_case_a07_statistics_equal_those_of_an_eager_copy(dtype, tolerance):
    model = HOSTS["llama"].build(attn_implementation="sdpa").to(dtype)
    eager = HOSTS["llama"].build(attn_implementation="eager").to(dtype)
    eager.load_state_dict(model.state_dict())
    ids, mean_entropies = tokens()["input_ids"], []
    with torch.no_grad():
        with capture(model, lambda c: mean_entropies.append(entropy_nats(attn_weights(c)).mean())):
            assert model.config._attn_implementation == "sdpa"
            output = model(ids)
        expected = eager(ids, output_attentions=True).attentions
    assert model.config._attn_implementation == "sdpa"
    assert output.attentions is None
    for found, weights in zip(mean_entropies, expected, strict=True):
        assert abs(found - entropy_nats(weights.float()).mean()) < tolerance


def test_case_a07_some_layers_only():
    model = HOSTS["llama"].build()
    names = []
    with capture(model, lambda c: names.append(c.site.name), sites=find_attention(model)[1:]):
        model(**tokens())
    assert names == ["model.layers.1.self_attn"]


@torch.no_grad()
@pytest.mark.parametrize("name", ["timm_vit", "swin", "xcit", "davit", "eva", "beit"])
def test_case_a08_fused_and_unfused_give_the_same_scores(name):
    model, found = HOSTS[name].build(), {True: [], False: []}
    for is_fused, seen in found.items():
        for module in model.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = is_fused
        with capture(model, lambda c, seen=seen: seen.append(scores_and_value(c))):
            run(model, HOSTS[name].batch())
    assert len(found[True]) == len(found[False]) == HOSTS[name].num_sites
    for fused_call, plain_call in zip(found[True], found[False], strict=True):
        for fused_tensor, plain_tensor in zip(fused_call, plain_call, strict=True):
            torch.testing.assert_close(fused_tensor, plain_tensor, atol=1e-5, rtol=0)


def test_case_a08_no_attention_is_an_error():
    with pytest.raises(ValueError, match="no attention found"), capture(nn.Linear(3, 3), print):
        pass


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("num_heads", [4, 3])
@pytest.mark.parametrize("is_padded", [False, True])
def test_case_a09_encoder_fast_path(num_heads, is_padded):
    width = 8 * num_heads
    layer = nn.TransformerEncoderLayer(width, num_heads, 13, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    hidden, names = torch.randn(2, 7, width), []
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 5:] = True
    more = {"src_key_padding_mask": padding} if is_padded else {}
    for grad_mode in (torch.inference_mode, torch.no_grad):
        names.clear()
        with grad_mode():
            stock = model(hidden, **more)
            with capture(model, lambda c: names.append((c.site.name, c.mask().visible()))):
                watched = model(hidden, **more)
        assert [name for name, _ in names] == ["layers.0.self_attn", "layers.1.self_attn"]
        # past the padding the fast path writes zeros, so only real tokens can be compared
        real = ~padding if is_padded else torch.ones_like(padding)
        torch.testing.assert_close(watched[real], stock[real], atol=1e-6, rtol=0)
        for _, visible in names:
            assert torch.equal(visible, real[:, None, None]) if is_padded else visible is None
    assert_put_back(model)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("spans_backward", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_case_a10_checkpointing(reentrant, spans_backward):
    gradients = {}
    for is_watched in (False, True):
        model = HOSTS["gpt2"].build(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0).train()
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        names, ids = [], tokens()["input_ids"]
        sites = find_attention(model) if is_watched else []
        if is_watched and spans_backward:
            with capture(model, lambda c, names=names: names.append(c.site.name), sites=sites):
                model(ids, labels=ids, use_cache=False).loss.backward()
        elif is_watched:
            with capture(model, lambda c, names=names: names.append(c.site.name), sites=sites):
                loss = model(ids, labels=ids, use_cache=False).loss
            loss.backward()
        else:
            model(ids, labels=ids, use_cache=False).loss.backward()
        assert names == [site.name for site in sites]
        gradients[is_watched] = [p.grad for p in model.parameters()]
    for stock, watched in zip(gradients[False], gradients[True], strict=True):
        assert torch.equal(stock, watched)


def live_tensors() -> Counter[str]:
    while gc.collect():  # what one round frees may hold what only the next one finds
        pass
    tensors = (thing for thing in gc.get_objects() if issubclass(type(thing), Tensor))
    return Counter(f"{tensor.dtype} {list(tensor.shape)}" for tensor in tensors)


@pytest.mark.parametrize("name", ["gpt2", "timm_vit", "swin", "torch_encoder"])
def test_case_a11_nothing_is_kept(name):
    model, batch = HOSTS[name].build().train(), HOSTS[name].batch()
    largest, counts, last = [], {}, []

    def keep_a_number(call):
        largest.append(float(call.query.norm()))
        last[:] = [weakref.ref(call), weakref.ref(call.query)]

    with torch.no_grad(), capture(model, keep_a_number):
        for step in range(50):
            run(model, batch)
            assert [reference() for reference in last] == [None, None]
            if step in (2, 49):
                counts[step] = live_tensors()
    assert counts[2] == counts[49]
    assert len(largest) == 50 * HOSTS[name].num_sites


@pytest.mark.parametrize("name", ["gpt2", "llama", "timm_vit", "swin", "torch_encoder"])
def test_case_a11_everything_is_put_back_when_the_body_or_the_callback_raises(name):
    model, batch = HOSTS[name].build(), HOSTS[name].batch()

    def fail(call):
        raise RuntimeError("from the callback")

    with pytest.raises(RuntimeError, match="from the callback"), capture(model, fail):
        run(model, batch)
    assert_put_back(model)
    with pytest.raises(RuntimeError, match="from the body"), capture(model, print):
        raise RuntimeError("from the body")
    assert_put_back(model)


def test_a_forward_that_raises_leaves_no_mode_behind():
    model, calls = HOSTS["timm_vit"].build(), []
    with capture(model, calls.append):
        with pytest.raises(RuntimeError):
            model.blocks[0].attn(torch.randn(2, 3, 7))
        assert torch.overrides._get_current_function_mode_stack() == []
        run(model, HOSTS["timm_vit"].batch())
    assert len(calls) == 2


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "gemma3", "qwen3"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.filterwarnings("ignore")
def test_generation_with_left_padding(name, implementation, cache):
    model = HOSTS[name].build(attn_implementation=implementation)
    ids = tokens()["input_ids"]
    padding = torch.ones_like(ids)
    padding[0, :4] = 0
    more = {
        "attention_mask": padding,
        "max_new_tokens": 4,
        "do_sample": False,
        "min_new_tokens": 4,
    }
    if cache == "static":
        more |= {"cache_implementation": "static", "disable_compile": True}
    stock, watched = model.generate(ids, **more), []
    calls = assert_reproduces(model, lambda: watched.append(model.generate(ids, **more)))
    assert torch.equal(stock, watched[0])
    first = [call for call in calls if call.site.layer_idx == 0]
    assert [call.query.shape[2] for call in first] == [11, 1, 1, 1]
    assert [call.call_idx for call in first] == [0, 1, 2, 3]
    assert not first[0].mask().visible()[0, 0, -1, :4].any()


@pytest.mark.parametrize("batch_first", [True, False])
def test_case_a03_masks_of_torch_attention_are_turned_over(batch_first):
    host = nn.MultiheadAttention(32, 4, batch_first=batch_first).eval()
    hidden, keys = torch.randn(2, 5, 32), torch.randn(2, 7, 32)
    future = torch.ones(5, 7).triu(1).bool()
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[0, 6:] = True
    bias = torch.randn(2 * 4, 5, 7)
    for masks in (
        {"attn_mask": future},
        {"attn_mask": bias},
        {"attn_mask": future, "key_padding_mask": padding},
        {"attn_mask": bias, "key_padding_mask": torch.randn(2, 7)},
        {"attn_mask": future, "is_causal": True, "need_weights": False},
    ):
        states = (
            [hidden, keys, keys]
            if batch_first
            else [s.transpose(0, 1) for s in (hidden, keys, keys)]
        )
        calls = []
        with torch.no_grad(), capture(host, calls.append):
            output = host(*states, **masks)[0]
        plain = host.out_proj(plain_output(calls[0]))
        plain = plain if batch_first else plain.transpose(0, 1)
        torch.testing.assert_close(plain, output, atol=1e-6, rtol=0)
        assert calls[0].hidden_states.shape == (2, 5, 32)
    assert calls[0].attn_mask[0, 0, 1].tolist() == [True, True] + 5 * [False]

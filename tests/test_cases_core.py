"""Public bug reports as acceptance tests: masks, scales, caches and kernels of the core."""

import copy

import pytest
import torch
import torch.nn.functional as F

import levelhead as lh
from cases import all_terms, full_house, inner_terms
from levelhead.kernels import attention_backend
from levelhead.stages import softmax as softmax_stage

E, H, D = 16, 2, 8
EVERY = [*inner_terms(), full_house().split(" + ", 1)[1]]


def inner(variant, dtype=torch.float32, **options):
    options = {"embed_dim": E, "num_heads": H, "head_dim": D, "dtype": dtype} | options
    attention = lh.InnerAttention(variant, **options).eval()
    if attention.weights is not None:
        attention.weights.set_state("alpha_mean", 0.4)
    return attention


def inputs(dtype=torch.float32, tokens=6, batch=2):
    qkv = [torch.randn(batch, H, tokens, D, dtype=dtype, requires_grad=True) for _ in range(3)]
    return [*qkv, torch.randn(batch, tokens, E, dtype=dtype)]


def backends(attention, monkeypatch):
    """Yield every way the library can run an attention."""
    yield "fused", attention
    yield "plain", lambda *a, **k: lh.reference_attention(attention, *a, **k).attn_output
    with monkeypatch.context() as patch:
        patch.setattr(softmax_stage, "find_lse_kernel", lambda *_: None)
        yield "extra key", attention
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        yield "math kernel", attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", EVERY)
def test_case_a01_fully_masked_rows(variant, dtype, monkeypatch):
    """Zeros without NaN, for a boolean row of False and for a float row of finite minima."""
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    mask[1, :, 3] = False
    lowest = torch.zeros(2, 1, 6, 6, dtype=dtype)
    lowest[1, :, 3] = torch.finfo(dtype).min
    attention = inner(variant, dtype)
    for call in ({"attn_mask": mask}, {"attn_bias": lowest}):
        for _, attend in backends(attention, monkeypatch):
            arguments = inputs(dtype)
            output = attend(*arguments, **call)
            output.float().square().sum().backward()
            assert output.isfinite().all()
            assert (output[1, :, 3] == 0).all()
            assert (output[0].abs().sum(-1) > 0).all()
            for tensor in arguments[:3]:
                assert tensor.grad.isfinite().all()
            assert (arguments[0].grad[1, :, 3] == 0).all()


@pytest.mark.parametrize("scale", [None, 0.125, 1.0, 0.31])
@pytest.mark.parametrize("variant", EVERY)
def test_case_a02_every_back_end_uses_the_same_scale(variant, scale, monkeypatch):
    options = {"head_dim": 64, "num_heads": 2, "embed_dim": E}
    attention = inner(variant, torch.float64, scale=scale, **options)
    query, key, value = (torch.randn(1, 2, 7, 64, dtype=torch.float64) for _ in range(3))
    hidden_states = torch.randn(1, 7, E, dtype=torch.float64)
    found = [
        attend(query, key, value, hidden_states) for _, attend in backends(attention, monkeypatch)
    ]
    for other in found[1:]:
        torch.testing.assert_close(found[0], other)
    called = inner(variant, torch.float64, scale=99.0, **options)
    called.load_state_dict(attention.state_dict())
    wanted = 64**-0.5 if scale is None else scale
    torch.testing.assert_close(called(query, key, value, hidden_states, scale=wanted), found[0])
    assert f"scale={attention.norm.score_scale(wanted):.6g}" in repr(attention)
    if scale is None and variant == "softmax":
        torch.testing.assert_close(found[0], F.scaled_dot_product_attention(query, key, value))


def test_case_a03_true_means_may_attend():
    """The inverted mask of the report looks at the future only; the right one never does."""
    attention = inner("softmax")
    ignore = torch.ones(5, 5, dtype=torch.bool).triu(1)
    query, key, value = (tensor.detach() for tensor in inputs(tokens=5)[:3])

    def moved(mask):
        before = attention(query, key, value, attn_mask=mask)
        changed = value.clone()
        changed[:, :, 4] += 1
        return (attention(query, key, changed, attn_mask=mask) - before).abs().sum((0, 1, 3))

    assert (moved(~ignore)[:4] == 0).all()
    assert (moved(ignore)[:4] > 0).all()
    torch.testing.assert_close(
        attention(query, key, value, attn_mask=~ignore),
        attention(query, key, value, is_causal=True),
    )


@pytest.mark.parametrize("variant", EVERY)
def test_case_a04_chunks_with_a_cache_equal_the_full_pass(variant):
    attention = inner(variant)
    arguments = [tensor.detach() for tensor in inputs(tokens=10)]
    query, key, value, hidden_states = arguments
    full = attention(*arguments, is_causal=True)
    chunks = [
        attention(
            query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop],
            hidden_states[:, start:stop], is_causal=True,
        )
        for start, stop in ((0, 6), (6, 9), (9, 10))
    ]  # fmt: skip
    torch.testing.assert_close(torch.cat(chunks, 2), full, atol=1e-5, rtol=1e-5)
    top_left = F.scaled_dot_product_attention(
        query[:, :, 6:9], key[:, :, :9], value[:, :, :9], is_causal=True
    )
    assert not torch.allclose(
        top_left, F.scaled_dot_product_attention(query, key, value, is_causal=True)[:, :, 6:9]
    )
    with pytest.raises(ValueError, match="queries may not outnumber keys"):
        attention(query, key[:, :, :4], value[:, :, :4], hidden_states, is_causal=True)


def test_case_a14_sink_by_rescaling_equals_the_appended_column(monkeypatch):
    sink_scores = torch.tensor([-2.0, 0.0, 3.0, 30.0])
    for dtype, atol, grad_atol in ((torch.float64, 1e-12, 1e-10), (torch.float32, 1e-6, 1e-5)):
        attention = inner("sink", dtype, num_heads=4)
        with torch.no_grad():
            attention.normaliser.score.copy_(sink_scores)
        leaves = [torch.randn(2, 4, 7, D, dtype=dtype, requires_grad=True) for _ in range(3)]
        leaves.append(attention.normaliser.score)
        direction = torch.randn(2, 4, 7, D, dtype=dtype)
        query, key, value, score = leaves
        column = score.view(1, 4, 1, 1).expand(2, 4, 7, 1)
        scores = (query @ key.mT * D**-0.5).masked_fill(~lh.causal_mask(7, 7), -torch.inf)
        expected = torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ value
        expected_grads = torch.autograd.grad((expected * direction).sum(), leaves)
        for name, attend in backends(attention, monkeypatch):
            output = attend(query, key, value, is_causal=True)
            torch.testing.assert_close(output, expected, atol=atol, rtol=0, msg=name)
            grads = torch.autograd.grad((output * direction).sum(), leaves)
            for found, wanted in zip(grads, expected_grads, strict=True):
                torch.testing.assert_close(found, wanted, atol=grad_atol, rtol=1e-4, msg=name)


def test_case_a14_the_sink_gradient_agrees_with_finite_differences():
    query, key, value = (torch.randn(1, 4, 5, D, dtype=torch.float64) for _ in range(3))
    sink = torch.tensor([-2.0, 0.0, 3.0, 30.0], dtype=torch.float64, requires_grad=True)

    def attend(sink):
        return softmax_stage.sink_attention(query, key, value, sink, None, True, 0.3)

    assert torch.autograd.gradcheck(attend, (sink,))


@pytest.mark.compile
@pytest.mark.parametrize("tokens", [128, 257])
@pytest.mark.parametrize("variant", ["affine", "qknorm_hs", "sink"])
def test_case_a15_learned_numbers_per_head_have_gradients_eager_and_compiled(variant, tokens):
    torch.compiler.reset()
    attention = lh.track_steps(inner(variant, torch.float64).train())
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    arguments = [tensor.detach() for tensor in inputs(torch.float64, tokens, batch=1)]
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    parameters = list(attention.parameters())
    grads = []
    for attend in (
        attention,
        compiled,
        lambda *a, **k: lh.reference_attention(attention, *a, **k).attn_output,
    ):
        attention.load_state_dict(copy.deepcopy(attention.state_dict()))
        if attention.weights is not None:
            attention.weights.set_state("alpha_mean", 0.4)
        output = attend(*arguments, is_causal=True)
        grads.append(torch.autograd.grad(output.square().sum(), parameters))
    for found in grads[1:]:
        torch.testing.assert_close(found, grads[0], atol=1e-8, rtol=1e-6)


def test_case_a16_grouped_heads_equal_expanded_ones_and_the_back_end_has_a_name():
    query = torch.randn(1, 8, 67, 320)
    key, value = torch.randn(1, 2, 67, 320), torch.randn(1, 2, 67, 320)
    for variant in all_terms():
        if variant in ("spectral", "sigma_reparam"):
            continue
        attention = inner(variant, num_heads=8, num_kv_heads=2, head_dim=320)
        expanded = inner(variant, num_heads=8, num_kv_heads=8, head_dim=320)
        expanded.load_state_dict(attention.state_dict())
        hidden_states = torch.randn(1, 67, E)
        torch.testing.assert_close(
            attention(query, key, value, hidden_states, is_causal=True),
            expanded(
                query, key.repeat_interleave(4, 1), value.repeat_interleave(4, 1),
                hidden_states, is_causal=True,
            ),
            atol=1e-5, rtol=1e-5,
        )  # fmt: skip
    assert attention_backend(query, key, value, is_causal=True) == "flash"
    assert attention_backend(query, key, value[..., :64]) == "math"


def test_case_a16_a_path_that_builds_the_matrix_is_announced():
    attention = inner("softmax")
    query, key = torch.randn(1, H, 1024, D), torch.randn(1, H, 1024, D)
    value = torch.randn(1, H, 1024, 2 * D)
    with pytest.warns(
        UserWarning, match="torch builds the whole matrix of 1024 x 1024 scores per head"
    ):
        attention(query, key, value)
    attention(query, key, value[..., :D])  # fused: silent, since warnings are errors here

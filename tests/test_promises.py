"""What each paper promises, as an assertion; and that the assertion can fail."""

import pytest
import torch
import torch.nn.functional as F

import levelhead as lh
from cases import EMBED_DIM, NUM_KEYS, masks
from levelhead.stages.outputs import equilibrate_rows

H, T, D = 6, NUM_KEYS, 5


def inner(variant, **options):
    options = {
        "embed_dim": EMBED_DIM,
        "num_heads": H,
        "head_dim": D,
        "dtype": torch.float64,
    } | options
    return lh.InnerAttention(variant, **options).eval()


def qkv(scale=1.0, num_tokens=T):
    return [scale * torch.randn(2, H, num_tokens, D, dtype=torch.float64) for _ in range(3)]


def hidden(num_tokens=T):
    return torch.randn(2, num_tokens, EMBED_DIM, dtype=torch.float64)


def scores_of(variant, query, key):
    """The scores of a variant, from its parts."""
    attention = inner(variant)
    query, key = attention.norm.prepare(query, key)
    return attention.norm.score_scale(attention.scale) * query @ key.mT


# QUEST


def test_quest_scores_are_bounded_by_the_query_norm_and_the_bound_is_tight():
    query, key, _ = qkv(7.0)
    bound = query.norm(dim=-1, keepdim=True)
    assert (scores_of("quest", query, key).abs() <= bound * (1 + 1e-12)).all()
    aligned = scores_of("quest", query, 3 * query).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(aligned, bound.squeeze(-1))
    assert (scores_of("softmax", query, key).abs() > bound).any()


@pytest.mark.parametrize("variant", ["quest", "qknorm", "qknorm_hs", "qknorm_ds"])
def test_key_norms_leave_no_trace(variant):
    query, key, value = qkv()
    factors = torch.rand(2, H, T, 1, dtype=torch.float64) * 100 + 0.1
    torch.testing.assert_close(
        inner(variant)(query, factors * key, value), inner(variant)(query, key, value)
    )
    assert not torch.allclose(
        inner("qnorm")(query, factors * key, value), inner("qnorm")(query, key, value)
    )


def test_quest_uses_no_other_scale_whatever_the_host_has():
    query, key, value = qkv()
    expected = F.scaled_dot_product_attention(query, F.normalize(key, dim=-1), value, scale=1.0)
    for scale in (None, 1.0, 17.0):
        torch.testing.assert_close(inner("quest", scale=scale)(query, key, value), expected)


def test_query_and_key_norms_bound_scores_by_one_and_their_learned_scales_start_at_sqrt_d():
    query, key, value = qkv(50.0)
    assert scores_of("qknorm", query, key).abs().max() <= 1 + 1e-12
    cosine = F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).mT
    for variant in ("qknorm_hs", "qknorm_ds"):
        torch.testing.assert_close(scores_of(variant, query, key), D**0.5 * cosine)
    torch.testing.assert_close(
        inner("qknorm_hs")(query, key, value), inner("qknorm_ds")(query, key, value)
    )


def test_dimension_scales_equal_rms_norm_with_gain_one():
    query, key, value = qkv()
    query_rms, key_rms = (F.rms_norm(rows, (D,), eps=1e-12) for rows in (query, key))
    expected = F.scaled_dot_product_attention(query_rms, key_rms, value)
    torch.testing.assert_close(inner("qknorm_ds")(query, key, value), expected)


@pytest.mark.parametrize("variant", ["quest", "qnorm", "qknorm", "qknorm_hs", "precondition"])
def test_zero_rows_stay_zero_with_zero_gradient(variant):
    query, key, value = qkv()
    for tensor in (query, key, value):
        tensor[:, :, 2] = 0
        tensor.requires_grad_()
    if variant == "precondition":
        value = torch.zeros_like(value, requires_grad=True)
    output = inner(variant)(query, key, value)
    output.sum().backward()
    assert output.isfinite().all()
    for tensor in (query, key, value):
        assert tensor.grad.isfinite().all()
    if variant in ("quest", "qknorm", "qknorm_hs"):
        assert (key.grad[:, :, 2] == 0).all()
    if variant == "precondition":
        assert (output == 0).all()
        assert (value.grad == 0).all()


# Affine


def affine_rows(visibility, variant="affine", mean=0.4, num_heads=H):
    attention = inner(variant, num_heads=num_heads)
    attention.weights.set_state("alpha_mean", mean)
    query, key, value = (t[:, :num_heads] for t in qkv())
    return lh.reference_attention(attention, query, key, value, hidden(), **visibility)


@pytest.mark.parametrize("visibility", masks(T, T))
def test_affine_rows_sum_to_the_running_mean_and_never_reach_a_masked_key(visibility):
    call = masks(T, T)[visibility]
    weights = affine_rows(call).attn_weights
    plain = lh.reference_attention(inner("softmax"), *qkv(), **call).attn_weights
    visible = plain > 0
    assert (weights.masked_select(~visible) == 0).all()
    sums = weights.sum(dim=-1)
    expected = torch.where(visible.any(-1), 0.4, 0.0).to(sums)
    torch.testing.assert_close(sums, expected)


def test_counting_all_keys_varies_the_row_sum_under_a_causal_mask():
    sums = affine_rows({"is_causal": True}, "affine(count='keys')").attn_weights.sum(-1)
    assert (sums[..., 0] - 0.4).abs().max() > 1e-3
    torch.testing.assert_close(sums[..., -1], torch.full_like(sums[..., -1], 0.4))


def test_affine_weights_may_be_negative_with_the_worked_example():
    from levelhead.stages.weights import affine_weights

    weights = affine_weights(
        torch.tensor([[[[0.1, 0.9]]]]), torch.full((1, 1, 1, 1), 0.8),
        torch.full((1, 1, 1), 0.4), None,
    )  # fmt: skip
    torch.testing.assert_close(weights, torch.tensor([[[[-0.12, 0.52]]]]))


def test_affine_with_one_visible_key_is_the_mean_and_gives_alpha_no_gradient():
    attention = inner("affine")
    attention.weights.set_state("alpha_mean", 0.3)
    query, key, value = qkv(num_tokens=1)
    output = attention(query, key, value, hidden(1))
    torch.testing.assert_close(output, 0.3 * value)
    output.sum().backward()
    assert attention.weights.alpha_proj.weight.grad.abs().max() < 1e-12


def test_affine_preserving_start_is_half_of_softmax():
    attention = inner("affine")
    torch.nn.init.zeros_(attention.weights.alpha_proj.weight)
    attention.weights.set_state("alpha_mean", 0.5)
    inputs = qkv()
    torch.testing.assert_close(
        2 * attention(*inputs, hidden(), is_causal=True), inner("softmax")(*inputs, is_causal=True)
    )


def test_affine_counting_all_keys_is_not_the_same_when_decoding():
    """The stated reason for the default: only visible counts survive a cache."""
    layer = lh.Attention(30, 6, variant="affine(count='keys')").eval()
    layer.inner.weights.set_state("alpha_mean", 0.9)
    hidden_states = torch.randn(1, 7, 30)
    full, prefix = (layer(x, is_causal=True) for x in (hidden_states, hidden_states[:, :4]))
    assert (full[:, :4] - prefix).abs().max() > 1e-3


@pytest.mark.parametrize(("phi", "middle"), [("linear_clipping", 0.5), ("sigmoid", 0.5)])
def test_phi_maps_into_the_unit_interval(phi, middle):
    from levelhead.parts.weights import PHI

    x = torch.linspace(-20, 20, 41)
    values = PHI[phi](x)
    assert values.min() >= 0
    assert values.max() <= 1
    assert values[20] == middle
    assert (values.diff() >= 0).all()
    if phi == "linear_clipping":
        torch.testing.assert_close(PHI[phi](torch.tensor([1.0, -7.0])), torch.tensor([0.6, 0.0]))


# Preconditioning


def test_precondition_gives_unit_rows():
    output = inner("precondition")(*qkv(3.0), is_causal=True)
    torch.testing.assert_close(output.norm(dim=-1), torch.ones(2, H, T, dtype=torch.float64))


def test_row_equilibration_stays_within_van_der_sluis_of_any_row_scaling():
    """kappa(C A) <= sqrt(T) * min over diagonal scalings, tried against random scalings."""
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(D, D, generator=generator, dtype=torch.float64)
        rows *= torch.randn(D, 1, generator=generator, dtype=torch.float64).mul(2).exp()
        kappa = torch.linalg.cond(equilibrate_rows(rows[None, None])[0, 0])
        scalings = torch.randn(200, D, 1, generator=generator, dtype=torch.float64).exp()
        best = torch.linalg.cond(scalings * equilibrate_rows(rows[None, None])[0, 0]).min()
        assert kappa <= D**0.5 * best


def test_equilibration_helps_where_row_norms_vary_and_can_worsen_a_matrix():
    torch.manual_seed(0)
    rows = torch.randn(64, 16, dtype=torch.float64)
    varied = rows * torch.randn(64, 1, dtype=torch.float64).mul(2).exp()
    before, after = (
        torch.linalg.cond(m) for m in (varied, equilibrate_rows(varied[None, None])[0, 0])
    )
    assert after < before / 10
    tall = torch.cat([torch.eye(2), 1e-3 * torch.tensor([[1.0, 0.9]] * 30)]).double()
    assert torch.linalg.cond(equilibrate_rows(tall[None, None])[0, 0]) > torch.linalg.cond(tall)


# Sinks


@pytest.mark.parametrize("visibility", masks(T, T))
def test_sink_equals_an_appended_column(visibility):
    """The definition: append a column of scores, take the softmax, drop the column."""
    call = masks(T, T)[visibility]
    attention = inner("sink")
    torch.nn.init.normal_(attention.normaliser.score)
    query, key, value = qkv()
    scores = query @ key.mT * D**-0.5
    bias = call.get("attn_bias", torch.zeros(()))
    scores = scores + bias.masked_fill(bias <= torch.finfo(bias.dtype).min / 2, -torch.inf)
    allowed = torch.ones(T, T, dtype=torch.bool)
    allowed = allowed.tril() if call.get("is_causal") else allowed
    scores = scores.masked_fill(~(allowed & call.get("attn_mask", allowed)), -torch.inf)
    column = attention.normaliser.score.view(1, H, 1, 1).expand(2, H, T, 1)
    expected = torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ value
    torch.testing.assert_close(attention(query, key, value, **call), expected)


def test_a_low_sink_is_softmax_and_off_by_one_is_a_sink_at_zero():
    inputs = qkv()
    torch.testing.assert_close(inner("sink(start=-1e4)")(*inputs), inner("softmax")(*inputs))
    torch.testing.assert_close(inner("sink(start=0)")(*inputs), inner("off_by_one")(*inputs))


@pytest.mark.parametrize("variant", ["sink", "off_by_one"])
def test_the_extra_key_form_gives_the_same_numbers(variant, monkeypatch):
    from levelhead.stages import softmax as stage

    attention = inner(variant, num_heads=H)
    for visibility, call in masks(T, T).items():
        query, key, value = qkv()
        inputs = [query, key[:, :3], value[:, :3]]
        private = attention(*inputs, **call)
        with monkeypatch.context() as patch:
            patch.setattr(stage, "find_lse_kernel", lambda *_: None)
            public = attention(*inputs, **call)
        torch.testing.assert_close(public, private, msg=lambda m, v=visibility: f"{v}: {m}")


# Gate


@pytest.mark.parametrize("granularity", ["elementwise", "headwise"])
def test_gate_with_a_large_bias_is_softmax_and_with_zero_weight_is_half(granularity):
    attention = inner(f"gate(granularity='{granularity}', bias=True)")
    inputs, hidden_states = qkv(), hidden()
    plain = inner("softmax")(*inputs)
    torch.nn.init.zeros_(attention.gate.gate_proj.weight)
    torch.nn.init.zeros_(attention.gate.gate_proj.bias)
    torch.testing.assert_close(attention(*inputs, hidden_states), plain / 2)
    torch.nn.init.constant_(attention.gate.gate_proj.bias, 50.0)
    torch.testing.assert_close(attention(*inputs, hidden_states), plain)


# Soft cap


def test_soft_cap_bounds_scores_and_a_high_cap_is_softmax():
    from levelhead.stages.scores import cap_scores

    scores = 100 * torch.randn(1000, dtype=torch.float64)
    assert cap_scores(scores, 3.0).abs().max() <= 3.0
    inputs = qkv()
    plain = inner("softmax")(*inputs)
    torch.testing.assert_close(inner("soft_cap(cap=1e6)")(*inputs), plain, atol=1e-9, rtol=1e-9)
    assert not torch.allclose(inner("soft_cap(cap=0.5)")(*inputs), plain)


def test_soft_cap_in_blocks_equals_one_block(monkeypatch):
    from levelhead.stages import chunks

    attention = inner("soft_cap(cap=2.0)")
    for call in masks(T, T).values():
        inputs = [tensor.requires_grad_() for tensor in qkv()]
        whole = attention(*inputs, **call)
        whole_grads = torch.autograd.grad(whole.square().sum(), inputs)
        with monkeypatch.context() as patch:
            patch.setattr(chunks.map_query_blocks, "__defaults__", (3,))
            blocks = attention(*inputs, **call)
            block_grads = torch.autograd.grad(blocks.square().sum(), inputs)
        torch.testing.assert_close(blocks, whole)
        torch.testing.assert_close(block_grads, whole_grads)


# Spectral conditioning


@pytest.mark.parametrize("shape", [(13, 5), (5, 13), (7, 7)])
def test_svd_form_has_the_promised_condition_number(shape):
    from levelhead.stages.projections import spectral_correction

    weight = torch.randn(shape, dtype=torch.float64)
    sigma = torch.linalg.svdvals(weight)
    kappa = torch.linalg.cond(weight + spectral_correction(weight))
    torch.testing.assert_close(kappa, 2 * sigma[0] / (sigma[0] + sigma[-1]))
    assert kappa <= 2
    assert torch.linalg.cond(weight) > 2


@pytest.mark.parametrize("layout", ["fused", "per_head"])
@pytest.mark.parametrize("num_kv_heads", [6, 2])
@pytest.mark.parametrize("embed_dim", [30, 20, 37])
def test_identity_form_adds_the_rectangular_identity_to_the_weights(
    layout, num_kv_heads, embed_dim
):
    """Against the same layer with the identity written into its weights."""
    options = {"num_kv_heads": num_kv_heads, "head_dim": D, "dtype": torch.float64}
    layer = lh.Attention(
        embed_dim, 6, variant=f"spectral(strength=2.5, layout='{layout}')", **options
    )
    plain = lh.Attention(embed_dim, 6, **options)
    plain.load_state_dict(layer.state_dict())
    for linear, heads in (
        (plain.q_proj, 6),
        (plain.k_proj, num_kv_heads),
        (plain.v_proj, num_kv_heads),
    ):
        identity = (
            torch.eye(heads * D, embed_dim)
            if layout == "fused"
            else torch.eye(D, embed_dim).repeat(heads, 1)
        )
        linear.weight.data += 2.5 * identity
    hidden_states = torch.randn(2, 7, embed_dim, dtype=torch.float64)
    torch.testing.assert_close(layer(hidden_states), plain(hidden_states))


def test_spectral_at_strength_zero_is_softmax_and_the_default_saturates_layer_normed_input():
    """lambda = 10 gives self-scores of lambda^2 sqrt(D) on average: one-hot on itself."""
    hidden_states = F.layer_norm(torch.randn(1, 64, 192), (192,))
    neutral, plain = (lh.Attention(192, 3, variant=v) for v in ("spectral(strength=0)", "softmax"))
    plain.load_state_dict(neutral.state_dict())
    torch.testing.assert_close(neutral(hidden_states), plain(hidden_states))
    _, weights = lh.Attention(192, 3, variant="spectral")(hidden_states, need_weights=True)
    assert weights.diagonal(dim1=-2, dim2=-1).mean() > 0.999
    _, weights = lh.Attention(192, 3, variant="spectral(strength=1)")(
        hidden_states, need_weights=True
    )
    assert 0.85 < weights.diagonal(dim1=-2, dim2=-1).mean() < 0.95


def test_svd_form_starts_from_the_weights_it_is_given():
    layer = lh.Attention(12, 3, variant="spectral(form='svd')", dtype=torch.float64)
    effective = layer.q_proj.weight + layer.projections.q_correction
    assert torch.linalg.cond(effective) <= 2
    torch.nn.init.normal_(layer.q_proj.weight)
    assert torch.linalg.cond(layer.q_proj.weight + layer.projections.q_correction) > 2
    layer.derive()
    assert torch.linalg.cond(layer.q_proj.weight + layer.projections.q_correction) <= 2


# Sigma reparametrisation


def test_sigma_reparam_starts_at_the_plain_function_and_its_norm_is_sigma():
    layer = lh.Attention(12, 3, variant="sigma_reparam", dtype=torch.float64)
    plain = lh.Attention(12, 3, dtype=torch.float64)
    plain.load_state_dict(layer.state_dict(), strict=False)
    hidden_states = torch.randn(2, 5, 12, dtype=torch.float64)
    torch.testing.assert_close(layer.eval()(hidden_states), plain(hidden_states))
    layer.projections.sigma["q"].data.fill_(0.125)
    ratio = layer.projections.ratio("q", layer.q_proj.weight)
    norm = torch.linalg.matrix_norm(ratio * layer.q_proj.weight, 2)
    torch.testing.assert_close(norm, torch.tensor(0.125, dtype=torch.float64))


def test_sigma_reparam_follows_a_weight_that_moves():
    layer = lh.track_steps(lh.Attention(12, 3, variant="sigma_reparam", dtype=torch.float64))
    torch.nn.init.normal_(layer.q_proj.weight)
    for _ in range(300):
        layer(torch.randn(1, 2, 12, dtype=torch.float64))
    ratio = layer.eval().projections.ratio("q", layer.q_proj.weight)
    norm = torch.linalg.matrix_norm(ratio * layer.q_proj.weight, 2)
    torch.testing.assert_close(norm, layer.projections.sigma["q"][0], rtol=1e-6, atol=0)


def test_spectral_and_sigma_reparam_leave_stock_keys_alone():
    stock = set(lh.Attention(12, 3).state_dict())
    assert set(lh.Attention(12, 3, variant="spectral").state_dict()) == stock
    assert stock < set(lh.Attention(12, 3, variant="sigma_reparam").state_dict())

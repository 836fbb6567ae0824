"""Initialising whole models: every layout, every dtype, every way a model comes to be."""

import copy
import math
from dataclasses import astuple
from functools import partial

import pytest
import torch
import transformers
from torch import nn

from hosts import HOSTS, run
from levelhead.attention import Attention
from levelhead.convert import convert, restore
from levelhead.init.blocks import split_heads
from levelhead.init.table import INITIALIZERS, initializers
from levelhead.initialize import initialize_
from levelhead.sites.find import find_attention
from levelhead.verify_batch import tensors_in

PER_SITE = [name for name, info in INITIALIZERS.items() if not info.whole_model]
FRESH = [name for name in PER_SITE if name != "default"]


def seeded(seed=3):
    return torch.Generator().manual_seed(seed)


def matrices(model):
    return [site.read() for site in find_attention(model)]


ALL = ("q", "k", "v", "o")


def assert_same(first, second, names=ALL):
    for one, other in zip(first, second, strict=True):
        for name in names:
            a, b = getattr(one, f"{name}_weight"), getattr(other, f"{name}_weight")
            assert (a is None) == (b is None), name
            assert a is None or torch.equal(a, b), name


def worst_residual(weight, num_heads):
    blocks = split_heads(weight.double(), num_heads)
    return float((blocks.mT @ blocks - torch.eye(blocks.shape[2])).abs().max())


# Layouts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HOSTS)
def test_conditioned_keeps_its_promise_and_touches_nothing_else_on_every_host(name):
    model = HOSTS[name].build()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    others = [(site.read().o_weight, site.read().q_bias) for site in find_attention(model)]
    report = initialize_(model, "conditioned", generator=seeded())
    sites = find_attention(model)
    touched = {id(p) for site in sites for p in site.parameters()}
    for key, value in model.state_dict(keep_vars=True).items():
        assert id(value) in touched or torch.equal(value, before[key]), key
    for site, (o_weight, q_bias) in zip(sites, others, strict=True):
        weights = site.read()
        assert worst_residual(weights.q_weight, site.num_heads) < 1e-6
        assert worst_residual(weights.k_weight, site.num_kv_heads) < 1e-6
        assert torch.equal(weights.v_weight, torch.eye(*weights.v_weight.shape))
        assert o_weight is None or torch.equal(weights.o_weight, o_weight)
        assert q_bias is None or torch.equal(weights.q_bias, q_bias)
    assert {row.site for row in report.initialised} == {site.name for site in sites}
    assert max(row.stored.kappa_max for row in report.initialised) < 1 + 1e-6
    output = run(model, HOSTS[name].batch())
    assert all(t.isfinite().all() for t in torch.utils._pytree.tree_leaves(output)
               if isinstance(t, torch.Tensor))  # fmt: skip


def layouts(width=56, heads=4):
    """One self-attention in every way of storing it."""
    small = {"vocab_size": 11, "num_hidden_layers": 1, "hidden_size": width,
             "num_attention_heads": heads, "intermediate_size": 13}  # fmt: skip
    gpt2 = transformers.GPT2Config(n_layer=1, n_embd=width, n_head=heads, vocab_size=11,
                                   bos_token_id=1, eos_token_id=2)  # fmt: skip
    timm = pytest.importorskip("timm")
    return {
        "levelhead, separate": Attention(width, heads),
        "torch, one tensor of thirds": nn.MultiheadAttention(width, heads),
        "timm, fused": timm.layers.attention.Attention(width, heads),
        "transformers, separate": transformers.BertModel(
            transformers.BertConfig(**small), add_pooling_layer=False
        ),
        "transformers, transposed Conv1D": transformers.GPT2Model(gpt2),
        "transformers, interleaved by head": transformers.GPTNeoXModel(
            transformers.GPTNeoXConfig(**small)
        ),
    }


@pytest.mark.parametrize("initializer", FRESH)
def test_case_a26_one_seed_gives_the_same_matrices_in_every_layout(initializer):
    found = {}
    for name, model in layouts().items():
        initialize_(model, initializer, generator=seeded())
        found[name] = matrices(model)
    first = found.pop("levelhead, separate")
    for other in found.values():
        assert_same(first, other, INITIALIZERS[initializer].matrices)


@pytest.mark.parametrize("initializer", ["xavier", "orthogonal", "mimetic"])
def test_case_a26_the_three_parts_of_a_fused_weight_share_one_scale(initializer):
    model = layouts(width=88)["torch, one tensor of thirds"]
    initialize_(model, initializer, generator=seeded())
    weights = matrices(model)[0]
    if initializer == "xavier":
        std = (1 / 88) ** 0.5
        for weight in (weights.q_weight, weights.k_weight, weights.v_weight):
            assert abs(float(weight.std()) - std) < 4 * std / (2 * weight.numel()) ** 0.5
    assert float(weights.q_weight.norm() / weights.k_weight.norm()) == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize("initializer", FRESH)
def test_case_a26_grouped_heads_split_at_their_own_widths(initializer):
    """Phi-3 stores q, k, v fused as 4, 2 and 2 heads; Llama stores them apart."""
    phi, llama = (HOSTS[name].build(hidden_size=56, head_dim=14) for name in ("phi3", "llama"))
    for model in (phi, llama):
        initialize_(model, initializer, generator=seeded())
    assert_same(matrices(phi), matrices(llama), INITIALIZERS[initializer].matrices)
    assert matrices(phi)[0].k_weight.shape == (56, 28)


class LinearTwin(nn.Linear):
    """What a Conv1D computes, stored the other way round."""

    def __init__(self, conv):
        super().__init__(*conv.weight.shape)
        self.weight = nn.Parameter(conv.weight.detach().T.clone())
        self.bias = nn.Parameter(conv.bias.detach().clone())


@pytest.mark.parametrize("initializer", PER_SITE)
def test_case_a27_conv1d_and_linear_twins_give_the_same_logits(initializer):
    conv = HOSTS["gpt2"].build()
    twin = copy.deepcopy(conv)
    for block in twin.transformer.h:
        block.attn.c_attn = LinearTwin(block.attn.c_attn)
        block.attn.c_proj = LinearTwin(block.attn.c_proj)
    reports = [initialize_(model, initializer, generator=seeded()) for model in (conv, twin)]
    assert len({row.site for row in reports[0].matrices}) == 2
    assert reports[0].matrices == reports[1].matrices
    batch = HOSTS["gpt2"].batch()
    torch.testing.assert_close(run(conv, batch).logits, run(twin, batch).logits)


def test_case_a27_a_model_without_attention_is_refused_with_what_was_seen():
    with pytest.raises(ValueError, match="no attention found.*torch.nn.modules.linear.Linear x 1"):
        initialize_(nn.Sequential(nn.Linear(3, 3)))


KINDS = ["swin", "xcit", "davit", "nystromformer", "llama", "t5", "bert", "gpt2"]


@pytest.mark.parametrize("initializer", FRESH)
@pytest.mark.parametrize("name", KINDS)
def test_every_initialiser_keeps_its_promise_on_every_kind_of_attention(name, initializer):
    model = HOSTS[name].build()
    report = initialize_(model, initializer, generator=seeded())
    sites = [site for site in find_attention(model) if site.read().o_weight is not None]
    assert len({row.site for row in report.initialised}) == HOSTS[name].num_sites
    assert len(sites) == HOSTS[name].num_sites
    for site in sites:
        PROMISES[initializer](site, site.read())


def assert_conditioned(site, weights):
    assert worst_residual(weights.q_weight, site.num_heads) < 1e-6
    assert worst_residual(weights.k_weight, site.num_kv_heads) < 1e-6
    assert torch.equal(weights.v_weight, torch.eye(*weights.v_weight.shape))


def assert_orthogonal(site, weights):
    for name in ALL:
        weight = getattr(weights, f"{name}_weight")
        tall = weight if weight.shape[0] >= weight.shape[1] else weight.T
        assert worst_residual(tall, 1) < 1e-6, name


def assert_xavier(site, weights):
    for name in ALL:
        weight = getattr(weights, f"{name}_weight")
        std = (2 / sum(weight.shape)) ** 0.5
        assert abs(float(weight.std()) - std) < 4 * std / (2 * weight.numel()) ** 0.5, name


def assert_mimetic(site, weights):
    """The layer's product of values and outputs, and factors of equal scale in every key head."""
    group = site.num_heads // site.num_kv_heads
    value = split_heads(weights.v_weight, site.num_kv_heads).repeat_interleave(group, dim=0)
    layer = (value @ split_heads(weights.o_weight.T, site.num_heads).mT).sum(0)
    if weights.v_weight.shape[1] >= len(layer):
        std = 0.4 / len(layer) ** 0.5
        off = layer[~torch.eye(len(layer), dtype=torch.bool)]
        assert abs(float(layer.diagonal().mean()) + 0.4) < 4 * 0.4 / len(layer)
        assert abs(float(off.std()) - std) < 4 * std / (2 * off.numel()) ** 0.5
    query = split_heads(weights.q_weight, site.num_heads)[::group]
    key = split_heads(weights.k_weight, site.num_kv_heads)
    torch.testing.assert_close(query.mT @ query, key.mT @ key, atol=1e-5, rtol=0)
    assert float((query * key).sum(2).sum(1).min()) > 0


PROMISES = {
    "conditioned": assert_conditioned,
    "orthogonal": assert_orthogonal,
    "xavier": assert_xavier,
    "mimetic": assert_mimetic,
}


@pytest.mark.parametrize("initializer", FRESH)
@pytest.mark.parametrize("name", ["timm_vit", "gpt2", "phi3", "bert", "torch_encoder", "xcit"])
def test_nothing_else_is_touched_and_a_seed_repeats(name, initializer):
    model = HOSTS[name].build()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    report = initialize_(model, initializer, generator=seeded())
    once = {key: value.clone() for key, value in model.state_dict().items()}
    sites = find_attention(model)
    places = [place for site in sites for place in site.layout.stored().items()]
    named = [(n, p) for n, p in places if p and n[0] in INITIALIZERS[initializer].matrices]
    allowed = {id(p.parameter) for n, p in named if n.endswith("_weight")}
    for key, value in model.state_dict(keep_vars=True).items():
        assert id(value) in allowed or torch.equal(value, before[key]), key
    assert {row.matrix for row in report.initialised} == set(INITIALIZERS[initializer].matrices)
    initialize_(model, initializer, generator=seeded())
    assert all(torch.equal(value, once[key]) for key, value in model.state_dict().items())
    initialize_(model, initializer, generator=seeded(4))
    assert not all(torch.equal(value, once[key]) for key, value in model.state_dict().items())


def test_mimetic_products_are_measured_before_and_after_the_cast():
    model = HOSTS["timm_vit"].build(embed_dim=96, num_heads=3).bfloat16()
    report = initialize_(model, "mimetic", generator=seeded())
    assert {row.product for row in report.products} == {"q k^T", "v o"}
    for row in report.products:
        for before, after in zip(astuple(row.computed), astuple(row.stored), strict=True):
            assert before != after
            assert before == pytest.approx(after, rel=2e-2, abs=1e-3)


def test_fused_value_hands_hidden_states_through_a_model():
    model = HOSTS["torch_encoder"].build()
    report = initialize_(model, "conditioned", generator=seeded())
    weights = matrices(model)[0]
    hidden_states = torch.randn(7, 30)
    assert torch.equal(hidden_states @ weights.v_weight, hidden_states)
    assert report.notes == ()


def test_the_report_says_where_the_value_is_not_the_identity():
    report = initialize_(HOSTS["llama"].build(), "conditioned")
    assert report.notes == (
        "2 attentions: hidden_states @ v_weight keeps 28 of 60 coordinates, "
        "because Hkv D is not E",
    )
    model = HOSTS["torch_encoder"].build()
    for layer in model.layers:
        nn.init.ones_(layer.self_attn.in_proj_bias)
    assert "the value bias is not zero" in initialize_(model, "conditioned").notes[0]


# Precision ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("rows", "columns"), [(96, 96), (64, 192), (192, 64)])
@pytest.mark.parametrize("initializer", FRESH)
def test_case_a25_every_dtype_and_shape(initializer, rows, columns, dtype):
    attention = Attention(rows, 4, head_dim=columns // 4, qkv_bias=True).to(dtype)
    report = initialize_(attention, initializer, generator=seeded())
    assert {weight.dtype for weight in attention.parameters()} == {dtype}
    for row in report.initialised:
        assert row.dtype == str(dtype).removeprefix("torch.")
        assert row.matrix in "vo" or row.computed.kappa_max < torch.inf
    if initializer != "conditioned":
        return
    eps = torch.finfo(dtype).eps
    for row in report.initialised[:2]:
        assert row.computed.orthogonality_residual < 1e-6
        assert row.stored.orthogonality_residual < max(2 * eps, 1e-6)
        assert row.stored.kappa_max < 1 + 48 * eps


def test_case_a25_half_precision_stores_the_rounded_float32_matrix():
    wide, half = HOSTS["gpt2"].build(), HOSTS["gpt2"].build().bfloat16()
    for model in (wide, half):
        report = initialize_(model, "conditioned", generator=seeded())
    assert_same([w.map(torch.Tensor.bfloat16) for w in matrices(wide)], matrices(half))
    row = report.initialised[0]
    assert row.computed.orthogonality_residual < 1e-6 < row.stored.orthogonality_residual


@pytest.mark.parametrize("initializer", FRESH)
def test_idempotent_under_a_seed(initializer):
    model = HOSTS["timm_vit"].build()
    initialize_(model, initializer, generator=seeded())
    once = matrices(model)
    initialize_(model, initializer, generator=seeded())
    assert_same(once, matrices(model))
    initialize_(model, initializer, generator=seeded(4))
    assert not torch.equal(once[0].q_weight, matrices(model)[0].q_weight)


def test_default_touches_nothing():
    model = HOSTS["gpt2"].build()
    before = copy.deepcopy(model.state_dict())
    report = initialize_(model, "default")
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert report.initialised == ()
    assert len(report.matrices) == 8


def test_match_keeps_the_norm_of_each_logical_matrix():
    model = HOSTS["timm_vit"].build()
    report = initialize_(model, "conditioned(gain='match')", generator=seeded())
    for row in report.initialised:
        assert row.stored.frobenius_norm == pytest.approx(row.host.frobenius_norm, rel=1e-6)
        assert row.stored.kappa_max < 1 + 1e-5 < row.host.kappa_max


def test_mimetic_report_holds_the_products():
    model = HOSTS["timm_vit"].build(embed_dim=96, num_heads=3)
    report = initialize_(model, "mimetic", generator=seeded())
    layer = [row for row in report.products if row.product == "v o"]
    assert len(layer) == 2
    std = 0.4 / 96**0.5
    for row in layer:
        assert abs(row.stored.diagonal_mean + 0.4) < 4 * std / 96**0.5
        assert row.stored.off_diagonal_std == pytest.approx(std, rel=4 / (2 * 96 * 95) ** 0.5)
        assert abs(row.host.diagonal_mean) < 0.1


# How models come to be ----------------------------------------------------------------------


def test_case_a22_runs_after_loading_and_survives_another_round(tmp_path):
    HOSTS["gpt2"].build().save_pretrained(tmp_path / "stock")
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "stock")
    initialize_(model, "conditioned", generator=seeded())
    fresh = matrices(model)
    assert worst_residual(fresh[0].q_weight, 5) < 1e-6
    model.init_weights()
    model.tie_weights()
    assert_same(fresh, matrices(model))
    model.save_pretrained(tmp_path / "fresh")
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "fresh")
    assert_same(fresh, matrices(again))


def test_case_a24_meta_is_refused_and_materialised_garbage_is_overwritten():
    with torch.device("meta"):
        attention = Attention(28, 4)
    with pytest.raises(ValueError, match="meta device.*materialise"):
        initialize_(attention, "conditioned")
    attention.to_empty(device="cpu")
    for parameter in attention.parameters():
        nn.init.constant_(parameter, torch.nan)
    with pytest.raises(ValueError, match="must be finite and positive, got a .* of norm nan"):
        initialize_(attention, "conditioned(gain='match')")
    report = initialize_(attention, "conditioned", generator=seeded())
    fresh = Attention(28, 4)
    initialize_(fresh, "conditioned", generator=seeded())
    assert_same(matrices(attention), matrices(fresh), ("q", "k", "v"))
    assert matrices(attention)[0].o_weight.isnan().all()
    assert math.isnan(report.matrices[0].host.kappa_max)


def test_frozen_weights_are_refused_unless_asked_for():
    model = HOSTS["timm_vit"].build()
    model.blocks[1].attn.qkv.weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    words = "q of blocks.1.attn with requires_grad=False; valid: include_frozen=True"
    with pytest.raises(ValueError, match=words):
        initialize_(model, "conditioned")
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    report = initialize_(model, "conditioned", include_frozen=True)
    assert len(report.initialised) == 6
    assert not model.blocks[1].attn.qkv.weight.requires_grad


def test_a_frozen_weight_that_is_not_touched_does_not_matter():
    model = HOSTS["timm_vit"].build()
    model.blocks[0].attn.proj.weight.requires_grad_(False)
    initialize_(model, "conditioned")
    with pytest.raises(ValueError, match="o of blocks.0.attn"):
        initialize_(model, "orthogonal")


def test_only_the_sites_asked_for_are_touched():
    model = HOSTS["gpt2"].build()
    before = matrices(model)
    report = initialize_(model, "conditioned", sites=find_attention(model)[1:])
    after = matrices(model)
    assert_same(before[:1], after[:1])
    assert torch.equal(after[1].v_weight, torch.eye(30))
    assert {row.site for row in report.matrices} == {"transformer.h.1.attn"}
    with pytest.raises(ValueError, match="at least one attention"):
        initialize_(model, "conditioned", sites=[])


def test_tied_attentions_are_initialised_once():
    model = nn.ModuleList(Attention(28, 4) for _ in range(3))
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        getattr(model[2], name).weight = getattr(model[0], name).weight
    generator = seeded()
    report = initialize_(model, "mimetic", generator=generator)
    untied = nn.ModuleList(Attention(28, 4) for _ in range(2))
    initialize_(untied, "mimetic", generator=seeded())
    assert_same(matrices(model)[:2], matrices(untied))
    assert {row.status for row in report.matrices if row.site == "2"} == {"tied to 0"}
    model[2].q_proj.weight = nn.Parameter(torch.zeros(28, 28))
    with pytest.raises(ValueError, match="all of their weights or none, got 2 and 0"):
        initialize_(model, "mimetic")


def test_projections_on_one_weight_are_refused():
    attention = Attention(28, 4)
    attention.k_proj.weight = attention.q_proj.weight
    with pytest.raises(ValueError, match="hold each projection apart"):
        initialize_(attention, "conditioned")


# Weight selection ---------------------------------------------------------------------------


def test_weight_selection_of_a_whole_model():
    student = HOSTS["timm_vit"].build(embed_dim=30, depth=2)
    teacher = HOSTS["timm_vit"].build(embed_dim=48, depth=4)
    head = student.head.weight.detach().clone()
    report = initialize_(student, "weight_selection(layers='uniform')", teacher=teacher)
    rows = torch.linspace(0, 3 * 48 - 1, 90).round().long()
    columns = torch.linspace(0, 47, 30).round().long()
    expected = teacher.blocks[2].attn.qkv.weight[rows][:, columns]
    assert torch.equal(student.blocks[1].attn.qkv.weight, expected)
    assert torch.equal(student.pos_embed, teacher.pos_embed[:, :, columns])
    assert torch.equal(student.head.weight, head)
    assert report.initializer == "weight_selection(layers='uniform')"
    assert report.notes == ("1 attentions: left as the student made it: head.bias, head.weight",)
    assert student(torch.randn(2, 3, 16, 16)).isfinite().all()


def test_weight_selection_takes_a_state_dict_and_casts_once():
    student, teacher = HOSTS["gpt2"].build(n_embd=20).half(), HOSTS["gpt2"].build(n_embd=40)
    initialize_(student, "weight_selection", teacher=teacher.state_dict())
    expected = teacher.transformer.wte.weight[:, ::2].half()
    assert torch.equal(student.transformer.wte.weight, expected)
    assert student.lm_head.weight is student.transformer.wte.weight


# Words --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("initializer", "options", "words"),
    [
        ("kaiming", {}, "unknown initializer 'kaiming'; known: default, conditioned, mimetic"),
        ("mimetic + xavier", {}, "an initializer is one name with options"),
        (
            "conditioned(size=3)",
            {},
            "conditioned takes other options, got size; valid: value, gain",
        ),
        ("conditioned(gain=2)", {"gain": 3}, "each option may be given once, got gain twice"),
        ("weight_selection", {}, "weight_selection needs teacher"),
        ("weight_selection", {"teacher": 3}, "teacher must be a model or its state dict"),
        ("conditioned(value='eye')", {}, "unknown value 'eye'; known: fused, per_head"),
        ("conditioned(gain=true)", {}, "gain must be a positive number or 'match', got gain=True"),
        ("mimetic(qk_noise='much')", {}, "finite numbers, got noise='much', identity=0.7"),
    ],
)
def test_what_does_not_fit_is_refused(initializer, options, words):
    with pytest.raises(ValueError, match=words):
        initialize_(HOSTS["torch_encoder"].build(), initializer, **options)


def test_mimetic_needs_an_output_projection():
    site_without_output = HOSTS["bert"].build().encoder.layer[0].attention.self
    with pytest.raises(ValueError, match="needs an output projection.*valid: conditioned"):
        initialize_(site_without_output, "mimetic")


SLOW = pytest.mark.slow


@pytest.mark.parametrize("variant", ["affine", pytest.param("gate", marks=SLOW), "affine + gate"])
@pytest.mark.parametrize("initializer", FRESH)
@pytest.mark.parametrize("name", [
    pytest.param("gpt2", marks=SLOW), "llama", pytest.param("timm_vit", marks=SLOW),
    "timm_vit_norms",
])  # fmt: skip
def test_converting_first_or_last_is_the_same(name, initializer, variant):
    """Where a factor on o, or on v, makes up for a neutral start."""
    first, last = HOSTS[name].build().eval(), HOSTS[name].build().eval()
    last.load_state_dict(first.state_dict())
    convert(first, variant, start="preserve")
    report = initialize_(first, initializer, generator=seeded())
    expected = initialize_(last, initializer, generator=seeded())
    assert str(report) == str(expected)
    stock = matrices(last)
    convert(last, variant, start="preserve")
    assert_same(matrices(first), matrices(last))
    batch = HOSTS[name].batch()
    one, other = (next(tensors_in(run(model, batch))) for model in (first, last))
    assert torch.equal(one, other)
    restore(first)
    assert_same(matrices(first), stock)


def test_weights_of_a_converted_teacher_bring_their_factor_along():
    teacher, stock = HOSTS["gpt2"].build(), HOSTS["gpt2"].build()
    student = copy.deepcopy(stock)
    initialize_(stock, "weight_selection", teacher=teacher)
    for model in (student, teacher):
        convert(model, "affine + gate", start="preserve")
    initialize_(student, "weight_selection", teacher=teacher)
    restore(student)
    assert_same(matrices(student), matrices(stock))


def test_the_table_describes_every_initialiser():
    rows = [info.as_dict() for info in initializers()]
    assert [row["name"] for row in rows] == list(INITIALIZERS)
    assert all(row[column] for row in rows for column in ("equation", "source", "touches", "when"))
    options = {row["name"]: row["options"] for row in rows}
    assert options["conditioned"] == {"value": "fused", "gain": 1.0}
    assert options["weight_selection"] == {"teacher": "required", "layers": "first"}


def test_the_printed_report_has_one_line_per_matrix():
    report = initialize_(HOSTS["gpt2"].build(), "conditioned", generator=seeded())
    lines = str(report).splitlines()
    assert lines[0].startswith("initialised with conditioned: 6 of 8 matrices of 2 attentions")
    assert len(lines) == 2 + 8
    assert lines[2].split()[:4] == ["transformer.h.0.attn", "q", "initialised", "float32"]


@pytest.mark.slow
@pytest.mark.parametrize("initializer", INITIALIZERS)
def test_initialising_vit_b_takes_less_memory_than_one_layer(initializer):
    from levelhead.bench.timing import peak_extra_bytes

    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_base_patch16_224", depth=2)
    wider = partial(timm.create_model, "vit_base_patch16_224", depth=2, embed_dim=816)
    options = {"teacher": wider()} if initializer == "weight_selection" else {}
    layer_bytes = 4 * sum(p.numel() for p in model.blocks[0].parameters())
    # After a graph that breaks, arguments live as long as the calls they are of.
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(torch._dynamo.graph_break, fullgraph=True, backend="eager")()
    assert peak_extra_bytes(lambda: initialize_(model, initializer, **options)) < layer_bytes


# What a batch shows -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama", "swin", "xcit", "torch_encoder"])
def test_a_batch_shows_every_attention_before_and_after(name):
    model, batch = HOSTS[name].build(), HOSTS[name].batch()
    model.train()
    report = initialize_(model, "conditioned", batch=batch, generator=seeded())
    assert all(module.training for module in model.modules())
    sites = {site.name for site in find_attention(model)}
    assert {(row.site, row.quantity) for row in report.effects} == {
        (site, quantity) for site in sites for quantity in ("score_std", "entropy_nats")
    }
    again = initialize_(model, "default", batch=batch)
    for row, same in zip(report.effects, again.effects, strict=True):
        assert row.before != row.after
        assert same.before == same.after == row.after
    assert "entropy_nats" in str(report)


def test_conditioning_raises_the_spread_of_scores_to_one_and_match_leaves_it():
    """Trunc-normal(.02) gives LayerNormed inputs a spread of .31 at E = 768, D = 64."""
    model = Attention(768, 12)
    hidden_states = nn.functional.layer_norm(torch.randn(2, 31, 768), (768,))
    spreads = {}
    for initializer in ("conditioned", "conditioned(gain='match')"):
        for parameter in model.parameters():
            nn.init.trunc_normal_(parameter, std=0.02)
        effect = initialize_(model, initializer, batch=hidden_states).effects[0]
        assert effect.quantity == "score_std"
        assert effect.before == pytest.approx(0.31, abs=0.02)
        spreads[initializer] = effect.after
    assert spreads["conditioned"] == pytest.approx(1.0, abs=0.05)
    assert spreads["conditioned(gain='match')"] == pytest.approx(0.31, abs=0.02)


@pytest.mark.parametrize("variant", ["sigma_reparam", "spectral(form='svd')"])
@pytest.mark.parametrize("is_converted", [False, True])
def test_what_a_variant_keeps_of_its_initial_weights_is_that_of_the_new_ones(
    variant, is_converted
):
    attention = Attention(26, 2, variant="softmax" if is_converted else variant).eval()
    if is_converted:
        convert(attention, variant)
    plain = Attention(26, 2).eval()
    initialize_(attention, "orthogonal", generator=seeded())
    initialize_(plain, "orthogonal", generator=seeded())
    eye = torch.eye(26)
    for which, linear in {"q": plain.q_proj, "k": plain.k_proj, "v": plain.v_proj}.items():
        weight = getattr(attention, f"{which}_proj").weight
        effective = attention.projections.project(which, eye, weight, None).T
        # Every singular value is one: sigma_reparam leaves them, the svd form makes them two.
        factor = 1.0 if variant == "sigma_reparam" else 2.0
        torch.testing.assert_close(effective, factor * linear.weight, rtol=1e-4, atol=1e-5)

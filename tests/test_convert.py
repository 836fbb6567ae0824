"""Conversion: what changes, what stays, what is refused, and that refusals change nothing."""

import copy
import pickle
import sys

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import levelhead as lh
from hosts import HOSTS
from levelhead import convert_checks, convert_kernels
from levelhead.convert_report import LayerChange
from levelhead.sites.combining import HOST_TERMS
from levelhead.sites.host import host_of, installed_in
from levelhead.steps import StepState
from levelhead.store_checksum import checksum
from matrix import outputs, randomise, worst
from ranks import joined

SPREAD = ("llama", "gpt2", "timm_vit", "swin", "torch_encoder")


def facts(model):
    """All that conversion must leave alone."""
    return {
        "checksum": checksum(model.state_dict()),
        "classes": [type(m) for m in model.modules()],
        "grad": [p.requires_grad for p in model.parameters()],
        "ids": [id(p) for p in model.parameters()],
        "training": [m.training for m in model.modules()],
        "hooks": [(list(m._forward_pre_hooks.values()), list(m._forward_hooks.values()))
                  for m in model.modules()],
        "config": str(getattr(model, "config", "")),
        "name": getattr(getattr(model, "config", None), "_attn_implementation", None),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", SPREAD)
def test_what_belongs_to_the_host_stays(architecture, dtype):
    model = HOSTS[architecture].build().to(dtype).train()
    site = lh.find_attention(model)[0]
    next(site.parameters()).requires_grad_(False)
    site.module.eval()
    site.module.register_forward_hook(print)
    before, keys = facts(model), set(model.state_dict())
    stored = {name: (id(p), p.dtype) for name, p in model.named_parameters()}
    conversion = lh.convert(model, "affine + gate", start="paper")
    added = set(model.state_dict()) - keys
    assert keys <= set(model.state_dict())
    assert all(".levelhead." in f".{name}" for name in added)
    assert {n: (id(p), p.dtype) for n, p in model.named_parameters() if n in stored} == stored
    ours = [p for n, p in model.named_parameters() if n not in stored]
    assert sum(p.numel() for p in ours) == conversion.num_params > 0
    assert all(p.dtype == dtype and p.requires_grad for p in ours)
    assert not installed_in(site.module).training
    assert installed_in(lh.find_attention(model)[1].module).training
    assert print in site.module._forward_hooks.values()
    lh.restore(model)
    assert facts(model) == before


def test_tied_weights_stay_tied():
    model = HOSTS["t5"].build()
    assert model.lm_head.weight is model.shared.weight
    lh.convert(model, "gate")
    assert model.lm_head.weight is model.shared.weight
    assert copy.deepcopy(model).shared.weight is not model.shared.weight


@pytest.mark.parametrize("architecture", SPREAD)
@pytest.mark.parametrize(
    "variant", ["affine", "gate", "gate(bias=True) + affine", "sigma_reparam"]
)
def test_a_preserving_start_keeps_the_function_and_can_learn(architecture, variant):
    model, batch = HOSTS[architecture].build().double(), HOSTS[architecture].batch()
    batch = batch.double() if isinstance(batch, torch.Tensor) else batch
    stock = outputs(model, batch)
    conversion = lh.convert(model, variant)
    assert worst(outputs(model, batch), stock) < 1e-12
    assert all(layer.function == "preserved" for layer in conversion.layers)
    randomise(model)
    assert worst(outputs(model, batch), stock) > 1e-8


def test_a_preserving_start_holds_in_bfloat16_to_the_bit():
    model, batch = HOSTS["llama"].build().bfloat16(), HOSTS["llama"].batch()
    stock = outputs(model, batch)
    lh.convert(model, "affine + gate")
    assert worst(outputs(model, batch), stock) == 0


def test_a_sink_starts_low_but_learns():
    model, batch = HOSTS["llama"].build(), HOSTS["llama"].batch()
    conversion = lh.convert(model, "sink")
    assert all(0 < layer.moved < 0.02 for layer in conversion.layers)
    model(**batch).logits.square().sum().backward()
    scores = {n: p for n, p in model.named_parameters() if n.endswith("normaliser.score")}
    assert all((p == -4.0).all() and (p.grad != 0).all() for p in scores.values())
    lh.restore(model)
    lh.convert(model, "sink(start=1.5)")
    scores = {n: p for n, p in model.named_parameters() if n.endswith("normaliser.score")}
    assert all((p == 1.5).all() for p in scores.values())


def test_the_papers_start_is_that_of_the_layer_built_from_parts():
    model = HOSTS["llama"].build()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    conversion = lh.convert(model, "affine + sink", start="paper")
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
    inner = installed_in(model.model.layers[0].self_attn).inner
    assert (inner.weights.alpha_mean == 0).all()
    assert inner.weights.alpha_proj.weight.std() > 0
    assert (inner.normaliser.score == 0).all()
    assert all(layer.moved > 0.1 for layer in conversion.layers)


def test_restoring_after_training_gives_back_the_projection_times_its_factor():
    model = HOSTS["gpt2"].build()
    weight = model.transformer.h[0].attn.c_proj.weight
    before = weight.detach().clone()
    lh.convert(model, "affine + gate")
    assert torch.equal(weight, 4 * before)
    with torch.no_grad():
        weight.add_(1.0)
    lh.restore(model)
    assert torch.equal(weight, (4 * before + 1.0) / 4)


def test_a_norm_behind_the_heads_lets_the_values_make_up_for_the_start():
    """A factor in front of a LayerNorm cannot be made up for behind it."""
    from timm.models.eva import EvaAttention

    host = EvaAttention(40, 5, norm_layer=nn.LayerNorm).double().eval()
    nn.init.normal_(host.q_bias)
    nn.init.normal_(host.v_bias)
    hidden = torch.randn(2, 7, 40, dtype=torch.double)
    stock = host(hidden).detach()
    before = {name: p.clone() for name, p in host.state_dict().items()}
    conversion = lh.convert(host, "affine")
    assert conversion.layers[0].note == "the value projection was multiplied by 2"
    assert worst(host(hidden), stock) < 1e-12
    lh.restore(host)
    assert all(torch.equal(host.state_dict()[name], before[name]) for name in before)


def test_a_projection_that_would_overflow_is_refused():
    model = HOSTS["llama"].build().half()
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[0, 0] = 4e4
    before = facts(model)
    with pytest.raises(ValueError, match="must stay finite, got Linear.weight times 2 in"):
        lh.convert(model, "gate")
    assert facts(model) == before


def test_the_report_says_what_happened():
    model = HOSTS["llama"].build()
    text = str(lh.convert(model, "gate + quest", layers=[0]))
    assert text.splitlines()[0] == (
        "quest + gate: 1 attentions converted, 3360 parameters added, start='preserve'"
    )
    assert "model.layers.0.self_attn  softmax(scale=0.2673)  quest + gate  +3360" in text
    assert "1 x the output projection was multiplied by 2" in text
    assert "left as it was: model.layers.1.self_attn: not among the layers asked for" in text
    row = LayerChange("a", "b", "c", "d", 0, 0.0)
    assert row.function == "preserved"
    assert LayerChange("a", "b", "c", "d", 0, 0.034).function == "moved by 3.4 %"
    assert LayerChange("a", "b", "c", "d", 0, 12.0).function == "moved by 1200 %"


def test_the_probe_is_the_distance_of_the_papers_weights():
    """One layer, no positions: the probe is the module itself on the probe's hidden states."""
    host = lh.Attention(42, 3, qkv_bias=True)
    mha = nn.MultiheadAttention(42, 3, batch_first=True)
    (site,) = lh.find_attention(mha)
    site.write(lh.find_attention(host)[0].read().map(lambda w: torch.randn_like(w) * 0.3))
    hidden = torch.randn(1, 17, 42, generator=torch.Generator().manual_seed(0))
    bias = site.read().o_bias
    before = mha(hidden, hidden, hidden, need_weights=False)[0] - bias
    conversion = lh.convert(mha, "quest")
    after = mha(hidden, hidden, hidden, need_weights=False)[0] - bias
    moved = ((after - before).norm() / before.norm()).item()
    assert conversion.layers[0].moved == pytest.approx(moved, rel=1e-4)


@pytest.mark.parametrize(("kdim", "vdim"), [(16, 20), (None, 20), (16, None)])
@pytest.mark.parametrize("variant", ["quest", "affine + gate"])
def test_keys_and_values_may_be_made_of_other_things(kdim, vdim, variant):
    torch.manual_seed(0)
    mha = nn.MultiheadAttention(42, 3, kdim=kdim, vdim=vdim, batch_first=True)
    (site,) = lh.find_attention(mha)
    generator = torch.Generator().manual_seed(0)  # the probe's states
    widths = (42, kdim or 42, vdim or 42)
    states = [torch.randn(1, 17, width, generator=generator) for width in widths]
    if site.kind == "self" and kdim is None:
        generator = torch.Generator().manual_seed(0)
        states = [torch.randn(1, 17, width, generator=generator) for width in (42, 20)]
        states.insert(0, states[0])
    before = mha(*states, need_weights=False)[0]
    (layer,) = lh.convert(mha, variant).layers
    moved = (mha(*states, need_weights=False)[0] - before).norm() / before.norm()
    assert layer.moved == pytest.approx(moved.item(), rel=1e-3, abs=1e-6)
    assert (moved > 0.01) == (variant == "quest")
    lh.restore(mha)
    assert torch.equal(mha(*states, need_weights=False)[0], before)


OLMO2 = {"attention_mask": None, "position_embeddings": (torch.ones(1, 17, 14), torch.zeros(1))}


@pytest.mark.parametrize("variant", ["quest", "sink(start=2.0)", "spectral(strength=0.3)", "gate"])
@pytest.mark.parametrize(
    ("architecture", "num_tokens", "options"),
    [("xcit", 17, {}), ("davit", 17, {}), ("nystromformer", None, {}), ("olmo2", 17, OLMO2)],
)
def test_the_probe_is_what_the_hosts_own_module_does(architecture, num_tokens, options, variant):
    """Every kind that is not plain self-attention, against its module run by itself."""
    model = HOSTS[architecture].build()
    sites = [site for site in lh.find_attention(model) if site.kind != "window"]
    stock = {site.name: run_alone(site, num_tokens, options) for site in sites}
    if architecture == "nystromformer" and "sink" in variant:
        return  # refused
    conversion = lh.convert(model, variant, start="paper")
    found = {layer.name: layer.moved for layer in conversion.layers}
    checked = [site for site in sites if site.name in found]
    for site in checked:
        before, after = stock[site.name], run_alone(site, num_tokens, options)
        expected = ((after - before).norm() / before.norm()).item()
        assert found[site.name] == pytest.approx(expected, rel=1e-3), site.kind
        assert expected > 0 or variant == "gate"
    assert checked


def test_norms_with_gains_for_each_head_are_probed_as_the_host_runs_them():
    transformers = pytest.importorskip("transformers")
    config = transformers.CohereConfig(
        vocab_size=67, hidden_size=60, intermediate_size=44, num_hidden_layers=1, head_dim=12,
        num_attention_heads=5, num_key_value_heads=1, use_qk_norm=True, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.CohereForCausalLM(config).eval()
    (site,) = lh.find_attention(model)
    assert site.q_norm.weight.shape == (5, 12)
    for norm in (site.q_norm, site.k_norm):
        nn.init.uniform_(norm.weight, 0.5, 2.0)
    unturned = {
        "attention_mask": torch.zeros(1, 1, 17, 17).masked_fill(
            torch.ones(17, 17).triu(1).bool(), -torch.inf
        ),
        "position_embeddings": (torch.ones(1, 17, 12), torch.zeros(1, 17, 12)),
    }
    before = run_alone(site, 17, unturned)
    (layer,) = lh.convert(model, "quest").layers
    after = run_alone(site, 17, unturned)
    moved = ((after - before).norm() / before.norm()).item()
    assert layer.moved == pytest.approx(moved, rel=1e-3)
    assert moved > 0.01
    lh.verify(model, {"input_ids": torch.arange(3, 14)[None]})


@torch.no_grad()
def run_alone(site, num_tokens, options):
    """The module on the probe's hidden states, without the bias of its output projection."""
    hidden = torch.randn(
        1, num_tokens or site.module.seq_len, site.embed_dim,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    output = site.module(hidden, **options)
    output = output if isinstance(output, torch.Tensor) else output[0]
    bias = site.read().o_bias
    return output if bias is None else output - bias


def test_case_a16_the_report_names_the_kernel_and_says_when_it_builds_the_matrix(monkeypatch):
    monkeypatch.setattr(convert_kernels, "find_compiler", lambda: ["cc"])
    kernels = {
        name: {layer.kernel for layer in lh.convert(HOSTS[name].build(), variant).layers}
        for name, variant in (
            ("llama", "quest"), ("bert", "quest"), ("gemma2", "gate"), ("swin", "affine"),
            ("mistral", "sink"), ("nystromformer", "quest"), ("xcit", "sink"),
        )
    }  # fmt: skip
    builds = "which builds the T x S matrix"
    assert kernels == {
        "llama": {"flash"},
        "bert": {f"flash; while training math (dropout_p=0.1 on cpu), {builds}"},
        "gemma2": {"compiled tiles of scores (soft cap)"},
        "swin": {f"flash; while training plain (a position bias that learns on cpu), {builds}"},
        "mistral": {"flash, with its log-sum-exp"},
        "nystromformer": {"the host's own, through landmarks"},
        "xcit": {f"plain, {builds}", "plain, for one query, before the value projection"},
    }
    monkeypatch.setattr(convert_kernels, "find_compiler", lambda: None)
    without_compiler = lh.convert(HOSTS["gemma2"].build(), "gate")
    assert without_compiler.layers[0].kernel == "tiles of scores (soft cap)"
    half = lh.convert(HOSTS["gemma2"].build().bfloat16(), "gate")
    assert half.layers[0].kernel == "plain, over blocks of queries (soft cap)"
    wide = lh.Attention(48, 3, head_dim=320)
    assert "1 x kernel: flash" in str(lh.convert(wide, "quest")).splitlines()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        text = str(lh.convert(HOSTS["llama"].build(), "quest"))
    assert text.splitlines()[-1] == f"2 x kernel: math, {builds}"


def test_layers_by_position_and_by_name():
    model = HOSTS["gpt2_cross"].build()
    names = [site.name for site in lh.find_attention(model)]
    conversion = lh.convert(model, "quest", layers=[3, names[0]])
    assert [layer.name for layer in conversion.layers] == [names[0], names[3]]
    lh.restore(model)
    before = facts(model)
    with pytest.raises(ValueError, match=r"positions or names.*got \[4, 'h'\]; valid: 0 \(tran"):
        lh.convert(model, "quest", layers=[4, "h", 0])
    with pytest.raises(ValueError, match="at least one layer must be named"):
        lh.convert(model, "quest", layers=[])
    assert facts(model) == before


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("qust", "unknown variant term 'qust'; known: softmax, off_by_one"),
        ("quest + qnorm", "quest and qnorm both belong to the stage scores"),
        ("soft_cap", "soft_cap needs cap"),
    ],
)
def test_illegal_variants_are_refused(variant, message):
    model = HOSTS["llama"].build()
    before = facts(model)
    with pytest.raises(ValueError, match=message):
        lh.convert(model, variant)
    assert facts(model) == before


@pytest.mark.parametrize("layers", [1, True, "transformer.h.1.attn"])
def test_one_layer_without_a_list_is_refused(layers):
    model = HOSTS["gpt2"].build()
    with pytest.raises(ValueError, match="layers must be a list, got layers=.*valid: a list of 0"):
        lh.convert(model, "quest", layers=layers)


@pytest.mark.parametrize("model", ["gpt2", None])
def test_what_is_no_module_is_refused(model):
    with pytest.raises(ValueError, match=r"model must be a torch.nn.Module, got a (str|NoneType)"):
        lh.convert(model, "quest")


@pytest.mark.parametrize("variant", ["sigma_reparam", "spectral(form='svd')"])
def test_weights_that_are_not_finite_are_refused_where_they_are_decomposed(variant):
    model = HOSTS["gpt2"].build()
    with torch.no_grad():
        model.transformer.h[1].attn.c_attn.weight[0, 0] = torch.nan
    names = [name for name, _ in model.named_modules()]
    with pytest.raises(
        ValueError, match=r"must be finite.*got a weight of shape \[(1, )?30, 30\]"
    ):
        lh.convert(model, variant)
    assert [name for name, _ in model.named_modules()] == names


def test_an_unknown_start_is_refused():
    with pytest.raises(ValueError, match="unknown start 'papers'; known: preserve, paper"):
        lh.convert(HOSTS["llama"].build(), "quest", start="papers")


def test_converting_twice_is_refused():
    model = HOSTS["llama"].build()
    lh.convert(model, "quest", layers=[1])
    before = facts(model)
    for variant in ("quest", "gate"):
        with pytest.raises(ValueError, match=r"converted once.*valid: levelhead.restore\(model\)"):
            lh.convert(model, variant)
    assert facts(model) == before
    lh.restore(model)
    with pytest.raises(ValueError, match="restore needs a converted model, got a Llama"):
        lh.restore(model)


def test_a_layer_asked_for_must_take_the_variant_and_others_are_left_with_the_reason():
    model = HOSTS["xcit"].build()
    before = facts(model)
    with pytest.raises(ValueError, match=r"blocks.0.attn: affine with cross-covariance att"):
        lh.convert(model, "affine", layers=["blocks.0.attn"])
    assert facts(model) == before
    conversion = lh.convert(model, "affine")
    assert [name for name, _ in conversion.left] == ["blocks.0.attn", "blocks.1.attn"]
    assert all("queries are channels" in why for _, why in conversion.left)


def test_weights_without_values_are_refused():
    with torch.device("meta"):
        model = HOSTS["llama"].build()
    names = list(model.state_dict())
    with pytest.raises(ValueError, match="must have values.*on the meta device"):
        lh.convert(model, "gate")
    assert list(model.state_dict()) == names


def test_sharded_weights_are_refused(free_port):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with joined(0, 1, free_port):
        mesh = init_device_mesh("cpu", (1,))
        model = fully_shard(HOSTS["timm_vit"].build(), mesh=mesh)
        names = list(model.state_dict())
        with pytest.raises(ValueError, match="before it is sharded.*spread over ranks"):
            lh.convert(model, "gate")
        assert list(model.state_dict()) == names


def test_quantised_and_computed_weights_are_refused():
    model = HOSTS["llama"].build()
    attention = model.model.layers[1].self_attn
    quantised = copy.deepcopy(model)
    weight = nn.Parameter(torch.zeros(56, 56, dtype=torch.int8), requires_grad=False)
    quantised.model.layers[1].self_attn.q_proj.weight = weight
    before = facts(quantised)
    with pytest.raises(ValueError, match="quantised weights cannot be read or written"):
        lh.convert(quantised, "gate")
    assert facts(quantised) == before
    parametrizations.weight_norm(attention.q_proj)
    with pytest.raises(ValueError, match="remove the parametrization first"):
        lh.convert(model, "gate")


@pytest.mark.compile
def test_compiled_and_wrapped_models_are_refused():
    model = HOSTS["timm_vit"].build()
    with pytest.raises(ValueError, match="before it is compiled or wrapped.*OptimizedModule"):
        lh.convert(torch.compile(model), "quest")


def test_attentions_that_share_projections_are_refused():
    model = HOSTS["timm_vit"].build()
    model.blocks[1].attn.qkv = model.blocks[0].attn.qkv
    before = facts(model)
    with pytest.raises(ValueError, match="shares projections.*blocks.0.attn, which shares some"):
        lh.convert(model, "gate")
    assert facts(model) == before


def test_an_optimiser_built_before_is_an_error():
    model = HOSTS["timm_vit"].build()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    before = facts(model)
    with pytest.raises(ValueError, match="before its optimiser is built.*got a SGD that holds"):
        lh.convert(model, "gate")
    assert facts(model) == before
    lh.convert(model, "quest")  # adds no parameter
    lh.restore(model)
    del optimiser
    lh.convert(model, "gate")


def test_optimisers_of_other_models_do_not_matter():
    other = nn.Linear(3, 3)
    optimiser = torch.optim.AdamW(other.parameters())
    convert_checks.check_no_optimizer(HOSTS["timm_vit"].build())
    with pytest.raises(ValueError, match="AdamW"):
        convert_checks.check_no_optimizer(nn.Sequential(other))
    assert optimiser


@pytest.mark.parametrize("stage", ["install", "enter", "multiply"])
@pytest.mark.parametrize("architecture", ["llama", "timm_vit", "torch_encoder", "nystromformer"])
def test_a_failure_halfway_leaves_the_model_as_it_was(architecture, stage, monkeypatch):
    model, batch = HOSTS[architecture].build(), HOSTS[architecture].batch()
    before, stock = facts(model), outputs(model, batch)
    host = host_of(lh.find_attention(model)[0])
    owner = sys.modules["levelhead.convert"] if stage == "multiply" else type(host)
    real, calls = getattr(owner, stage), []

    def fails(*args):
        calls.append(1)
        if stage == "enter":
            real(*args)
        if stage == "enter" or len(calls) == 2:
            raise RuntimeError("out of luck")
        return real(*args)

    monkeypatch.setattr(owner, stage, fails)
    with pytest.raises(RuntimeError, match="out of luck"):
        lh.convert(model, "sigma_reparam + gate")
    monkeypatch.undo()
    assert worst(outputs(model, batch), stock) == 0
    assert facts(model) == before


def test_state_of_variants_moves_once_per_step_of_the_model_given():
    model, batch = HOSTS["llama"].build().train(), HOSTS["llama"].batch()
    lh.convert(model, "affine")
    states = [part for part in model.modules() if isinstance(part, StepState)]
    assert all(state.tracked for state in states)
    model(**batch)
    model(**batch)
    assert all(state.num_steps == 3 for state in states)  # a preserving start counts as one
    lh.restore(model)
    assert not model._forward_hooks


@pytest.mark.parametrize("architecture", ["llama", "timm_vit", "swin", "torch_encoder"])
def test_copies_run_and_can_be_restored(architecture):
    model, batch = HOSTS[architecture].build(), HOSTS[architecture].batch()
    stock = outputs(model, batch)
    lh.convert(model, "sigma_reparam + gate")
    twin = copy.deepcopy(model)
    randomise(twin)
    assert worst(outputs(model, batch), stock) < 1e-5
    assert worst(outputs(twin, batch), stock) > 1e-6
    lh.restore(twin)
    assert worst(outputs(twin, batch), stock) == 0
    assert installed_in(lh.find_attention(model)[0].module) is not None


def test_a_converted_model_without_projection_terms_can_be_pickled():
    model, batch = HOSTS["llama"].build(), HOSTS["llama"].batch()
    lh.convert(model, "quest + gate")
    twin = pickle.loads(pickle.dumps(model))
    assert worst(outputs(twin, batch), outputs(model, batch)) == 0


def test_new_parameters_have_their_place_in_an_optimiser():
    model = HOSTS["llama"].build()
    lh.convert(model, "sink + affine + gate(bias=True)")
    exempt = lh.no_weight_decay(model)
    assert {name.partition(".levelhead.")[2] for name in exempt} == {
        "inner.normaliser.score", "inner.gate.gate_proj.bias",
    }  # fmt: skip
    model.model.embed_tokens.weight.requires_grad_(False)
    decayed, kept = lh.parameter_groups(model, 0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, kept = ({names[id(p)] for p in group["params"]} for group in (decayed, kept))
    assert exempt <= kept
    assert decayed | kept == set(names.values()) - {"model.embed_tokens.weight"}
    assert any(name.endswith("alpha_proj.weight") for name in decayed)
    chosen, _ = lh.parameter_groups(model, 0.1, decays=lambda name, p: name.endswith("score"))
    assert chosen["params"] == []


SLOW = pytest.mark.slow
HAVING_TERMS = ["xcit", "gpt_oss", *(
    pytest.param(name, marks=SLOW) for name in ("gemma2", "qwen3", "davit", "swin_v2",
                                                "nystromformer", "qwen3_next", "eva", "t5")
)]  # fmt: skip


@pytest.mark.parametrize("architecture", HAVING_TERMS)
def test_the_table_of_combinations_is_what_conversion_does(architecture):
    """Every refusal of the table is met in a host that has the term, and nowhere else."""
    rows = {(host, term): why for host, term, why in lh.combinations()}
    options = {"soft_cap": "soft_cap(cap=2.0)", "spectral": "spectral(strength=1)"}
    model = HOSTS[architecture].build()
    for term in sorted({term for _, term in rows}):
        variant, sites = options.get(term, term), lh.find_attention(model)
        reasons = {
            site.name: [f"{term} with {host.name}: {rows[host.name, term]}"
                        for host in HOST_TERMS if host.holds(site) and rows[host.name, term]]
            for site in sites
        }  # fmt: skip
        if all(reasons.values()):
            with pytest.raises(ValueError, match="cannot go into these attentions"):
                lh.convert(model, variant)
            continue
        conversion = lh.convert(model, variant)
        assert dict(conversion.left) == {n: why[0] for n, why in reasons.items() if why}
        lh.restore(model)


def test_the_table_of_combinations_prints():
    table = lh.combinations()
    assert "    not sink: the host has a learned sink already" in str(table)
    assert table.markdown().splitlines()[0].startswith("| host | off_by_one | sink | quest |")
    assert len(table.markdown().splitlines()) == len(HOST_TERMS) + 2

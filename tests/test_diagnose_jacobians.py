"""kappa of heads with rotary embeddings, norms, sinks, biases equals that of the host's code."""

import copy

import pytest
import torch

from hosts import HOSTS, VOCAB
from levelhead.convert import convert
from levelhead.diagnose import diagnose
from levelhead.harness.models.gpt import GPT, GPTConfig
from levelhead.sites.find import find_attention

TOKENS = 5
IDS = torch.randint(3, VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(7))


def first_call(model, site, batch):
    """What the host's attention module is called with."""
    seen = {}

    def keep(module, args, kwargs):
        seen.update(args=args, kwargs=kwargs)

    handle = site.module.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        model(**batch)
    handle.remove()
    return seen["args"], seen["kwargs"]


def only_first_sample(value):
    """In float64, whatever the model runs in."""
    if isinstance(value, torch.Tensor):
        return value[:1].double() if value.is_floating_point() else value[:1]
    return tuple(map(only_first_sample, value)) if isinstance(value, tuple) else value


def kappa_by_autograd(model, site, batch, head):
    """Singular values of the Jacobian of the host's own forward, taken by autograd in float64."""
    args, kwargs = first_call(model, site, batch)
    args = tuple(map(only_first_sample, args))
    kwargs = {name: only_first_sample(value) for name, value in kwargs.items()}
    width, group = site.head_dim, site.num_heads // site.num_kv_heads
    places = {"q_proj": head, "k_proj": head // group, "v_proj": head // group}
    module = copy.deepcopy(site.module).double()
    state = dict(module.named_parameters())
    fixed = {"o_proj.weight": torch.eye(site.num_heads * width, dtype=torch.float64)}
    if "o_proj.bias" in state:
        fixed["o_proj.bias"] = torch.zeros(site.num_heads * width, dtype=torch.float64)
    own = []  # rows of this head: name, where
    for part, index in places.items():
        rows = slice(index * width, (index + 1) * width)
        own += [
            (f"{part}.{leaf}", rows) for leaf in ("weight", "bias") if f"{part}.{leaf}" in state
        ]

    def output(*pieces):
        changed = dict(fixed)
        for (name, rows), piece in zip(own, pieces, strict=True):
            whole = state[name].detach()
            changed[name] = torch.cat([whole[: rows.start], piece, whole[rows.stop :]])
        found = torch.func.functional_call(module, changed, args, kwargs)
        found = found[0] if isinstance(found, tuple) else found
        return found[0, :, head * width : (head + 1) * width]

    pieces = tuple(state[name].detach()[rows] for name, rows in own)
    parts = torch.autograd.functional.jacobian(output, pieces)
    jacobian = torch.cat([part.reshape(TOKENS * width, -1) for part in parts], 1)
    values = torch.linalg.svdvals(jacobian)
    limit = max(jacobian.shape) * torch.finfo(torch.float64).eps * values[0]
    return float(values[0] / values[values > limit][-1])


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt_oss", "mistral"])
def test_kappa_is_that_of_the_hosts_own_forward(name):
    model = HOSTS[name].build()
    model = model if name == "gpt_oss" else model.double()  # its experts refuse float64
    site = find_attention(model)[0]
    batch = {"input_ids": IDS, "use_cache": False}
    diagnosis = diagnose(model, batch, jacobian_tokens=TOKENS)
    assert not [reason for reason in diagnosis.meta["not_measured"] if "Jacobian" in reason]
    for head in range(site.num_heads):
        expected = kappa_by_autograd(model, site, batch, head)
        assert diagnosis.value("jacobian_kappa", 0, head) == pytest.approx(expected, rel=1e-3)
        assert diagnosis.value("jacobian_bound", 0, head) >= expected * (1 - 1e-6)
    metrics = {record.metric for record in diagnosis.records if record.layer == site.name}
    assert "jacobian_surrogate" not in metrics  # the papers' expression knows no rotation


@pytest.mark.parametrize("name", ["llama", "timm_vit"])
@pytest.mark.parametrize("variant", ["sink", "off_by_one", "soft_cap(cap=0.05)"])
def test_converted_heads_have_one_or_the_reason(name, variant):
    model = HOSTS[name].build()
    plain = diagnose(model, HOSTS[name].batch(), jacobian_tokens=TOKENS)
    convert(model, variant)
    found = diagnose(model, HOSTS[name].batch(), jacobian_tokens=TOKENS)
    assert not [reason for reason in found.meta["not_measured"] if "Jacobian" in reason]
    kappas = [d.value("jacobian_kappa", 0, 0) for d in (plain, found)]
    assert kappas[0] != pytest.approx(kappas[1], rel=1e-6)


@pytest.mark.parametrize("variant", ["quest", "affine", "gate"])
def test_other_variants_say_why_not(variant):
    model = HOSTS["timm_vit"].build()
    convert(model, variant)
    reasons = diagnose(model, HOSTS["timm_vit"].batch()).meta["not_measured"]
    assert any("Jacobian: a variant's own stages" in r and variant in r for r in reasons)


def test_rotations_of_neighbouring_channels_and_of_own_models_are_read_back():
    config = GPTConfig(embed_dim=24, num_heads=3, num_layers=2, context_length=16)
    torch.manual_seed(0)
    found = diagnose(GPT(config).eval(), IDS, jacobian_tokens=TOKENS)
    assert not [reason for reason in found.meta["not_measured"] if "Jacobian" in reason]
    assert found.value("jacobian_kappa", 0, 0) > 1

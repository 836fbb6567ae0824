"""Converted models in training: checkpointing, compilation, Trainer, adapters, several ranks."""

import copy
import functools
import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import levelhead as lh
from hosts import HOSTS
from levelhead.sites import transformers_host
from levelhead.sites.host import installed_in
from levelhead.store_checksum import checksum
from matrix import VARIANTS, outputs, randomise, worst
from ranks import on_ranks

TRAINED = ("affine + gate", "sigma_reparam + quest", "sink", "qknorm_ds")


def build(architecture, variant):
    """A converted model in training mode, without dropout, away from its start."""
    model = HOSTS[architecture].build().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    lh.convert(model, variant)
    randomise(model)
    return model


def gradients(model, ids, run=None):
    """Every gradient of one training step, and the state after it."""
    run = model if run is None else run
    run(input_ids=ids, use_cache=False).logits.square().mean().backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    assert all(grad is not None for name, grad in found.items() if ".levelhead." in name)
    return found, {name: b.clone() for name, b in model.named_buffers() if ".levelhead." in name}


def assert_same(found, expected, atol):
    for one, other in zip(found, expected, strict=True):
        for name, tensor in other.items():
            torch.testing.assert_close(one[name], tensor, atol=atol, rtol=0)


def checkpointed(model, use_reentrant):
    twin = copy.deepcopy(model)
    if use_reentrant is None:
        return twin
    old = getattr(twin, "gradient_checkpointing_enable", None)
    getattr(twin, "activation_checkpointing_enable", old)({"use_reentrant": use_reentrant})
    if use_reentrant:
        twin.enable_input_require_grads()
    return twin


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("variant", TRAINED)
@pytest.mark.parametrize("architecture", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_checkpointing_of_both_kinds_keeps_gradients(architecture, variant, use_reentrant):
    model, ids = build(architecture, variant), HOSTS[architecture].batch()["input_ids"]
    twin, calls = checkpointed(model, use_reentrant), []
    for site in lh.find_attention(twin):
        site.module.register_forward_pre_hook(lambda *_: calls.append(1))
    expected = gradients(model, ids)
    found = gradients(twin, ids)
    assert len(calls) == 4, "two layers, each run twice"
    assert_same(found, expected, atol=1e-8)


def in_one_graph(model):
    torch.compiler.reset()
    return torch.compile(model, fullgraph=True, backend="aot_eager")


@functools.cache
def settings_of_stock(architecture, use_reentrant):
    """What transformers' own model needs of the compiler to be one graph: nothing, as a rule.

    With kernels 0.19 the attentions that rotate set a variable of the process in their forward,
    which the compiler refuses under checkpointing unless told that it need not be set again.
    """
    stock = checkpointed(HOSTS[architecture].build().train(), use_reentrant)
    ids = HOSTS[architecture].batch()["input_ids"]
    try:
        gradients(stock, ids, in_one_graph(stock))
    except torch._dynamo.exc.Unsupported as error:
        if "Unsafe side effect" not in str(error):
            raise
        return {"skip_fwd_side_effects_in_bwd_under_checkpoint": True}
    return {}


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("use_reentrant", [None, True, False])
@pytest.mark.parametrize(("architecture", "variant"), [
    *itertools.product(["gpt2", "llama"], TRAINED), ("gpt_neox", "sigma_reparam"),
])  # fmt: skip
def test_compiled_in_one_graph_with_checkpointing_or_not(architecture, variant, use_reentrant):
    settings = settings_of_stock(architecture, use_reentrant)
    model, ids = build(architecture, variant), HOSTS[architecture].batch()["input_ids"]
    twin = checkpointed(model, use_reentrant)
    with torch._dynamo.config.patch(settings):
        compiled = gradients(twin, ids, in_one_graph(twin))
    assert_same(compiled, gradients(model, ids), atol=1e-7)


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("architecture", ["gpt2", "whisper", "t5", "bert"])
def test_compiled_by_inductor_in_evaluation(architecture):
    torch.compiler.reset()
    model, batch = HOSTS[architecture].build(), HOSTS[architecture].batch()
    lh.convert(model, "quest + affine")
    randomise(model)
    expected = outputs(model, batch)
    assert worst(outputs(torch.compile(model), batch), expected) < 1e-5


class Rows(Dataset):
    """Rows of token ids that are their own labels."""

    def __init__(self):
        self.ids = torch.randint(3, 67, (24, 9), generator=torch.Generator().manual_seed(2))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, idx):
        return {"input_ids": self.ids[idx], "labels": self.ids[idx]}


def trainer(model, folder, **more):
    from transformers import Trainer, TrainingArguments

    options = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 3, "seed": 3,
               "report_to": "none", "use_cpu": True, "disable_tqdm": True,
               "learning_rate": 1e-2}  # fmt: skip
    arguments = TrainingArguments(output_dir=str(folder), **(options | more))
    return Trainer(model=model, args=arguments, train_dataset=Rows())


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "variant", ["affine + gate", pytest.param("sigma_reparam", marks=pytest.mark.slow)]
)
def test_trainer_trains_saves_and_resumes_to_the_same_model(variant, tmp_path):
    model = HOSTS["llama"].build()
    lh.convert(model, variant)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    stock = copy.deepcopy(model)
    trainer(model, tmp_path / "whole").train()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert {name for name in before if ".levelhead." in name} <= moved
    trainer(stock, tmp_path / "half").train(str(tmp_path / "whole" / "checkpoint-2"))
    assert_same([stock.state_dict()], [model.state_dict()], atol=1e-7)
    loaded = lh.from_pretrained(tmp_path / "whole" / "checkpoint-4")
    assert checksum(loaded.state_dict()) == checksum(model.state_dict())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("variant", ["affine + gate", "spectral(strength=0.3) + quest"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_low_rank_adapters_on_a_converted_model(architecture, variant):
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    model, batch = HOSTS[architecture].build(), HOSTS[architecture].batch()
    lh.convert(model, variant)
    randomise(model)
    before, parts = outputs(model, batch), len(lh.find_attention(model))
    targets = ["q_proj", "v_proj"] if architecture == "llama" else ["c_attn"]
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=targets, fan_in_fan_out=architecture == "gpt2")
    )
    assert worst(outputs(adapted, batch), before) < 1e-6
    adapted.train()
    adapted(**batch).logits.square().mean().backward()
    assert {n for n, p in adapted.named_parameters() if p.grad is not None} == {
        n for n, p in adapted.named_parameters() if "lora_" in n
    }
    adapted.eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
    assert worst(outputs(adapted, batch), before) > 1e-6
    merged = adapted.merge_and_unload()
    assert len(lh.find_attention(merged)) == parts
    lh.restore(merged)
    assert not any(installed_in(module) for module in merged.modules())


def test_hidden_states_are_handed_on_and_never_kept():
    model, batch = HOSTS["llama"].build(), HOSTS["llama"].batch()
    lh.convert(model, "gate")
    outputs(model, batch)
    for module in model.modules():
        kept = [v for v in vars(module).values() if isinstance(v, torch.Tensor)]
        assert not kept
    hook = transformers_host.hand_on_hidden_states
    args, kwargs = hook(nn.Identity(), (), {"hidden_states": 3, "other": 4})
    assert (args, kwargs["levelhead_hidden_states"], kwargs["other"]) == ((), 3, 4)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "softmax"])
def test_case_a12_every_parameter_gets_a_gradient_on_every_step(variant):
    model = HOSTS["timm_vit"].build().train()
    lh.convert(model, variant, layers=[1])
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimiser.zero_grad()
        model(torch.randn(2, 3, 16, 16)).square().mean().backward()
        lost = [name for name, p in model.named_parameters() if p.grad is None]
        assert not lost, (step, lost)
        optimiser.step()


def train_every_variant(rank, folder):
    for variant in VARIANTS:
        model = HOSTS["timm_vit"].build().train()
        lh.convert(model, variant, layers=[1])
        ddp = nn.parallel.DistributedDataParallel(model, find_unused_parameters=False)
        optimiser = torch.optim.SGD(ddp.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(3):
            optimiser.zero_grad()
            ddp(torch.randn(2, 3, 16, 16, generator=generator)).square().mean().backward()
            optimiser.step()
        with open(f"{folder}/{rank}.txt", "a") as file:
            file.write(f"{variant} {checksum(model.state_dict())}\n")


@pytest.mark.slow
def test_case_a12_ranks_stay_equal_without_unused_parameters(tmp_path, free_port):
    on_ranks(2, free_port, train_every_variant, str(tmp_path))
    first, second = ((tmp_path / f"{rank}.txt").read_text() for rank in range(2))
    assert first == second
    assert len(first.splitlines()) == len(VARIANTS)

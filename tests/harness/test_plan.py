"""A plan's figures against counts by hand and against real tensors."""

import pytest
import torch

from levelhead.harness.plan import BYTES_OF_STATE, GIB, make_plan
from levelhead.harness.recipe import load_recipe
from levelhead.harness.recipe_tasks import make_recipe_task

GPT = [
    "model.vocab_size=101", "model.context_length=23", "model.embed_dim=24", "model.num_layers=3",
    "model.num_heads=2",
]  # fmt: skip


def test_flops_are_those_of_the_matrix_products():
    plan = make_plan(load_recipe("theta_pre_ln", "small", GPT))
    tokens, width, layers, vocab = 23, 24, 3, 101
    linear = layers * 12 * width**2 + vocab * width
    attention = layers * 2 * tokens * width  # scores and outputs, nothing left out for causality
    forward = 2 * tokens * (linear + attention)
    backward_attention = 2.5 * 2 * tokens * attention  # five products for two: it is recomputed
    expected = forward + 4 * tokens * linear + backward_attention
    assert plan.flops_per_sample == pytest.approx(expected, rel=1e-12)
    assert plan.flops == plan.flops_per_sample * 16 * 200


def test_hours_and_memory_follow_from_the_counts():
    recipe = load_recipe("vit_t_pets", "small")
    plan = make_plan(recipe, devices=4, peak_tflops=2.0, efficiency=0.25)
    assert plan.hours == pytest.approx(plan.flops / (4 * 0.5e12 * 3600))
    num_bytes = sum(BYTES_OF_STATE.values()) + 4  # and the average
    assert plan.state_gib == pytest.approx(plan.num_params * num_bytes / GIB)
    assert plan.state_sharded_gib == pytest.approx(plan.state_gib / 4)
    assert (plan.micro_batch_size, plan.num_accumulated) == (16, 1)
    model = make_recipe_task(recipe).start("softmax", 0)
    assert plan.num_params == sum(p.numel() for p in model.parameters())


def test_activations_are_what_a_real_forward_keeps():
    recipe = load_recipe("theta_pre_ln", "small", [*GPT, "training.batch_size=1"])
    task = make_recipe_task(recipe)
    model = task.start("softmax", 0).train()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    tokens = torch.randint(101, (1, 23))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        task.loss(model, (tokens, tokens.clone()))
    real = sum(size for size, _ in kept.values())
    assert make_plan(recipe).activations_gib * GIB == pytest.approx(real, rel=0.02)


def test_the_batch_is_shared_as_the_engine_does():
    from levelhead.harness.engine.split import split_batch
    from levelhead.harness.plan import share

    settings = make_recipe_task(load_recipe("gpt2_472m_tinystories")).settings
    for devices in (1, 2, 4, 8, 16):
        split = split_batch(settings.batch_size, settings.micro_batch_size, devices, 0)
        assert share(settings, devices) == (split.micro_size, split.num_micro)


def test_what_cannot_be_is_refused():
    recipe = load_recipe("vit_t_pets", "small")
    with pytest.raises(ValueError, match="the number of devices must divide the global batch.*"
                       "got batch_size=64 on 3 devices; valid: 1, 2, 4"):  # fmt: skip
        make_plan(recipe, devices=3)
    with pytest.raises(ValueError, match="efficiency must be in .0, 1., got 2"):
        make_plan(recipe, efficiency=2)
    with pytest.raises(ValueError, match="peak_tflops must be positive, got 0"):
        make_plan(recipe, peak_tflops=0)
    with pytest.raises(ValueError, match="the model must have the model.num_params of its recipe"):
        make_plan(load_recipe("vit_t_pets", "small", ["model.num_params=1e6"]))


def test_the_text_tells_deviations_and_overrides():
    text = str(make_plan(load_recipe("vit_t_pets", "small", ["training.batch_size=32"]), 2))
    assert "batch       32 = 2 devices x 1 x 16" in text
    assert "    - training.batch_size=32 (not 64)" in text
    assert "handwritten digits" in text

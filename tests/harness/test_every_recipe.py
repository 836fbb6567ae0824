"""All recipes, both forms: they cover the papers, build at full size, and train when small."""

import pytest
import torch
from samples import image_folder, text_folder, tokenizer_folder
from torch import nn

from levelhead.harness.config import Cell
from levelhead.harness.plan import make_plan
from levelhead.harness.recipe import IMAGES, TEXTS, load_recipe
from levelhead.harness.recipe_files import recipe_names
from levelhead.harness.recipe_models import check_count
from levelhead.harness.recipe_table import paper_results
from levelhead.harness.recipe_tasks import make_recipe_task
from levelhead.harness.train import start_model, train_cell
from levelhead.init.table import INITIALIZERS
from levelhead.terms import parse_terms
from levelhead.variants import parse_variant

NAMES = recipe_names()
PAPERS = {
    "conditioned_initialization": 31, "spectral_conditioning": 5, "preconditioned_attention": 1,
    "quest": 5, "affine_scaled": 12, "exact_sensitivity": 1,
}  # fmt: skip


def distinct_small():
    """Name the recipes whose small forms differ in more than words."""
    seen, names = set(), []
    for name in NAMES:
        recipe = load_recipe(name, "small")
        parts = recipe.model, recipe.data, recipe.augmentation, recipe.training, recipe.evaluation
        if parts not in seen:
            seen.add(parts)
            names.append(name)
    return names


SMALL = distinct_small()


def test_every_row_of_the_papers_has_a_recipe():
    rows = paper_results()["rows"]
    covered = [row for name in NAMES for row in load_recipe(name).rows]
    assert sorted(covered) == sorted(rows)  # each exactly once
    for paper, count in PAPERS.items():
        assert len([row for row in rows if row.startswith(f"{paper}.")]) == count, paper
    assert all(paper_results()["left_out"].values())


@pytest.mark.parametrize("name", NAMES)
def test_both_forms_say_where_they_differ(name):
    full, small = load_recipe(name), load_recipe(name, "small")
    assert full.deviations
    assert set(full.deviations) < set(small.deviations)
    assert full.hash != small.hash
    for variant in full.variants:
        assert str(parse_variant(variant)) == variant
    assert {term.name for init in full.inits for term in parse_terms(init)} <= set(INITIALIZERS)
    for row in full.rows:
        if "table_6_transfer" in row:
            continue  # its columns name the init of the training before
        known = {*full.variants, *full.inits, *(v.split("(")[0] for v in full.variants)}
        assert set(paper_results()["rows"][row]["values"]) <= known, row


@pytest.mark.parametrize("name", SMALL)
def test_the_small_form_trains(name):
    task = make_recipe_task(
        load_recipe(name, "small", ["training.steps=2", "training.warmup_steps=0",
                                    "training.decay_steps=0", "evaluation.max_samples=32"])
    )  # fmt: skip
    cell = Cell(task=task.settings.name, variant="quest", init="default", seed=0)
    model = start_model(task, cell)
    before = [parameter.clone() for parameter in model.parameters()]
    step_(task, model, next(task.batches(0)))
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    found = task.evaluate(model)
    assert task.metric.name in found
    assert all(torch.tensor(list(found.values())).isfinite())


def step_(task, model, batch):
    """Do one step of AdamW over the task's groups."""
    settings = task.settings
    groups = [
        {"params": g["params"], "weight_decay": g["weight_decay"],
         "lr": settings.learning_rate * g.get("lr_scale", 1.0)}
        for g in task.parameter_groups(model)
    ]  # fmt: skip
    trained = [p for group in groups for p in group["params"]]
    assert {id(p) for p in trained} == {id(p) for p in model.parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps)
    loss = task.loss(model.train(), batch)
    assert loss.isfinite()
    loss.backward()
    optimizer.step()


def reduced(recipe_name, folder):
    """Return the full form at reduced depth, on a made sample in the real format."""
    recipe = load_recipe(recipe_name)
    given = ["training.steps=2", "training.warmup_steps=0", "training.decay_steps=0",
             "training.batch_size=2"]  # fmt: skip
    if isinstance(recipe.data, IMAGES):
        options = recipe.model.options if recipe.model.kind == "timm" else None
        is_staged = recipe.model.kind == "timm" and recipe.model.name.startswith(("swin", "davit"))
        depth = "depths=[1, 1, 1, 1]" if is_staged else "depth=1"
        given += [f"model.options.{depth}"] if options is not None else ["model.num_layers=1"]
        given += ["data.kind=image_folder", f"data.path={image_folder(folder / 'images')}",
                  "data.num_classes=2", "data.num_train=6"]  # fmt: skip
    if isinstance(recipe.data, TEXTS):
        given += ["model.num_layers=1", "model.vocab_size=300", "model.context_length=13",
                  f"data.path={text_folder(folder / 'texts')}", "data.name=null",
                  f"data.tokenizer={tokenizer_folder(folder / 'tokenizer')}"]  # fmt: skip
        given += ["data.held_out=2"] if recipe.data.held_out else []
        given += ["evaluation.theta_rows=16"] if recipe.evaluation.theta_rows else []
    return load_recipe(recipe_name, overrides=[*given, "model.num_params=null"])


def check_full(name, folder):
    recipe = load_recipe(name)
    with torch.device("meta"):
        model = make_recipe_task(recipe).build("softmax")
    if recipe.model.kind != "retrieval":
        check_count(model, recipe.model.num_params)
    task = make_recipe_task(reduced(name, folder))
    model = task.start("softmax", 0)
    step_(task, model, next(task.batches(0)))
    assert task.metric.name in task.evaluate(model)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("name", ["vision/deit_ti_quest", "synthetic/quest_retrieval"])
def test_the_full_form_builds_and_steps(name, tmp_path):
    check_full(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in NAMES if n != "vision/deit_ti_quest"])
def test_every_full_form_builds_and_steps_and_is_planned(name, tmp_path):
    check_full(name, tmp_path)
    plan = make_plan(load_recipe(name))
    assert plan.hours > 0
    assert plan.deviations


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_the_small_form_learns(name):
    given = ["training.steps=40", "training.warmup_steps=4", "training.decay_steps=0",
             "evaluation.max_samples=64"]  # fmt: skip
    recipe = load_recipe(name, "small", given)
    if recipe.model.kind == "retrieval":
        pytest.skip("its settings have rates of their own: test_retrieval trains it")
    task = make_recipe_task(recipe)
    cell = Cell(task=task.settings.name, variant="softmax", init="default", seed=0)
    record = train_cell(task, cell)
    losses = record["curve"]["train_loss_nats"]
    assert record["diverged_step"] is None
    assert sum(losses[-5:]) / 5 < losses[0] - 0.02


def test_a_model_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"model.num_params of its recipe, \+-1%, got 12 param"):
        check_count(nn.Linear(3, 3), 13)
    check_count(nn.Linear(9, 10), 100.9)

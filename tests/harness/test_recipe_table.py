"""The table of recipes: figures, forms, reasons, and the result that finished last."""

import json

import pytest
import yaml
from typer.testing import CliRunner

from levelhead.commands import app
from levelhead.harness.config import Cell
from levelhead.harness.engine.folder import training_config
from levelhead.harness.recipe import load_recipe
from levelhead.harness.recipe_files import recipe_names
from levelhead.harness.recipe_table import last_results, recipe_rows
from levelhead.harness.recipe_tasks import make_recipe_task


def finish(folder, name, form="small", value=50.0, at="2026-01-01", variant="softmax"):
    """Write the folder of a finished training."""
    settings = make_recipe_task(load_recipe(name, form)).settings
    cell = Cell(task=settings.name, variant=variant, init="default", seed=3)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(training_config(settings, cell, 1)))
    final = None if value is None else {"accuracy_pct": value, "perplexity": value}
    record = {**cell.model_dump(), "final": final, "finished_at": at}
    (folder / "cells.jsonl").write_text(json.dumps(record) + "\n")


def row_of(rows, name):
    return next(row for row in rows if row["name"] == name)


def test_every_recipe_and_every_reason_is_a_row(tmp_path):
    rows = recipe_rows([tmp_path])
    assert [row["name"] for row in rows if row["name"] != "-"] == recipe_names()
    assert any("Long Range Arena comes later" in row["paper"] for row in rows)
    row = row_of(rows, "vision/vit_b_imagenet")
    assert (
        "ImageNet-1k top-1 %: default 80.3, mimetic 80.5, conditioned 81.5 (read)" in row["paper"]
    )
    assert row["full"] == ("vit_base_patch16_224 (86.6 M), data/imagenet, 300 epochs, batch 1024")
    assert row["small"].startswith("vit_tiny_patch16_224, digits, 20 epochs")
    assert row["measured"] == ""


def test_a_null_figure_is_a_dash(tmp_path):
    row = row_of(recipe_rows([tmp_path]), "vision/vit_l_quest")
    assert "softmax -, qknorm_ds 72.5, quest 74.9" in row["paper"]


def test_the_result_that_finished_last_is_shown(tmp_path):
    name = "vision/vit_t_cifar10"
    finish(tmp_path / "b", name, value=61.25, at="2026-02-02", variant="quest")
    finish(tmp_path / "a", name, value=40.0, at="2026-03-03")
    finish(tmp_path / "c", "language/gpt2_tinystories", value=None)
    rows = recipe_rows([tmp_path])
    assert row_of(rows, name)["measured"] == "small: accuracy_pct 40 (softmax, default, seed 3)"
    found = row_of(rows, "language/gpt2_tinystories")["measured"]
    assert found == "small: diverged (softmax, default, seed 3)"


def test_other_folders_are_passed_over(tmp_path):
    for name, config in (("a", "settings: 3"), ("b", "["), ("c", "settings: {tasks: [{x: 1}]}")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cells.jsonl").write_text("{}\n")
        (tmp_path / name / "config.yaml").write_text(config)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "cells.jsonl").write_text("torn")
    assert last_results([tmp_path, tmp_path / "nowhere"]) == {}


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def test_the_commands_print_json_and_text(run):
    rows = json.loads(run("list", "recipes", "--json").output)
    assert row_of(rows, "vision/vit_t_pets")["figures"]
    plan = json.loads(run("plan", "vit_t_pets", "training.epochs=3", "--small", "--json").output)
    assert plan["steps"] == 60
    assert "training.epochs=3 (not 20)" in plan["deviations"]
    assert "memory/rank" in run("plan", "vit_t_pets", "--small", "--devices", "2").output


def test_a_plan_with_a_wrong_key_is_refused(run):
    error = run("plan", "vit_t_pets", "training.epoch=3").exception
    assert "unknown key training.epoch" in str(error)

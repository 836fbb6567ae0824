"""Learning rates are chosen by runs that nothing reported has seen, at the same cost for all."""

import json

import pytest
import torch

from levelhead.harness import step_times, workers
from levelhead.harness.compare import compare
from levelhead.harness.config import (
    FIRST_SELECTION_SEED,
    Cell,
    CompareSettings,
    cells,
    selection_cells,
)
from levelhead.harness.reading import _rate_sentences
from levelhead.harness.recipe import load_recipe
from levelhead.harness.recipe_tasks import make_recipe_task
from levelhead.harness.selection import Tried, can_hold_out, choose, held_out
from levelhead.harness.tasks import (
    ImageClassification,
    LanguageModelling,
    make_task,
    resolve_task,
)
from levelhead.harness.workers import loaded_task, task_of_cell

RATES = (1e-3, 1e-2, 3e-2)
TINY = {"vit": {"embed_dim": 12, "num_heads": 2, "num_layers": 1}}
UP, DOWN = ImageClassification.metric, LanguageModelling.metric


def settings(variants=("quest",), seeds=2, **more) -> CompareSettings:
    task = resolve_task("digits", TINY, steps=3, batch_size=8)
    more = {"learning_rates": RATES} | more
    return CompareSettings(tasks=(task,), variants=variants, seeds=seeds, **more)


@pytest.fixture(autouse=True)
def _few_timing_rounds(monkeypatch):
    monkeypatch.setattr(step_times, "TIMING_ROUNDS", 2)


def tried(rate, mean, n=2, num_diverged=0, num_missing=0):
    return Tried(
        learning_rate=rate, mean=mean, n=n, num_diverged=num_diverged, num_missing=num_missing
    )


@pytest.mark.parametrize(("metric", "expected"), [(UP, 3e-3), (DOWN, 1e-3)])
def test_the_best_mean_is_chosen_whichever_way_is_up(metric, expected):
    choice = choose([tried(1e-3, 50.0), tried(3e-3, 60.0), tried(1e-2, 55.0)], metric)
    assert choice.learning_rate == expected
    assert choice.at_edge == (None if expected == 3e-3 else "lowest")
    assert choice.tied_with == ()


def test_a_rate_that_diverges_is_not_chosen_however_good_its_rest():
    choice = choose([tried(1e-3, 50.0), tried(1e-2, 90.0, n=1, num_diverged=1)], UP)
    assert choice.learning_rate == 1e-3
    nothing = choose([tried(1e-3, None, n=0, num_diverged=2), tried(1e-2, 9.0)], UP)
    assert nothing.learning_rate == 1e-2
    assert nothing.at_edge == "highest"


def test_of_equal_rates_the_lowest_is_taken_and_the_others_are_named():
    choice = choose([tried(1e-2, 60.0), tried(1e-3, 60.0), tried(1e-1, 60.0)], UP)
    assert choice.learning_rate == 1e-3
    assert choice.tied_with == (1e-2, 1e-1)
    assert [one.learning_rate for one in choice.tried] == [1e-3, 1e-2, 1e-1]
    json.dumps(choice.as_dict(), allow_nan=False)


def test_choosing_where_one_looks_flatters_and_choosing_apart_does_not():
    """Ten rates that are all alike: the best of the reported runs is too good, ours is not."""
    rates = torch.linspace(1e-3, 1e-2, 10).tolist()
    generator = torch.Generator().manual_seed(0)
    own, apart = [], []
    for _ in range(400):
        reported, choosing = torch.randn(2, 10, generator=generator, dtype=torch.float64)
        by = {
            name: choose(
                [tried(r, v.item()) for r, v in zip(rates, values, strict=True)], UP
            ).learning_rate
            for name, values in (("own", reported), ("apart", choosing))
        }
        own.append(reported[rates.index(by["own"])])
        apart.append(reported[rates.index(by["apart"])])
    assert torch.stack(own).mean() > 1.4  # the expected largest of ten: 1.54
    assert abs(torch.stack(apart).mean()) < 4 / 400**0.5


def test_every_row_gets_the_same_rates_and_seeds_and_none_that_is_reported():
    grid = settings(("quest", "gate"), inits=("default", "mimetic"))
    choosing = selection_cells(grid)
    assert len(choosing) == 3 * 2 * 3 * 2  # variants, inits, rates, seeds
    rows = {(c.variant, c.init) for c in choosing}
    for row in rows:
        own = [(c.learning_rate, c.seed) for c in choosing if (c.variant, c.init) == row]
        assert len(set(own)) == 6
    assert min(c.seed for c in choosing) >= FIRST_SELECTION_SEED > max(c.seed for c in cells(grid))
    assert {c.part for c in choosing} == {"validation"}
    assert {c.part for c in cells(grid)} == {"test"}


def test_one_rate_or_none_needs_no_choosing():
    assert selection_cells(settings(learning_rates=())) == []
    assert selection_cells(settings(learning_rates=(3e-3,))) == []


def test_the_tasks_own_rate_names_the_same_cell_as_no_rate():
    own = settings().tasks[0].learning_rate
    assert own == 1e-2
    at_own = [c for c in selection_cells(settings()) if c.learning_rate is None]
    assert len(at_own) == 2 * 2
    old_record = {"task": "digits", "variant": "quest", "init": "default", "seed": 1}
    assert Cell.from_record(old_record).key == "digits | quest | default | seed 1"


def test_rates_are_sorted_and_must_be_positive():
    assert settings(learning_rates=(3e-2, 1e-3, 3e-2)).learning_rates == (1e-3, 3e-2)
    with pytest.raises(ValueError, match=r"learning_rates.*\n.*greater than 0"):
        settings(learning_rates=(0.0, 1e-3))


def test_the_validation_images_are_training_images_kept_out_of_training():
    task = make_task(settings().tasks[0])
    split = held_out(task)
    whole, parts = task.data, split.data
    assert len(parts.test_images) == round(0.2 * len(whole.train_images))
    together = torch.cat([parts.train_images, parts.test_images]).flatten(1)
    assert len(together) == len(whole.train_images)
    order = sorted(map(tuple, together.tolist()))
    assert order == sorted(map(tuple, whole.train_images.flatten(1).tolist()))
    again = held_out(make_task(settings().tasks[0])).data
    assert torch.equal(again.test_images, parts.test_images)
    assert torch.equal(again.test_labels, parts.test_labels)


def test_the_validation_text_is_the_end_of_the_training_text():
    task = make_task(resolve_task("topics"))
    split = held_out(task).data
    together = torch.cat([split.train_bytes, split.test_bytes])
    assert torch.equal(together, task.data.train_bytes)
    assert len(split.test_bytes) == pytest.approx(0.2 * len(together), abs=1)


def test_data_that_cannot_be_split_are_refused_with_the_way_out():
    class Other:
        settings = resolve_task("digits")
        data = object()

    with pytest.raises(ValueError, match=r"can be split, got digits; valid: a single learn"):
        held_out(Other())  # type: ignore[arg-type]


def recipe_task(name, *overrides):
    return make_recipe_task(load_recipe(name, "small", overrides))


def test_the_validation_windows_of_a_recipes_text_are_the_end_of_its_training_text():
    task = recipe_task("theta_pre_ln", "evaluation.max_samples=8", "evaluation.theta_rows=0")
    split = held_out(task)
    kept, choosing = split.train_windows.tokens, split.test_windows.tokens
    assert torch.equal(torch.cat([kept, choosing]), task.train_windows.tokens)
    assert len(choosing) == pytest.approx(0.2 * len(task.train_windows.tokens), abs=1)
    assert split.train_windows.length == split.test_windows.length == task.length
    before = task.test_windows.tokens
    assert not torch.equal(before, choosing)
    batch = next(split.batches(seed=0))
    assert batch[0].shape == (task.settings.batch_size, task.length)
    model = task.start("softmax", 0)
    assert split.evaluate(model) != task.evaluate(model)
    assert task.test_windows.tokens is before  # the task itself is left alone


STREAM = (
    "data.kind=text_files", "data.train=a.txt", "data.test=a.txt", "data.streaming=true",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        ("theta_pre_ln", (), True),
        ("vit_t_cifar10", (), True),
        ("quest_retrieval", (), False),
        ("gpt2_tinystories", STREAM, False),
    ],
)
def test_rates_are_advised_only_where_they_can_be_chosen(name, overrides, expected):
    task = recipe_task(name, *overrides)
    assert can_hold_out(task) == expected
    summary = {
        "learning_rates": [], "steps": 3, "rows": [{"learning_rate": 0.01}],
        "can_choose_rates": can_hold_out(task),
    }  # fmt: skip
    (sentence,) = _rate_sentences(summary)
    assert sentence.startswith("One learning rate (0.01) and 3 steps for all: a variant may do")
    assert ("--learning-rates 0.003 0.01 0.03" in sentence) == expected
    assert ("no part to choose one by" in sentence) == (not expected)
    if not expected:
        with pytest.raises(ValueError, match="valid: a single learning rate"):
            held_out(task)


def test_a_cell_gets_its_rate_and_its_part_and_leaves_the_task_alone():
    task = loaded_task(settings().tasks[0])
    cell = Cell(
        task="digits", variant="quest", init="default", seed=1, learning_rate=0.5,
        part="validation",
    )  # fmt: skip
    changed = task_of_cell(task, cell)
    assert changed.settings.learning_rate == 0.5
    assert len(changed.data.test_images) == round(0.2 * len(task.data.train_images))
    assert task.settings.learning_rate == 1e-2
    plain = cell.model_copy(update={"learning_rate": None, "part": "test"})
    assert task_of_cell(task, plain) is task


def test_a_grid_over_rates_reports_each_row_at_its_own_and_trains_nothing_twice(
    tmp_path, monkeypatch
):
    plain = compare(settings(learning_rates=()), tmp_path, workers=1)
    assert plain["num_trained"] == 4
    summary = compare(settings(), tmp_path, workers=1)
    records = [json.loads(line) for line in (tmp_path / "cells.jsonl").read_text().splitlines()]
    by_key = {Cell.from_record(record).key: record for record in records}
    assert len(by_key) == len(records)  # nothing twice
    for row in summary["tasks"][0]["rows"]:
        chosen = row["selection"]
        means = {one["learning_rate"]: one["mean"] for one in chosen["tried"]}
        assert set(means) == set(RATES)
        assert means[row["learning_rate"]] == max(means.values())
        for rate, mean in means.items():
            values = [
                r["final"]["accuracy_pct"]
                for r in records
                if (r["variant"], r["part"]) == (row["variant"], "validation")
                and r["learning_rate"] == (None if rate == 1e-2 else rate)
            ]
            assert mean == pytest.approx(sum(values) / 2)
        own = None if row["learning_rate"] == 1e-2 else row["learning_rate"]
        cell = Cell(task="digits", variant=row["variant"], init="default", seed=1,
                    learning_rate=own)  # fmt: skip
        assert row["values"][1] == by_key[cell.key]["final"]["accuracy_pct"]
    text = "\n".join(summary["tasks"][0]["reading"])
    assert "Each row at its own best of 3 learning rates (0.001, 0.01, 0.03), 3 steps" in text
    assert "6 trainings for every row" in text

    def must_not_train(*args):
        raise AssertionError("trained again")

    monkeypatch.setattr(workers, "train_cell", must_not_train)
    again = compare(settings(), tmp_path, workers=1)
    assert again["num_trained"] == 0
    assert again["tasks"] == summary["tasks"]


def test_edges_ties_and_lost_choices_are_said(tmp_path):
    from levelhead.harness.reading import _choice_sentences

    edge = choose([tried(1e-3, 50.0), tried(1e-2, 60.0, num_missing=1, n=1)], UP)
    text = " ".join(_choice_sentences({"selection": edge.as_dict()}))
    assert "best at the highest learning rate of the grid (0.01)" in text
    assert "widen the grid" in text
    assert "1 training died while its learning rate was chosen" in text
    tie = choose([tried(1e-3, 60.0), tried(1e-2, 60.0), tried(1e-1, 1.0, 1, 1)], UP)
    text = " ".join(_choice_sentences({"selection": tie.as_dict()}))
    assert "learning rates 0.001 and 0.01 were equally good; 0.001 is taken" in text
    assert "diverged while its learning rate was chosen: 1 of 2 at 0.1" in text

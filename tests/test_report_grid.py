"""The page of a grid over learning rates: the table's words, the choice, the reported curves."""

from pathlib import Path

import pytest

from levelhead.harness import step_times
from levelhead.harness.compare import compare
from levelhead.harness.config import CompareSettings
from levelhead.harness.tasks import resolve_task
from levelhead.report_comparison import _verdict, run_page
from levelhead.report_runs import read_run


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("runs") / "grid"
    options = {"vit": {"embed_dim": 12, "num_heads": 2, "num_layers": 1}}
    task = resolve_task("digits", options, steps=2, batch_size=8)
    settings = CompareSettings(
        tasks=(task,), variants=("quest",), seeds=1, learning_rates=(1e-3, 1e-2), selection_seeds=1
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(step_times, "TIMING_ROUNDS", 2)
        summary = compare(settings, folder, workers=1)
    return summary["tasks"][0], run_page(read_run(folder))


def figure(page, name):
    return next(f for f in page[1]["figures"]["figures"] if f["id"].startswith(name))


def test_every_rate_that_was_tried_is_shown_with_the_chosen_one(page):
    table = figure(page, "rates-")
    assert len(table["rows"]) == 2 * 2
    chosen = {(row[0], row[2]) for row in table["rows"] if row[-1] == "chosen"}
    assert chosen == {(row["variant"], row["learning_rate"]) for row in page[0]["rows"]}


def test_curves_are_of_the_reported_trainings_alone(page):
    """One seed: the band has no width, which the runs that chose would have given it."""
    for series in figure(page, "loss-")["series"]:
        assert series["low"] == series["high"]


def test_the_rows_hold_the_tables_new_columns(page):
    table = figure(page, "rows-")
    assert {"learning rate", "could show", "p (Holm)", "shown"} <= set(table["columns"])
    assert [row[table["columns"].index("shown")] for row in table["rows"]] == [
        row["shown"] for row in page[0]["rows"]
    ]


def test_what_falls_to_the_correction_is_not_called_better():
    row = {"variant": "quest", "init": "default", "verdict": "better",
           "shown": "better, not after Holm"}  # fmt: skip
    task = {"task": "digits", "rows": [row]}
    assert _verdict([task]) == "Not after correction (Holm): quest on digits."
    older = {key: value for key, value in row.items() if key != "shown"}
    assert _verdict([task | {"rows": [older]}]) == "Better than softmax: quest on digits."

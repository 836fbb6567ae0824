"""A comparison trains each cell once, pairs it, and claims no more than it measured."""

import io
import json
import multiprocessing

import pytest
import yaml
from rich.console import Console

from levelhead.compiled import find_compiler
from levelhead.harness import compare as compare_module
from levelhead.harness import step_times, workers
from levelhead.harness import summary as summary_module
from levelhead.harness.compare import compare
from levelhead.harness.config import DEFAULT_VARIANTS, Cell, CompareSettings, cells
from levelhead.harness.processes import Result
from levelhead.harness.reading import read_task
from levelhead.harness.runs import RunFolder
from levelhead.harness.show import comparison_table, show_summary
from levelhead.harness.statistics import paired_difference
from levelhead.harness.tasks import (
    ImageClassification,
    LanguageModelling,
    make_task,
    resolve_task,
)
from levelhead.harness.workers import StepTiming

TINY = {"vit": {"embed_dim": 12, "num_heads": 2, "num_layers": 1}}


def tiny_settings(variants=("quest", "gate"), seeds=2, steps=3, **more) -> CompareSettings:
    task = resolve_task("digits", TINY, steps=steps, batch_size=8)
    return CompareSettings(tasks=(task,), variants=variants, seeds=seeds, **more)


@pytest.fixture(autouse=True)
def _few_timing_rounds(monkeypatch):
    monkeypatch.setattr(step_times, "TIMING_ROUNDS", 2)
    monkeypatch.setattr(step_times, "TIMING_WARMUP", 1)


def test_a_row_is_the_mean_and_the_paired_difference_of_its_cells(tmp_path):
    summary = compare(tiny_settings(seeds=3), tmp_path, workers=1)
    records = [json.loads(line) for line in (tmp_path / "cells.jsonl").read_text().splitlines()]
    assert len(records) == 9
    assert summary["num_trained"] == 9
    values = {
        variant: [r["final"]["accuracy_pct"] for r in records if r["variant"] == variant]
        for variant in ("softmax", "quest", "gate")
    }
    (task,) = summary["tasks"]
    assert [row["variant"] for row in task["rows"]] == ["softmax", "quest", "gate"]
    for row in task["rows"]:
        own = values[row["variant"]]
        assert row["values"] == own
        assert row["mean"] == pytest.approx(sum(own) / 3)
        if row["variant"] != "softmax":
            differences = [a - b for a, b in zip(own, values["softmax"], strict=True)]
            expected = paired_difference(differences).as_dict()
            got = {k: v for k, v in row["difference"].items() if k != "p_holm"}
            assert got == expected
    added = {row["variant"]: row["params_added"] for row in task["rows"]}
    assert added == {"softmax": 0, "quest": 0, "gate": 12 * 12 + 12}
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


def test_the_folder_says_how_to_make_the_numbers_again(tmp_path):
    settings = tiny_settings(seeds=1)
    compare(settings, tmp_path, workers=1)
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert CompareSettings(**config["settings"]) == settings
    assert {"levelhead", "torch", "python", "commit", "processor"} <= set(config["environment"])


@pytest.mark.parametrize("compile_", ["0", "1"])
def test_the_folder_says_what_compiled_the_kernels(tmp_path, monkeypatch, compile_):
    monkeypatch.setenv("LEVELHEAD_COMPILE", compile_)
    RunFolder(tmp_path).open_grid({"tasks": []})
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert config["environment"]["compiler"] == find_compiler()
    assert compile_ == "1" or find_compiler() is None


def test_finished_cells_are_never_trained_again(tmp_path, monkeypatch):
    compare(tiny_settings(), tmp_path, workers=1)
    before = (tmp_path / "cells.jsonl").read_text()

    def must_not_train(*args):
        raise AssertionError("trained again")

    with monkeypatch.context() as patched:
        patched.setattr(workers, "train_cell", must_not_train)
        again = compare(tiny_settings(), tmp_path, workers=1)
    assert (again["num_trained"], again["num_reused"]) == (0, 6)
    grown = compare(tiny_settings(("quest", "affine"), seeds=3), tmp_path, workers=1)
    assert (grown["num_trained"], grown["num_reused"]) == (5, 4)
    assert (tmp_path / "cells.jsonl").read_text().startswith(before)


def test_an_interrupted_run_goes_on_and_ends_like_an_uninterrupted_one(tmp_path):
    settings = tiny_settings()
    whole = compare(settings, tmp_path / "whole", workers=1)

    steps = 0

    def interrupt(what, count):
        nonlocal steps
        steps += what == "steps"
        if steps == 8:  # in the middle of the third training
            raise KeyboardInterrupt

    broken = tmp_path / "broken"
    with pytest.raises(KeyboardInterrupt):
        compare(settings, broken, workers=1, on_event=interrupt)
    lines = (broken / "cells.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 2
    (broken / "cells.jsonl").write_text("".join(lines) + lines[0][:50])  # and a torn line
    resumed = compare(settings, broken, workers=1)
    assert (resumed["num_trained"], resumed["num_reused"]) == (4, 2)
    for one, two in zip(whole["tasks"][0]["rows"], resumed["tasks"][0]["rows"], strict=True):
        assert one["values"] == two["values"]
        assert one["difference"] == two["difference"]


def test_a_full_disk_keeps_what_was_finished(tmp_path, monkeypatch):
    settings = tiny_settings()
    append = compare_module.RunFolder.append

    def full_at_the_third(self, record):
        if len(self.finished()) == 2:
            raise OSError(28, "No space left on device", str(self.path / "cells.jsonl"))
        append(self, record)

    with monkeypatch.context() as patched:
        patched.setattr(compare_module.RunFolder, "append", full_at_the_third)
        with pytest.raises(OSError, match="No space left on device"):
            compare(settings, tmp_path, workers=1)
    assert compare(settings, tmp_path, workers=1)["num_reused"] == 2


def test_everything_is_refused_before_anything_is_trained(tmp_path):
    with pytest.raises(ValueError, match="unknown variant term 'nope'; known: softmax"):
        tiny_settings(("quest", "nope"))
    with pytest.raises(ValueError, match="unknown initializer 'nope'; known: default"):
        compare(tiny_settings(inits=("nope",)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_of_other_settings_is_refused(tmp_path):
    compare(tiny_settings(seeds=1), tmp_path, workers=1)
    with pytest.raises(ValueError, match="digits with steps=3: one folder has one setting"):
        compare(tiny_settings(seeds=1, steps=4), tmp_path, workers=1)


def test_settings_put_the_baseline_first_and_names_in_one_form():
    settings = tiny_settings(("gate + quest", "softmax", "quest+gate"))
    assert settings.variants == ("softmax", "quest + gate")
    assert tiny_settings(DEFAULT_VARIANTS).variants == DEFAULT_VARIANTS
    with pytest.raises(ValueError, match="each task needs a name of its own, got digits, digits"):
        CompareSettings(tasks=settings.tasks * 2)
    with pytest.raises(ValueError, match="colour"):
        CompareSettings(tasks=settings.tasks, colour="red")  # type: ignore[call-arg]


def test_the_grid_finishes_whole_seeds_first():
    keys = [(cell.seed, cell.variant) for cell in cells(tiny_settings(("quest",), seeds=2))]
    assert keys == [(0, "softmax"), (0, "quest"), (1, "softmax"), (1, "quest")]


def test_default_folders_differ_by_task_only():
    folder = tiny_settings().default_folder()
    assert tiny_settings(("affine",), seeds=9).default_folder() == folder
    assert tiny_settings(steps=4).default_folder() != folder
    assert folder.parent.name == "runs"


def test_inits_are_crossed_with_variants_and_measured_against_the_plain_start(tmp_path):
    settings = tiny_settings(("quest",), inits=("default", "conditioned"))
    (task,) = compare(settings, tmp_path, workers=1)["tasks"]
    names = [(row["variant"], row["init"], row["verdict"] == "baseline") for row in task["rows"]]
    assert names == [
        ("softmax", "default", True),
        ("quest", "default", False),
        ("softmax", "conditioned", False),
        ("quest", "conditioned", False),
    ]
    assert any(sentence.startswith("quest, conditioned: ") for sentence in task["reading"])


def test_steps_are_timed_among_the_trainings_and_counted_as_what_they_are(tmp_path, monkeypatch):
    """By whoever is free first: the parent has nothing left to time."""
    asked = []
    real = workers.train_all

    def seen(jobs, *arguments):
        asked.extend(jobs)
        return real(jobs, *arguments)

    monkeypatch.setattr(compare_module, "train_all", seen)
    summary = compare(tiny_settings(), tmp_path, workers=1)
    assert [isinstance(job, StepTiming) for job in asked] == [False] * 6 + [True]
    assert asked[-1].variants == ("softmax", "quest", "gate")
    times = json.loads((tmp_path / "timings.json").read_text())["digits"]
    assert [row["step_time_ratio"] for row in summary["tasks"][0]["rows"]] == [
        times[name]["ratio"] for name in ("softmax", "quest", "gate")
    ]
    spent = summary["time"]
    assert spent["num_trained"] == summary["num_trained"] == 6
    assert spent["worker_s"]["step_timing"] > 0
    assert sum(spent["worker_s"].values()) == pytest.approx(spent["wall_s"], abs=0.05)
    asked.clear()
    compare(tiny_settings(seeds=3), tmp_path, workers=1)
    assert not any(isinstance(job, StepTiming) for job in asked)


def test_step_times_whose_process_died_are_measured_by_the_parent(tmp_path, monkeypatch):
    def dying_timer(jobs, do_job, on_steps, retries):
        for job in jobs:
            value = None if isinstance(job, StepTiming) else do_job(job, lambda: None)
            yield Result(job=job, value=value, deaths=() if value else ("killed",))

    monkeypatch.setattr(workers, "run_here", dying_timer)
    summary = compare(tiny_settings(seeds=1), tmp_path, workers=1)
    assert summary["num_unfinished"] == 0
    assert all(row["step_ms"] > 0 for row in summary["tasks"][0]["rows"])


def test_step_times_are_ratios_to_the_baseline():
    task = make_task(resolve_task("digits", TINY))
    times = step_times.step_times(task, ["softmax", "quest"])
    assert times["softmax"]["ratio"] == 1.0
    assert times["quest"]["ratio_min"] <= times["quest"]["ratio"] <= times["quest"]["ratio_max"]
    assert times["quest"]["median_s"] > 0


def record(variant, seed, accuracy, diverged=None, concentration=0.1):
    return {
        "variant": variant,
        "seed": seed,
        "final": None if accuracy is None else {"accuracy_pct": accuracy},
        "diverged_step": diverged,
        "num_params": 100,
        "concentration_start": concentration,
        "concentration_end": 0.2,
        "versions": {"levelhead": "1", "commit": "a", "torch": "2"},
    }


def summary_of(values: dict[str, list], **more) -> dict:
    """Summarise made-up results, so that every kind of outcome can be had."""
    seeds = len(values["softmax"])
    settings = tiny_settings(tuple(values), seeds=seeds)
    task = make_task(settings.tasks[0])
    records = {
        Cell(task="digits", variant=variant, init="default", seed=seed).key: record(
            variant, seed, accuracy, diverged=4 if accuracy is None else None, **more
        )
        for variant, accuracies in values.items()
        for seed, accuracy in enumerate(accuracies)
    }
    timing = {"ratio": 1.0, "ratio_min": 1.0, "ratio_max": 1.0, "median_s": 0.01}
    timings = {"digits": dict.fromkeys(values, timing)}
    (summed_up,) = summary_module.summarise({"digits": task}, settings, records, timings)
    return summed_up


def verdicts(summary) -> dict[str, str]:
    return {row["variant"]: row["verdict"] for row in summary["rows"]}


def test_words_follow_the_interval():
    summary = summary_of(
        {
            "softmax": [90.0, 92.0, 88.0],
            "quest": [95.1, 97.0, 92.9],
            "gate": [91.0, 89.0, 89.0],
            "spectral": [60.0, 62.1, 58.1],
            "affine": [90.0, 92.0, 88.0],
            "precondition": [91.0, 93.0, 89.0],
        }
    )
    assert verdicts(summary) == {
        "softmax": "baseline",
        "quest": "better",
        "gate": "no difference shown",
        "spectral": "worse",
        "affine": "not judged",
        "precondition": "not judged",
    }
    text = "\n".join(summary["reading"])
    quest = "quest: better than softmax: +5.00 points (+4.75 to +5.25, bootstrap +4.90 to +5.10, n"
    assert f"{quest} = 3)." in text
    assert "gate: no difference shown: -0.33 points" in text
    could_show = summary["rows"][2]["difference"]["detectable"]
    assert f"a true difference of {could_show:.2f} shows in 80% of such experiments" in text
    assert "precondition: +1.00 points in each of 3 pairs, so chance cannot be estimated" in text
    assert "3 seeds are few" in text
    assert "corrected for that (Holm): quest, spectral stand." in text


def test_better_is_up_for_accuracy_and_down_for_bits():
    up = paired_difference([1.0, 1.1, 1.2])
    assert summary_module.verdict(up, ImageClassification.metric) == "better"
    assert summary_module.verdict(up, LanguageModelling.metric) == "worse"
    down = paired_difference([-1.0, -1.1, -1.2])
    assert summary_module.verdict(down, ImageClassification.metric) == "worse"
    assert summary_module.verdict(down, LanguageModelling.metric) == "better"


def test_one_seed_claims_nothing():
    summary = summary_of({"softmax": [90.0], "quest": [99.0]})
    assert verdicts(summary)["quest"] == "not judged"
    assert "one pair of runs, which shows nothing" in summary["reading"][0]
    assert "1 seed is few" in "\n".join(summary["reading"])


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_narrow_terminal_breaks_cells_and_cuts_none(width):
    summary = summary_of({"softmax": [90.0, 92.0], "quest + precondition": [91.0, 92.5]})
    console = Console(width=width, file=io.StringIO())
    console.print(comparison_table(summary))
    printed = console.file.getvalue()
    assert "\u2026" not in printed
    assert max(map(len, printed.splitlines())) <= width
    letters = "".join(
        line.split("\u2502")[1].strip() for line in printed.splitlines() if "\u2502" in line
    )
    assert "quest+precondition" in letters.replace(" ", "")


def test_divergence_is_said_and_its_pairs_are_left_out():
    summary = summary_of({"softmax": [90.0, 91.0, 92.0], "quest": [91.0, None, 93.5]})
    row = summary["rows"][1]
    assert row["diverged_seeds"] == [1]
    assert (row["n"], row["difference"]["n"]) == (2, 2)
    assert "quest: diverged with seed 1" in "\n".join(summary["reading"])
    nothing = summary_of({"softmax": [90.0, 91.0], "quest": [None, None]})
    assert nothing["rows"][1]["mean"] is None
    assert "no seed finished" in nothing["reading"][0]
    json.dumps(nothing, allow_nan=False)


def test_a_diverged_baseline_leaves_nothing_to_compare():
    summary = summary_of({"softmax": [None, None], "quest": [90.0, 91.0]})
    assert verdicts(summary)["quest"] == "not judged"


def test_saturation_is_said_with_its_number():
    values = {"softmax": [90.0, 91.0], "spectral": [80.0, 82.0]}
    text = "\n".join(summary_of(values, concentration=0.93)["reading"])
    assert (
        "spectral: saturated from the start: a row puts 0.93 of its attention on one key" in text
    )
    assert "spectral(strength=1)" in text
    assert "saturated" not in "\n".join(summary_of(values, concentration=0.5)["reading"])


def test_mixed_versions_are_said():
    summary = summary_of({"softmax": [90.0, 91.0], "quest": [90.0, 92.0]})
    assert not any("versions" in sentence for sentence in summary["reading"])
    assert any("2 versions" in sentence for sentence in read_task(summary | {"num_versions": 2}))


NO_CELL = Cell(task="digits", variant="softmax", init="default", seed=0)


def dead(jobs, train_job, on_steps, retries):
    """Stand in for the processes: quest's first seed dies always, gate's second dies once."""
    for job in jobs:
        cell = job[1] if isinstance(job, tuple) else NO_CELL  # where steps are timed
        if (cell.variant, cell.seed) == ("quest", 0):
            yield Result(job=job, deaths=("killed by SIGKILL",) * (retries + 1))
            continue
        deaths = ("killed by SIGKILL",) if (cell.variant, cell.seed) == ("gate", 1) else ()
        yield Result(job=job, value=train_job(job, lambda: None), deaths=deaths)


def test_a_training_that_dies_is_said_left_out_and_tried_again_by_the_next_call(
    tmp_path, monkeypatch
):
    with monkeypatch.context() as patched:
        patched.setattr(workers, "run_here", dead)
        summary = compare(tiny_settings(), tmp_path, workers=1, retries=1)
    counts = [summary[f"num_{name}"] for name in ("trained", "reused", "unfinished")]
    assert counts == [5, 0, 1]
    _, quest, gate = summary["tasks"][0]["rows"]
    assert quest["unfinished"] == [{"seed": 0, "deaths": ["killed by SIGKILL"] * 2}]
    assert (quest["n"], quest["difference"]["n"], quest["values"][0]) == (1, 1, None)
    assert gate["retried"] == [{"seed": 1, "deaths": ["killed by SIGKILL"]}]
    assert (gate["n"], gate["unfinished"]) == (2, [])
    text = "\n".join(summary["tasks"][0]["reading"])
    assert "quest: seed 0 is missing: its process died 2 times (killed by SIGKILL)" in text
    assert "gate: seed 1 was trained again, from its start: its process died 1 time" in text
    console = Console(width=160, file=io.StringIO())
    show_summary(console, summary)
    printed = console.file.getvalue()
    assert "1 lost" in printed
    assert "1 again" in printed
    assert "1 died at every attempt (the same command tries again)" in printed
    lost = json.loads((tmp_path / "deaths.jsonl").read_text())
    assert (lost["variant"], lost["seed"]) == ("quest", 0)
    whole = compare(tiny_settings(), tmp_path, workers=1)
    assert (whole["num_trained"], whole["num_reused"], whole["num_unfinished"]) == (1, 5, 0)
    assert whole["tasks"][0]["rows"][2]["retried"] == gate["retried"]  # kept with its record


def test_a_baseline_that_never_finishes_leaves_a_table_that_says_so(tmp_path, monkeypatch):
    def all_die(jobs, train_job, on_steps, retries):
        yield from (Result(job=job, deaths=("killed by SIGKILL",)) for job in jobs)

    monkeypatch.setattr(workers, "run_here", all_die)
    summary = compare(tiny_settings(), tmp_path, workers=1, retries=0)
    assert summary["num_unfinished"] == 6
    assert summary["time"]["outside_frac"] is None
    show_summary(Console(file=io.StringIO()), summary)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


def test_holm_is_over_all_tasks_together():
    values = {"softmax": [90.0, 92.0, 88.0], "quest": [95.1, 97.0, 92.9]}
    (alone,) = [summary_of(values)]
    settings = tiny_settings(("quest",), seeds=3)
    other = settings.tasks[0].model_copy(update={"data": "other"})
    both = settings.model_copy(update={"tasks": (settings.tasks[0], other)})
    task = make_task(settings.tasks[0])
    second = ImageClassification(other, task.data)
    records = {
        Cell(task=name, variant=variant, init="default", seed=seed).key: record(
            variant, seed, accuracy
        )
        for name in ("digits", "other")
        for variant, accuracies in values.items()
        for seed, accuracy in enumerate(accuracies)
    }
    timing = dict.fromkeys(values, {"ratio": 1, "ratio_min": 1, "ratio_max": 1, "median_s": 1})
    tasks = {"digits": task, "other": second}
    timings = dict.fromkeys(tasks, timing)
    for summed_up in summary_module.summarise(tasks, both, records, timings):
        p_holm = summed_up["rows"][1]["difference"]["p_holm"]
        assert p_holm == pytest.approx(2 * alone["rows"][1]["difference"]["p_holm"])
        assert "2 comparisons were made in the whole grid" in "\n".join(summed_up["reading"])


def test_what_does_not_survive_holm_is_marked():
    weak = [90.0 + step for step in (0.9, 1.0, 1.35)]
    values = {"softmax": [90.0] * 3, "quest": weak}
    assert summary_of(values)["rows"][1]["shown"] == "better"
    noise = {f"soft_cap(cap={cap})": [90.5, 89.0, 90.2] for cap in (20.0, 30.0, 40.0, 50.0)}
    summary = summary_of(values | noise)
    row = summary["rows"][1]
    assert (row["verdict"], row["stands"]) == ("better", False)
    assert row["shown"] == "better, not after Holm"
    assert "quest: better than softmax, not after Holm: +1.08" in "\n".join(summary["reading"])


def test_an_older_folder_opens_and_goes_on(tmp_path):
    """Records and settings as they were before rates, parts and clocks: nothing trains again."""
    compare(tiny_settings(seeds=1), tmp_path, workers=1)
    path = tmp_path / "cells.jsonl"
    newer = {"learning_rate", "part", "clock_s"}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert newer <= set(lines[0])
    old = [{key: v for key, v in line.items() if key not in newer} for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in old))
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    for key in ("learning_rates", "selection_seeds"):
        del config["settings"][key]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    summary = compare(tiny_settings(seeds=1), tmp_path, workers=1)
    assert (summary["num_trained"], summary["num_reused"]) == (0, 3)
    grown = yaml.safe_load((tmp_path / "config.yaml").read_text())["settings"]
    assert CompareSettings(**grown) == tiny_settings(seeds=1)


@pytest.mark.slow
def test_a_worker_killed_in_a_training_costs_that_attempt_alone(tmp_path):
    """A real process, a real SIGKILL, while it reports its first steps."""
    settings = tiny_settings(("quest",), seeds=2, steps=300)
    whole = compare(settings, tmp_path / "whole", workers=1)
    killed = []

    def kill_the_first(what, count):
        if what == "steps" and count > 0 and not killed:
            killed.append(multiprocessing.active_children()[0])
            killed[0].kill()

    summary = compare(settings, tmp_path / "killed", workers=2, on_event=kill_the_first)
    rows = summary["tasks"][0]["rows"]
    again = [again for row in rows for again in row["retried"]]
    assert [len(one["deaths"]) for one in again] == [1]
    assert again[0]["deaths"][0].startswith("killed by SIGKILL")
    assert [row["values"] for row in rows] == [r["values"] for r in whole["tasks"][0]["rows"]]
    lines = (tmp_path / "killed" / "cells.jsonl").read_text().splitlines()
    assert len(lines) == 4


@pytest.mark.slow
def test_processes_give_the_numbers_of_one_process(tmp_path):
    settings = tiny_settings(("quest", "affine"))
    here = compare(settings, tmp_path / "one", workers=1)
    there = compare(settings, tmp_path / "two", workers=2)
    for one, two in zip(here["tasks"][0]["rows"], there["tasks"][0]["rows"], strict=True):
        assert one["values"] == two["values"]

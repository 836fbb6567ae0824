"""The benchmark runs at a small size and its record says what it must."""

import json

import pytest

from levelhead.bench import monitor

SMALL = ["--layers", "1", "--tokens", "16", "--images", "0", "--repeats", "1", "--steps", "30"]


@pytest.fixture(autouse=True)
def short_stretch(monkeypatch):
    monkeypatch.setattr(monitor, "CADENCE_STEPS", 4)
    monkeypatch.setattr(monitor, "STRETCH", 2)
    monkeypatch.setattr(monitor, "VIT_STEPS", 2)
    monkeypatch.setattr(monitor, "VOCAB_SIZE", 101)


def test_small_run_writes_a_record_with_every_figure(tmp_path, capsys):
    path = tmp_path / "record.json"
    code = monitor.main([*SMALL, "--out", str(path)])
    record = json.loads(path.read_text())
    results = record["results"]
    assert len(results) == len({row["name"] for row in results}) == 7
    assert record["is_complete"]
    assert len(record["part_seconds"]) == 5
    (flat,) = [row for row in results if "live tensors" in row["name"]]
    assert flat["ratio"] == 1.0
    assert code == (0 if all(row["holds"] for row in results) else 1)
    assert len(capsys.readouterr().out.splitlines()) == 7


def test_every_figure_of_the_full_run_has_its_part(tmp_path):
    parts = monitor.parts_of(12, 512, 8, 7, 1000, tmp_path)
    assert list(parts) == [
        "small ViT, steps", "small ViT, cadence", "growth",
        "GPT-2, 12 layers, width 768, 512 tokens",
        "GPT-2, 12 layers, width 768, 512 tokens, cadence", "diagnose", "memory", "Jacobians",
    ]  # fmt: skip


def test_an_interrupted_run_keeps_what_it_has():
    kept = []

    def stopped():
        raise KeyboardInterrupt

    parts = {"first": lambda: [{"name": "x", "holds": True, "ratio": 1.0}], "second": stopped}
    with pytest.raises(KeyboardInterrupt):
        monitor.run(
            parts, lambda record: kept.append(json.loads(json.dumps(record))),
            monitor.empty_record({}),
        )  # fmt: skip
    (record,) = kept
    assert [row["name"] for row in record["results"]] == ["x"]
    assert not record["is_complete"]


def test_a_run_goes_on_with_its_record_and_repeats_a_part_that_is_taken_out(tmp_path):
    path, calls = tmp_path / "record.json", []

    def part(name):
        def measure():
            calls.append(name)
            return [{"name": name, "holds": True, "ratio": 1.0}]

        return measure

    def keep(record):
        path.write_text(json.dumps(record))

    parts = {name: part(name) for name in ("first", "second")}
    monitor.run({"first": parts["first"]}, keep, monitor.record_at(path, {}))
    assert monitor.run(parts, keep, monitor.record_at(path, {}))["is_complete"]
    assert calls == ["first", "second"]
    record = json.loads(path.read_text())
    del record["part_seconds"]["first"]
    keep(record)
    found = monitor.run(parts, keep, monitor.record_at(path, {}))
    assert calls == ["first", "second", "first"]
    assert sorted(row["name"] for row in found["results"]) == ["first", "second"]
    keep(record | {"torch": "1.0"})
    assert monitor.record_at(path, {})["part_seconds"] == {}
    keep(record)
    assert monitor.record_at(path, {"layers": 2})["part_seconds"] == {}


def test_the_cadence_is_worked_out_of_the_two_kinds_of_steps(tmp_path):
    measured, cadence = monitor.measure_step("x", *monitor.small_vit(), 3, tmp_path, 2)
    assert cadence["ratio"] == pytest.approx((49 * cadence["between"] + measured["ratio"]) / 50)
    assert cadence["how"] == "49 steps in between and a measured one, each timed by itself"
    lines = (tmp_path / "measured.jsonl").read_text().splitlines()
    assert sum('"scalars"' in line for line in lines) == (3 + 1) * 2  # all of them, once warm
    assert '"scalars"' not in (tmp_path / "between.jsonl").read_text()


def test_a_monitor_counts_on_through_its_stretches(tmp_path, monkeypatch):
    monkeypatch.setattr(monitor, "CADENCE", 3)
    (row,) = monitor.measure_cadence("x", *monitor.small_vit(), tmp_path, 2, 4)
    assert row["name"] == "x: every 3 / none, over 8 steps"
    assert row["measured_steps"] == 3  # steps 3, 6 and 9; that of the warm-up does not count
    assert row["ratio_min"] <= row["ratio"] <= row["ratio_max"]

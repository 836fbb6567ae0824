"""The report without a browser: what it holds, that names stay names, that nothing is fetched."""

import base64
import hashlib
import json
import math
import random
import re
import shutil
import statistics
import time
from html.parser import HTMLParser

import numpy as np
import pytest

from levelhead import cli
from levelhead.diagnose_rows import ROWS, THETA
from levelhead.diagnose_weights import SPECTRUM
from levelhead.diagnosis import Diagnosis, Finding
from levelhead.measure.spikes import running_spikes
from levelhead.report import render_diagnosis, render_run
from levelhead.report_curves import banded
from levelhead.report_diagnosis import diagnosis_page, flat_meta
from levelhead.report_layers import lay_out_layers, short_names
from levelhead.report_metrics import FAMILIES, QUANTITIES, quantity_of, split_statistic
from levelhead.report_render import script_json, short_number
from reporting import HOSTILE, LAYER_METRICS, METRICS, made_up_diagnosis, real_run


class Page(HTMLParser):
    """A page as a browser's parser sees it: elements, attributes, text, scripts."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.elements, self.scripts, self.text, self.within = [], [], "", []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.within.append(tag)
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag):
        if tag in self.within:
            while self.within.pop() != tag:
                pass

    def handle_data(self, data):
        if self.within and self.within[-1] == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif "style" not in self.within:
            self.text += data

    @property
    def data(self):
        return json.loads(next(text for attrs, text in self.scripts if attrs.get("id") == "data"))


@pytest.fixture(scope="module")
def page():
    return Page(render_diagnosis(made_up_diagnosis()))


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "digits-run"
    with pytest.MonkeyPatch.context() as monkeypatch:
        real_run(folder, monkeypatch)
    return folder


@pytest.fixture
def run_copy(run_folder, tmp_path):
    return shutil.copytree(run_folder, tmp_path / "copy")


def hostile_diagnosis():
    finding = Finding(HOSTILE, "warning", HOSTILE + "1", 0, HOSTILE, 1.0, 2.0, HOSTILE, HOSTILE,
                      HOSTILE)  # fmt: skip
    diagnosis = made_up_diagnosis(
        name=HOSTILE + "{}",
        verdict=HOSTILE,
        findings=[finding],
        meta={"model": HOSTILE, HOSTILE: HOSTILE, "not_measured": [HOSTILE]},
        curves={HOSTILE: [(1, 2.0), (2, 3.0)]},
    )
    record = diagnosis.records[1]
    diagnosis.records.append(
        type(record)(**{**vars(record), "metric": HOSTILE, "convention": HOSTILE})
    )
    return diagnosis


def assert_only_own_scripts(html):
    """Two script elements and no other way to run anything."""
    page = Page(html)
    assert [attrs for attrs, _ in page.scripts] == [
        {"type": "application/json", "id": "data"}, {},
    ]  # fmt: skip
    assert not [a for _, attrs in page.elements for a in attrs if a.startswith("on")]
    return page


def test_a_hostile_name_is_shown_and_not_run():
    page = assert_only_own_scripts(render_diagnosis(hostile_diagnosis()))
    assert page.text.count(HOSTILE) >= 10
    layers = [layer["name"] for layer in page.data["heads"]["layers"]]
    assert layers == [f"{HOSTILE}{number}" for number in range(3)]
    assert HOSTILE in {metric["name"] for metric in page.data["heads"]["metrics"]}


def test_the_hostile_name_would_run_without_escaping():
    html = render_diagnosis(hostile_diagnosis())
    with pytest.raises(AssertionError):
        assert_only_own_scripts(html.replace("\\u003c", "<").replace("\\u003e", ">"))
    with pytest.raises(AssertionError):
        assert_only_own_scripts(html.replace("&lt;", "<").replace("&gt;", ">"))


def test_hostile_names_of_a_run_are_shown_and_not_run(run_copy):
    for name in ("cells.jsonl", "summary.json", "config.yaml"):
        text = (run_copy / name).read_text()
        as_json = json.dumps(HOSTILE)[1:-1]
        as_yaml = json.dumps(HOSTILE)
        changed = text.replace("- quest", f"- {as_yaml}").replace("quest", as_json)
        (run_copy / name).write_text(text.replace("- quest", f"- {as_yaml}")
                                     if name == "config.yaml" else changed)  # fmt: skip
    page = assert_only_own_scripts(render_run(run_copy))
    assert HOSTILE in page.text
    labels = {s["label"] for f in page.data["figures"] for s in f.get("series", [])}
    assert labels == {"softmax", HOSTILE, "gate"}


def test_half_a_surrogate_pair_and_control_characters_are_written(tmp_path):
    diagnosis = made_up_diagnosis(name="a\ud800\x00\u2028{}")
    diagnosis.to_html(tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text())
    assert page.data["heads"]["layers"][1]["name"] == "a\ud800\x00\u20281"


def test_nothing_is_fetched(page):
    html = render_diagnosis(made_up_diagnosis())
    outside = set(re.findall(r"\bhttps?://[^\s\"'<>)]*", html))
    assert outside == {"http://www.w3.org/2000/svg"}  # a name, not an address
    for tag, attrs in page.elements:
        assert "src" not in attrs, tag
        assert attrs.get("href", "#").startswith(("#", "data:,"))
    assert "@import" not in html
    assert "url(" not in html.replace("url(#", "")


def test_the_policy_allows_the_pages_own_script_and_style_only(page):
    policy = next(
        attrs["content"] for tag, attrs in page.elements if attrs.get("http-equiv") is not None
    )
    script = page.scripts[1][1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy


def test_verdict_and_findings_come_before_every_figure():
    html = render_diagnosis(made_up_diagnosis())
    places = [html.index(text) for text in ("Unhealthy: saturated softmax</p>", 'id="findings"',
              "the head looks at one key", "<figure")]  # fmt: skip
    assert places == sorted(places)


def test_a_finding_says_where_what_why_and_what_to_try(page):
    for words in ("blocks.1.attn, head 2", "the worst of 3 heads", "0.01", "entropy_nats_q50",
                  "threshold 0.1", "the head looks at one key", "convert it", "a paper",
                  "blocks.2: no batch"):  # fmt: skip
        assert words in page.text


def test_every_number_is_in_the_page(page):
    diagnosis = made_up_diagnosis()
    metrics = {metric["name"]: metric for metric in page.data["heads"]["metrics"]}
    assert set(metrics) == {*METRICS, *LAYER_METRICS}
    for record in diagnosis.records:
        metric = metrics[record.metric]
        by_head = record.head >= 0
        row = metric["values"][record.layer_idx] if by_head else metric["whole"]
        shown = float(row[record.head if by_head else record.layer_idx])
        assert shown == pytest.approx(record.value, rel=1e-8, nan_ok=True)


def test_every_figure_has_its_convention_and_its_equation(page):
    figures = [f for f in page.data["figures"] if f["kind"] in ("depth", "lines", "intervals")]
    assert len(figures) >= 8
    for figure in figures:
        assert all(figure["conventions"]), figure["title"]
        assert figure["equations"], figure["title"]
        for _, equation in figure["equations"]:
            assert equation in page.text


def test_surrogate_and_bound_are_named_as_what_they_are(page):
    figure = next(f for f in page.data["figures"] if f["id"] == "depth-jacobian-jacobian")
    labels = {s["middle"]: (s["label"], s["style"]) for s in figure["series"]}
    assert labels == {
        "jacobian_kappa": ("\u03ba(J)", "measured"),
        "jacobian_bound": ("valid bound on \u03ba(J)", "bound"),
        "jacobian_surrogate": ("the papers' surrogate (not a bound)", "surrogate"),
    }
    assert "It is not a bound" in page.text


def test_the_two_ends_of_theta_are_one_series(page):
    figure = next(f for f in page.data["figures"] if f["id"] == "depth-sensitivity-theta")
    (series,) = figure["series"]
    assert series["middle"] == "theta_lower_q50"
    assert series["middle_upper"] == "theta_upper_q50"
    assert (series["low"], series["high"]) == ("theta_lower_q10", "theta_upper_q99")


def test_a_metric_nobody_knows_is_still_shown(page):
    assert "my_own_number" in page.text
    assert "how my_own_number" in page.text


@pytest.mark.parametrize(
    ("metric", "key", "statistic"),
    [
        ("entropy_nats_q50", "entropy nats", "q50"),
        ("normalized_entropy_mean", "normalized entropy", "mean"),
        ("p_max_q90", "p max", "q90"),
        ("p_max", "p max", ""),
        ("score_max_max", "score max", "max"),
        ("score_max", "score max", ""),
        ("raw_score_max", "raw score max", ""),
        ("theta_upper_q99", "theta", "q99"),
        ("jacobian_kappa", "jacobian", ""),
        ("jacobian_bound", "jacobian bound", ""),
        ("jacobian_surrogate", "surrogate", ""),
        ("kappa_qk", "kappa", ""),
        ("effective_rank_vo", "effective rank", ""),
        ("rank", "rank", ""),
        ("head_similarity_max", "head similarity max", ""),
    ],
)
def test_names_of_metrics_are_read(metric, key, statistic):
    assert quantity_of(metric).key == key
    assert split_statistic(metric)[1] == statistic


def test_every_measure_of_a_diagnosis_has_words_and_a_family():
    names = [f"{name}_{s}" for name, taken in ROWS.items() for s in taken]
    names += [f"theta_lower_{s}" for s in THETA] + [f"{name}_q" for name in SPECTRUM]
    names += ["head_similarity_max", "output_share", "raw_score_max"]
    for name in names:
        assert quantity_of(name).words, name
    assert {entry.family for entry in QUANTITIES} <= set(FAMILIES)


def test_a_large_model_is_small_on_the_wire():
    started = time.process_time()
    html = render_diagnosis(made_up_diagnosis(num_layers=24, num_heads=16))
    assert len(html.encode()) < 1_000_000
    assert time.process_time() - started < 10


@pytest.mark.parametrize(
    "parts", [{"records": []}, {"records": [], "findings": [], "meta": {}, "curves": {}}]
)
def test_a_diagnosis_without_numbers_is_still_a_page(parts):
    page = Page(render_diagnosis(made_up_diagnosis(**parts)))
    assert "Unhealthy: saturated softmax" in page.text


def test_numbers_of_the_whole_model_are_told_apart():
    diagnosis = made_up_diagnosis()
    record = type(diagnosis.records[0])("", -1, -1, "post_ln_contraction_depth", 0.25, "product")
    diagnosis.records.append(record)
    page = Page(render_diagnosis(diagnosis))
    assert len(page.data["heads"]["layers"]) == 3
    assert ["post_ln_contraction_depth", 0.25, "product"] in page.data["heads"]["of_model"]
    assert "post ln contraction depth (whole model)" in page.text


def test_layers_may_differ_in_heads():
    diagnosis = made_up_diagnosis()
    kept = [r for r in diagnosis.records if r.layer_idx != 1 or r.head < 2]
    page = Page(render_diagnosis(made_up_diagnosis(records=kept)))
    metric = page.data["heads"]["metrics"][0]
    assert [sum(v is not None for v in row) for row in metric["values"]] == [5, 2, 5]


def test_a_number_that_is_the_same_everywhere_needs_no_chart(page):
    titles = [figure["title"] for figure in page.data["figures"]]
    assert not [title for title in titles if "num_keys" in title]
    assert "7 everywhere" in page.text


def test_script_json_is_strict_and_holds_no_markup():
    text = script_json({"a": [math.inf, -math.inf, math.nan, 1 / 3, 2.0], "<b>": "</script>&"})
    assert not set("<>&") & set(text)
    assert json.loads(text) == {
        "a": ["inf", "-inf", "nan", 0.333333333, 2], "<b>": "</script>&",
    }  # fmt: skip


def test_short_numbers():
    shown = [short_number(v) for v in (0.123456, 83929.6, 1e-9, math.inf, -math.inf, math.nan)]
    assert shown == ["0.1235", "83,930", "1e-09", "infinite", "minus infinite", "not a number"]


def test_short_names_keep_what_differs():
    assert short_names(["m.0.attn", "m.1.attn"]) == ["0", "1"]
    assert short_names(["e.0.self", "d.0.self", "d.0.cross"]) == ["e.self", "d.self", "d.cross"]
    assert short_names(["a", "b.c"]) == ["a", "b.c"]
    assert short_names(["only.one"]) == ["only.one"]


def test_flat_meta_nests_names_and_sums_up_what_repeats():
    meta = {"a": {"b": 1, "c": {"d": [1, 2]}}, "scale": {"x": 0.5, "y": 0.5}, "none": None}
    assert flat_meta(meta) == [("a / b", "1"), ("a / c / d", "1, 2"), ("scale", "0.5 (all 2)")]
    tasks = {"tasks": [{"data": "digits", "model": {"num_heads": 3, "width": 12}}]}
    assert flat_meta(tasks) == [
        ("tasks / data", "digits"), ("tasks / model", "num heads 3, width 12"),
    ]  # fmt: skip
    assert flat_meta({"tasks": [{"a": 1}, {"a": 2}]}) == [
        ("tasks 1 / a", "1"),
        ("tasks 2 / a", "2"),
    ]


WHISPER = [
    f"model.{side}.layers.{n}.{kind}"
    for side, kinds in (("encoder", ["self_attn"]), ("decoder", ["self_attn", "encoder_attn"]))
    for n in range(3)
    for kind in kinds
]


def test_layers_of_a_kind_stand_together_under_a_heading():
    laid_out = lay_out_layers(WHISPER, range(len(WHISPER)))
    assert laid_out["kinds"] == [
        {"title": "encoder self_attn", "layers": [0, 1, 2]},
        {"title": "decoder self_attn", "layers": [3, 5, 7]},
        {"title": "decoder encoder_attn", "layers": [4, 6, 8]},
    ]
    assert [layer["name"] for layer in laid_out["layers"]] == WHISPER
    assert [layer["label"] for layer in laid_out["layers"]] == list("012001122")


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["h.0.attn", "h.1.attn", "h.2.attn"], ["0", "1", "2"]),  # one kind
        (["s.0.b.0.a", "s.0.b.1.a", "s.1.b.0.a"], ["0.0", "0.1", "1.0"]),
        (["down", "mid", "up.0", "up.1"], ["down", "mid", "up.0", "up.1"]),  # a kind of one layer
        (["attn"], ["attn"]),
        ([], []),
    ],
)
def test_layers_without_a_few_kinds_have_no_heading(names, labels):
    laid_out = lay_out_layers(names, range(len(names)))
    assert laid_out["kinds"] == [{"title": "", "layers": list(range(len(names)))}]
    assert [layer["label"] for layer in laid_out["layers"]] == labels


def test_every_layer_is_shown_once(page):
    heads = page.data["heads"]
    shown = [layer for kind in heads["kinds"] for layer in kind["layers"]]
    assert sorted(shown) == list(range(len(heads["layers"])))


def finding_at(layer, head, value, meaning="the head looks at one key"):
    return Finding(
        "saturated_softmax", "warning", f"blocks.{layer}.attn", head, "entropy_nats_q50", value,
        0.1, "a paper", meaning, "convert it", 1,
    )  # fmt: skip


def test_the_same_finding_at_several_layers_is_one_card_with_all_numbers():
    findings = [finding_at(0, 1, 0.02), finding_at(1, 3, 0.0437), finding_at(2, 0, 0.01, "other")]
    laid_out = diagnosis_page(made_up_diagnosis(findings=findings))
    first, second = laid_out["findings"]
    assert (first["where"], first["value"]) == ("blocks.0.attn, head 1", 0.02)
    assert [(o["where"], o["value"]) for o in first["others"]] == [
        ("blocks.1.attn, head 3", 0.0437),
    ]  # fmt: skip
    assert (second["where"], second["others"]) == ("blocks.2.attn, head 0", [])
    page = Page(render_diagnosis(made_up_diagnosis(findings=findings)))
    assert "Also at 1 other place:" in page.text
    assert "0.0437" in page.text
    assert dict(laid_out["tiles"])["warnings"] == "3"


def test_the_page_opens_at_the_head_of_the_first_finding(page):
    figure = next(f for f in page.data["figures"] if f["kind"] == "heads")
    assert (figure["first"], figure["start"]) == ("entropy_nats_q50", [1, 2])
    of_layer = diagnosis_page(made_up_diagnosis(findings=[finding_at(2, -1, 0.01)]))
    figure = next(f for f in of_layer["figures"]["figures"] if f["kind"] == "heads")
    assert figure["start"] == [2, 0]
    healthy = Page(render_diagnosis(made_up_diagnosis(findings=[])))
    figure = next(f for f in healthy.data["figures"] if f["kind"] == "heads")
    assert figure["start"] is None


def test_the_same_numbers_are_drawn_once():
    diagnosis = made_up_diagnosis()
    again = [
        type(record)(**{**vars(record), "metric": "sink_mass_mean"})
        for record in diagnosis.records if record.metric == "score_max_max"
    ]  # fmt: skip
    first = [type(r)(**{**vars(r), "metric": "first_token_mass_mean"}) for r in again]
    changed = [*first[:-1], type(first[-1])(**{**vars(first[-1]), "value": 0.123})]
    for records, drawn in ((first, 1), (changed, 2)):
        page = Page(render_diagnosis(made_up_diagnosis(records=[*diagnosis.records, *again,
                                                                *records])))  # fmt: skip
        titles = [f["title"] for f in page.data["figures"] if f["kind"] == "depth"]
        assert len({"Sink mass", "First-token mass"} & set(titles)) == drawn
        assert ("the same numbers as Sink mass" in page.text) == (drawn == 1)


def falling_curve(seed=0):
    draw = random.Random(seed)
    return [3 * math.exp(-step / 40) + 0.05 * draw.random() for step in range(200)]


def test_a_falling_loss_has_no_spikes_and_a_planted_one_is_found():
    curve = falling_curve()
    assert running_spikes(curve) == ()
    curve[90] += 1.5
    curve[151] = math.nan
    assert running_spikes(curve) == (90,)


def test_spikes_agree_with_the_rule_written_out():
    draw = random.Random(5)
    curve = [draw.gauss(0, 1) + 40 * (draw.random() < 0.03) for _ in range(151)]
    expected = []
    for step in range(16, 151):
        before = np.array(curve[max(0, step - 32) : step])
        middle = np.median(before)
        if curve[step] > middle + 9 * np.median(np.abs(before - middle)):
            expected.append(step)
    assert running_spikes(curve) == tuple(expected)
    assert len(expected) >= 2


@pytest.mark.parametrize("curve", [[], [1.0], [2.0] * 50, [math.nan] * 50])
def test_curves_without_anything_to_find(curve):
    assert running_spikes(curve) == ()


def test_a_band_is_mean_and_range_of_the_seeds_that_got_there():
    series = banded("x", [[(1, 2.0), (2, 4.0), (3, 9.0)], [(1, 4.0), (2, 5.0)], [(1, 9.0)]])
    assert series["steps"] == [1, 2, 3]
    assert series["middle"] == [5.0, 4.5, 9.0]
    assert series["low"] == [2.0, 4.0, 9.0]
    assert series["high"] == [9.0, 5.0, 9.0]
    assert series["count"] == [3, 2, 1]


def test_a_run_shows_the_paired_differences_of_its_summary(run_folder):
    page = Page(render_run(run_folder))
    task = json.loads((run_folder / "summary.json").read_text())["tasks"][0]
    figure = next(f for f in page.data["figures"] if f["id"] == "paired-0")
    assert [row["label"] for row in figure["rows"]] == ["quest", "gate"]
    for shown, row in zip(figure["rows"], task["rows"][1:], strict=True):
        values, base = row["values"], task["rows"][0]["values"]
        differences = [own - other for own, other in zip(values, base, strict=True)]
        assert shown["dots"] == pytest.approx(differences)
        assert shown["middle"] == pytest.approx(statistics.fmean(differences), abs=1e-9)
        assert shown["interval"] == pytest.approx(row["difference"]["t_interval"])
        assert shown["thin"] == pytest.approx(row["difference"]["bootstrap_interval"])
    for sentence in task["reading"]:
        assert sentence in page.text


def test_pairs_are_told_from_the_baseline_wherever_it_stands(run_copy):
    summary = json.loads((run_copy / "summary.json").read_text())
    before = Page(render_run(run_copy)).data["figures"][0]["rows"]
    summary["tasks"][0]["rows"].reverse()
    (run_copy / "summary.json").write_text(json.dumps(summary))
    after = Page(render_run(run_copy)).data["figures"][0]["rows"]
    assert [row["dots"] for row in reversed(after)] == [row["dots"] for row in before]


def test_a_run_shows_curves_with_bands_over_seeds(run_folder):
    page = Page(render_run(run_folder))
    cells = [json.loads(line) for line in (run_folder / "cells.jsonl").read_text().splitlines()]
    losses = np.array(
        [cell["curve"]["train_loss_nats"] for cell in cells if cell["variant"] == "quest"]
    )
    figure = next(f for f in page.data["figures"] if f["id"] == "loss-0")
    series = next(s for s in figure["series"] if s["label"] == "quest")
    assert series["middle"] == pytest.approx(losses.mean(0))
    assert series["low"] == pytest.approx(losses.min(0))
    assert series["high"] == pytest.approx(losses.max(0))
    assert set(series["count"]) == {3}


def test_reporting_changes_nothing_in_the_folder(run_folder):
    before = {path.name: path.read_bytes() for path in run_folder.iterdir()}
    render_run(run_folder)
    assert {path.name: path.read_bytes() for path in run_folder.iterdir()} == before


def test_an_unfinished_run_shows_its_curves_and_says_so(run_copy):
    (run_copy / "summary.json").unlink()
    with (run_copy / "cells.jsonl").open("ab") as file:
        file.write(b'{"task": "dig')  # torn by a crash
    page = Page(render_run(run_copy))
    assert "the comparison was not finished" in page.text
    assert "No comparison was finished" in page.text
    assert {f["kind"] for f in page.data["figures"]} == {"lines", "table"}


def test_a_diverged_seed_is_marked(run_copy):
    lines = (run_copy / "cells.jsonl").read_text().splitlines()
    cell = json.loads(lines[0])
    lost = {name: "nan" for name in cell["evaluations"][0]} | {"step": 3}
    cell |= {"diverged_step": 4, "final": None, "evaluations": [lost]}
    cell["curve"] = {key: values[:3] for key, values in cell["curve"].items()}
    (run_copy / "cells.jsonl").write_text("\n".join([json.dumps(cell), *lines[1:], ""]))
    page = Page(render_run(run_copy))
    figure = next(f for f in page.data["figures"] if f["id"] == "loss-0")
    series = next(s for s in figure["series"] if s["label"] == cell["variant"])
    assert series["broken"] == [[cell["seed"], 4]]
    assert series["count"][:4] == [3, 3, 3, 2]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("cells.jsonl", b"not json\n", r"cells.jsonl, line 1 must hold one training"),
        ("cells.jsonl", b"[1]\n", r"cells.jsonl, line 1 must hold one training"),
        ("cells.jsonl", b"", "must hold a finished training"),
        ("config.yaml", b"a: [", "config.yaml must hold settings"),
        ("summary.json", b"{", "summary.json is not JSON; run the same `levelhead compare`"),
    ],
)
def test_a_broken_run_is_refused_with_the_file(run_copy, name, content, words):
    (run_copy / name).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        render_run(run_copy)


def command(capsys, *arguments):
    try:
        code = cli.main([str(argument) for argument in arguments])
    except SystemExit as ended:
        code = ended.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_writes_the_page_of_a_run(run_copy, capsys):
    code, out, _ = command(capsys, "report", run_copy)
    assert code == 0
    assert "report.html" in out
    assert (run_copy / "report.html").read_text() == render_run(run_copy)


def test_the_command_writes_the_page_of_a_diagnosis(tmp_path, capsys):
    diagnosis = made_up_diagnosis()
    diagnosis.to_json(tmp_path / "saved.json")
    code, _, _ = command(capsys, "report", tmp_path / "saved.json", "--out", tmp_path / "a.html")
    assert code == 0
    assert (tmp_path / "a.html").read_text() == render_diagnosis(diagnosis)
    command(capsys, "report", tmp_path / "saved.json")
    assert (tmp_path / "saved.html").exists()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "must be the folder of a run or a diagnosis saved as JSON"),
        (lambda path: path.mkdir(), "must be the folder of a run, with config.yaml and"),
        (lambda path: path.write_text("{}"), "must be a diagnosis"),
    ],
)
def test_the_command_refuses_what_is_neither(tmp_path, capsys, make, words):
    make(tmp_path / "thing")
    code, _, err = command(capsys, "report", tmp_path / "thing")
    assert code == 2
    assert words in err
    assert err.count("\n") == 1


def test_to_html_is_the_same_page(tmp_path):
    diagnosis = made_up_diagnosis()
    diagnosis.to_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == render_diagnosis(diagnosis)


def test_the_page_of_a_read_diagnosis_is_the_same(tmp_path):
    diagnosis = made_up_diagnosis()
    diagnosis.to_json(tmp_path / "d.json")
    again = Diagnosis.from_json(tmp_path / "d.json")
    assert diagnosis_page(again)["figures"].keys() == {"heads", "figures"}
    assert render_diagnosis(again) == render_diagnosis(diagnosis)

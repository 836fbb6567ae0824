"""The report in a real browser: Chromium of the system, driven by Playwright."""

import csv
import io
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import levelhead as lh
from levelhead.report import render_run
from reporting import HOSTILE, made_up_diagnosis, real_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SHOTS = Path(__file__).parents[2] / "build" / "screenshots"
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
PHONE, DESKTOP = (375, 812), (1280, 900)

PATIENCE_MS = 180_000
"""A full-page picture takes a second, and a minute beside other work on two cores."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
]


class Tab:
    """A page with what went wrong in it: console errors, exceptions, dialogs, requests."""

    def __init__(self, page, path):
        self.page, self.errors, self.requests, self.dialogs = page, [], [], []
        page.on("console", lambda m: m.type in ("error", "warning") and self.errors.append(m.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("dialog", lambda dialog: (self.dialogs.append(dialog.message), dialog.dismiss()))
        page.goto(path.as_uri())
        page.wait_for_selector(".plot svg")
        page.wait_for_timeout(300)
        self.requests.remove(path.as_uri())

    def assert_clean(self):
        assert (self.errors, self.requests, self.dialogs) == ([], [], [])


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as running:
        context = running.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("profile"), executable_path=CHROMIUM, headless=True,
            args=FLAGS, accept_downloads=True,
        )  # fmt: skip
        context.set_default_timeout(PATIENCE_MS)
        yield context
        context.close()


@pytest.fixture(scope="module")
def diagnosis_path(tmp_path_factory):
    """A real diagnosis: twelve layers of a transformer, one of them with saturated heads."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(48, 6, 96, batch_first=True) for _ in range(12)]
    with torch.no_grad():
        for number, layer in enumerate(layers):
            layer.self_attn.in_proj_weight[:96] *= 1 + number / 2
    model = nn.Sequential(*layers)
    diagnosis = lh.diagnose(model, torch.randn(2, 23, 48), jacobian_tokens=5, name="twelve layers")
    steps = range(0, 400, 2)
    loss = [2.3 * 0.99**step + (1.5 if step == 200 else 0) + step % 7 / 100 for step in steps]
    diagnosis.curves["loss"] = [*zip(steps, loss, strict=True), (400, float("nan"))]
    path = tmp_path_factory.mktemp("page") / "diagnosis.html"
    diagnosis.to_html(path)
    return path


@pytest.fixture(scope="module")
def run_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    with pytest.MonkeyPatch.context() as monkeypatch:
        real_run(folder, monkeypatch, steps=40)
    path = folder / "report.html"
    path.write_text(render_run(folder))
    return path


@pytest.fixture
def open_tab(browser):
    pages = []

    def open_(path, size=DESKTOP, scheme="light"):
        page = browser.new_page()
        pages.append(page)
        page.set_viewport_size({"width": size[0], "height": size[1]})
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        return Tab(page, path)

    yield open_
    for page in pages:
        page.close()


def cell(layer, head):
    return f'.cell[data-layer="{layer}"][data-head="{head}"]'


def test_a_cell_tells_its_number_and_opens_its_head(open_tab, diagnosis_path):
    tab = open_tab(diagnosis_path)
    page = tab.page
    assert page.locator(".cell").count() == 12 * 6
    page.hover(cell(7, 3))
    assert "7.self_attn, head 3" in page.inner_text("#tip")
    number = page.inner_text("#tip").splitlines()[1].split(": ")[-1]
    spoken = page.get_attribute(cell(7, 3), "aria-label").split(" ")[-1]
    assert float(spoken) == pytest.approx(float(number), rel=1e-3)
    page.click(cell(7, 3))
    assert "7.self_attn, head 3" in page.inner_text(".head-panel h3")
    assert page.locator(".head-panel .strip").count() > 30
    page.select_option("#metric", "jacobian_kappa")
    assert "\u03ba(J)" in page.get_attribute(cell(7, 3), "aria-label")
    page.click(".head-panel .strip button >> nth=1")  # after the one on the map
    assert page.input_value("#metric") == "theta_lower_q10"
    tab.assert_clean()


def test_the_number_in_the_tip_is_the_diagnosis_own(open_tab, tmp_path):
    diagnosis = made_up_diagnosis()
    diagnosis.to_html(tmp_path / "page.html")
    tab = open_tab(tmp_path / "page.html")
    tab.page.select_option("#metric", "score_max_max")
    for layer, head in ((0, 0), (2, 4), (1, 3)):
        tab.page.hover(cell(layer, head))
        shown = tab.page.inner_text("#tip").splitlines()[1].split(": ")[-1]
        value = diagnosis.value("score_max_max", layer, head)
        assert float(shown) == pytest.approx(value, rel=1e-5)
    tab.page.select_option("#metric", "jacobian_bound")
    assert tab.page.get_attribute(cell(0, 0), "aria-label").endswith("\u221e")
    tab.page.select_option("#metric", "entropy_nats_mean")
    assert tab.page.get_attribute(cell(0, 0), "aria-label").endswith("NaN")
    tab.assert_clean()


def test_the_keyboard_walks_the_heads(open_tab, diagnosis_path):
    tab = open_tab(diagnosis_path)
    page = tab.page
    page.focus(cell(0, 0))
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    here = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert "2.self_attn, head 1" in here
    page.keyboard.press("Enter")
    assert "2.self_attn, head 1" in page.inner_text(".head-panel h3")
    assert page.locator('.cell[tabindex="0"]').count() == 1
    tab.assert_clean()


def test_a_finding_leads_to_its_head(open_tab, tmp_path):
    made_up_diagnosis().to_html(tmp_path / "page.html")
    tab = open_tab(tmp_path / "page.html")
    tab.page.click(".go")
    assert tab.page.inner_text(".head-panel h3") == "blocks.1.attn, head 2"
    assert tab.page.input_value("#metric") == "entropy_nats_q50"
    assert tab.page.locator(".flag.severe").count() >= 1
    tab.assert_clean()


@pytest.fixture(scope="module")
def kinds_path(tmp_path_factory):
    """Layers of three kinds, as of an encoder and a decoder; the second finding is elsewhere."""
    diagnosis = made_up_diagnosis(num_layers=9)
    names = [f"{side}.layers.{n}.{kind}" for n in range(3)
             for side, kind in (("enc", "self"), ("dec", "self"), ("dec", "cross"))]  # fmt: skip
    renamed = [type(r)(**{**vars(r), "layer": names[r.layer_idx]}) for r in diagnosis.records]
    told = [
        type(f)(**{**vars(f), "layer": names[place], "head": head, "value": 0.05})
        for f in diagnosis.findings for place, head in ((4, 2), (8, 3))
    ]  # fmt: skip
    path = tmp_path_factory.mktemp("kinds") / "page.html"
    made_up_diagnosis(records=renamed, findings=told).to_html(path)
    return path


@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_layers_of_a_kind_stand_together(open_tab, kinds_path, size):
    tab = open_tab(kinds_path, size=size)
    page = tab.page
    headings = page.locator("#heads .kind").all_text_contents()
    assert headings == ["enc self", "dec self", "dec cross"]
    tops = page.evaluate("""[...document.querySelectorAll('.cell[data-head="0"]')].map(c =>
        [Number(c.dataset.layer), c.getBoundingClientRect().top])""")
    order = [layer for layer, _ in sorted(tops, key=lambda pair: pair[1])]
    assert order == [0, 3, 6, 1, 4, 7, 2, 5, 8]
    page.focus(cell(6, 1))
    page.keyboard.press("ArrowDown")  # from the encoder's last layer to the decoder's first
    assert page.evaluate("document.activeElement.dataset.layer") == "1"
    line = page.locator("#depth-concentration-entropy-nats .plot path[stroke-dasharray]").first
    assert line.get_attribute("d").count("M") == 3  # no line from one kind to the next
    tab.assert_clean()


def test_the_page_opens_at_the_first_finding_and_leads_to_the_others(open_tab, kinds_path):
    tab = open_tab(kinds_path)
    page = tab.page
    assert page.inner_text(".head-panel h3") == "dec.layers.1.self, head 2"
    assert "0.05" in page.inner_text(".head-panel .told")
    assert page.input_value("#metric") == "entropy_nats_q50"
    page.click(".others .go")
    assert page.inner_text(".head-panel h3") == "dec.layers.2.cross, head 3"
    tab.assert_clean()


def test_a_finding_of_a_whole_layer_opens_the_layer(open_tab, tmp_path):
    diagnosis = made_up_diagnosis()
    whole = [type(f)(**{**vars(f), "head": -1}) for f in diagnosis.findings]
    made_up_diagnosis(findings=whole).to_html(tmp_path / "page.html")
    tab = open_tab(tmp_path / "page.html")
    for _ in ("as it opens", "as its button leads to it"):
        assert tab.page.inner_text(".head-panel h3") == "blocks.1.attn, head 0"
        assert "whole layer: the head looks at one key" in tab.page.inner_text(".head-panel .told")
        tab.page.click(".go")
    tab.assert_clean()


OVERLAPS = """() => {
  const found = [];
  for (const plot of document.querySelectorAll('.depth .plot svg, .lines .plot svg, \
.intervals .plot svg')) {
    const boxes = [...plot.querySelectorAll('text')].filter(t => t.textContent.trim()
        && !t.getAttribute('transform')).map(t => [t.textContent, t.getBoundingClientRect()]);
    const edge = plot.closest('.card').getBoundingClientRect();
    boxes.forEach(([a, p], i) => {
      if (p.left < edge.left - 1 || p.right > edge.right + 1) found.push(`${a} leaves its card`);
      for (const [b, q] of boxes.slice(i + 1)) {
        if (Math.min(p.right, q.right) - Math.max(p.left, q.left) > 1
            && Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 3)
          found.push(`${a} over ${b}`);
      }
    });
  }
  return found;
}"""


@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
@pytest.mark.parametrize("kind", ["diagnosis", "kinds", "run"])
def test_no_label_lies_over_another(open_tab, request, kind, size):
    tab = open_tab(request.getfixturevalue(f"{kind}_path"), size=size)
    assert tab.page.evaluate(OVERLAPS) == []


def test_overlapping_labels_would_be_found(open_tab, kinds_path):
    tab = open_tab(kinds_path)
    tab.page.evaluate("""document.querySelectorAll('.depth .plot svg text').forEach(t =>
        { if (!t.getAttribute('transform')) t.setAttribute('x', 40); })""")
    assert len(tab.page.evaluate(OVERLAPS)) > 10


def test_a_slow_round_does_not_squeeze_the_step_times(open_tab, run_path, tmp_path):
    """One range ends at forty times softmax: it is cut with an arrow, the rest stays readable."""
    html = run_path.read_text()
    start = html.index('"times softmax"')
    head, tail = html[:start], html[start:]
    slow = re.sub(r'("thin":\[[^,]*,)[^\]]*', r"\g<1>40", tail, count=1)
    (tmp_path / "page.html").write_text(head + slow)
    tab = open_tab(tmp_path / "page.html")
    shown = tab.page.locator("#costs-0 title").all_text_contents()
    assert "reaches 40" in shown
    labels = tab.page.locator("#costs-0 .plot svg > text").all_text_contents()
    assert "40" not in labels


def test_a_chart_reads_out_at_the_pointer_and_by_key(open_tab, diagnosis_path):
    tab = open_tab(diagnosis_path)
    page = tab.page
    chart = page.locator("#depth-jacobian-jacobian .plot svg[tabindex]")
    chart.scroll_into_view_if_needed()
    chart.hover()
    tip = page.inner_text("#tip")
    assert "\u03ba(J): " in tip
    assert "surrogate (not a bound): " in tip
    chart.focus()
    page.keyboard.press("ArrowRight")
    assert "self_attn" in page.inner_text("#say")
    page.click("#depth-jacobian-jacobian .legend button >> nth=2")
    chart.hover()
    assert "surrogate" not in page.inner_text("#tip")
    tab.assert_clean()


def test_spikes_and_broken_values_are_marked(open_tab, diagnosis_path):
    tab = open_tab(diagnosis_path)
    assert tab.page.locator("#curve-0 .spike").count() == 1
    assert "at 200" in tab.page.locator("#curve-0 .spike title").text_content()
    assert tab.page.locator("#curve-0 .broken").count() == 1
    tab.assert_clean()


def column(page, figure, number):
    return page.locator(f"#{figure} tbody tr td:nth-child({number + 1})").all_inner_texts()


def test_tables_sort_both_ways_and_filter(open_tab, diagnosis_path):
    tab = open_tab(diagnosis_path)
    page = tab.page
    page.select_option("#numbers select", "concentration")
    page.click("#numbers th:nth-child(3) button")
    down = [float(text) for text in column(page, "numbers", 2)]
    assert down == sorted(down, reverse=True)
    assert len(set(down)) > 10
    assert page.get_attribute("#numbers th:nth-child(3)", "aria-sort") == "descending"
    page.click("#numbers th:nth-child(3) button")
    up = [float(text) for text in column(page, "numbers", 2)]
    assert up == sorted(up)
    assert page.get_attribute("#numbers th:nth-child(3)", "aria-sort") == "ascending"
    page.fill("#numbers input[type=search]", "3.self")
    assert set(column(page, "numbers", 0)) == {"3.self_attn"}
    tab.assert_clean()


def downloaded(page, selector):
    with page.expect_download() as waiting:
        page.click(selector)
    text = Path(waiting.value.path()).read_text(encoding="utf-8-sig")
    return list(csv.reader(io.StringIO(text)))


def test_the_csv_is_the_frame(open_tab, tmp_path):
    diagnosis = made_up_diagnosis(name='=layer, "{}"')
    diagnosis.to_html(tmp_path / "page.html")
    tab = open_tab(tmp_path / "page.html")
    header, *rows = downloaded(tab.page, "#numbers button:has-text('All numbers')")
    assert header == ["layer", "layer_idx", "head", "metric", "value", "convention"]
    found = {(row[0].lstrip("'"), int(row[2]), row[3]): (float(row[4]), row[5]) for row in rows}
    assert len(found) == len(rows) == len(diagnosis.records)
    assert {row[0][:2] for row in rows} == {"'="}  # a spreadsheet must not compute a name
    for record in diagnosis.records:
        value, words = found[record.layer, record.head, record.metric]
        assert value == pytest.approx(record.value, rel=1e-8, nan_ok=True)
        assert words == record.convention
    tab.assert_clean()


def test_the_theme_follows_the_system_and_the_switch(open_tab, diagnosis_path):
    background = "getComputedStyle(document.body).backgroundColor"
    tab = open_tab(diagnosis_path, scheme="dark")
    dark = tab.page.evaluate(background)
    assert tab.page.get_attribute("#theme", "aria-pressed") == "true"
    tab.page.click("#theme")
    light = tab.page.evaluate(background)
    assert light != dark
    tab.page.reload()
    assert tab.page.evaluate(background) == light
    tab.page.click("#theme")
    assert tab.page.evaluate(background) == dark
    tab.page.evaluate("localStorage.clear()")
    assert tab.errors == []


def test_a_comparison_shows_intervals_curves_and_tables(open_tab, run_path):
    tab = open_tab(run_path)
    page = tab.page
    assert page.locator("#paired-0 .interval").count() == 2
    page.locator("#paired-0 .interval").first.hover()
    tip = page.inner_text("#tip")
    assert "95 % interval" in tip
    assert "n = 3 pairs" in tip
    page.locator("#loss-0 .plot svg[tabindex]").hover()
    assert "n = 3" in page.inner_text("#tip")
    page.click("#cells th:nth-child(2) button")
    assert column(page, "cells", 1) == ["gate"] * 3 + ["quest"] * 3 + ["softmax"] * 3
    header, *rows = downloaded(page, "#cells .csv")
    assert header[:4] == ["task", "variant", "init", "seed"]
    assert len(rows) == 9
    tab.assert_clean()


def test_a_hostile_layer_of_a_real_model_is_shown_and_not_run(open_tab, tmp_path):
    name = HOSTILE.replace(".", "")
    model = nn.Module()
    model.add_module(name, nn.MultiheadAttention(12, 3, batch_first=True))
    model.forward = lambda x: getattr(model, name)(x, x, x)[0]
    diagnosis = lh.diagnose(model, torch.randn(1, 5, 12), name=HOSTILE)
    diagnosis.curves[HOSTILE] = [(1, 1.0), (2, 2.0)]
    diagnosis.to_html(tmp_path / "page.html")
    tab = open_tab(tmp_path / "page.html")
    tab.page.click(cell(0, 1))
    assert tab.page.inner_text(".head-panel h3") == f"{name}, head 1"
    assert tab.page.inner_text("h1") == HOSTILE
    assert tab.page.evaluate("document.scripts.length") == 2
    tab.assert_clean()


def test_an_injected_script_would_be_caught(open_tab, tmp_path, diagnosis_path):
    """The check above can fail: the policy of the page reports what it blocks."""
    html = diagnosis_path.read_text().replace("</main>", "<script>alert(1)</script></main>")
    (tmp_path / "page.html").write_text(html)
    tab = open_tab(tmp_path / "page.html")
    assert tab.dialogs == []  # blocked by the policy
    assert any("Content Security Policy" in error for error in tab.errors)
    without = html.replace("script-src", "x-src").replace("default-src 'none';", "")
    (tmp_path / "open.html").write_text(without)
    tab = open_tab(tmp_path / "open.html")
    assert tab.dialogs == ["1"]


UNLABELLED = """[...document.querySelectorAll('button, select, input, svg[role], [tabindex="0"]')]
    .filter(e => e.checkVisibility() && !(e.getAttribute('aria-label') || e.textContent.trim()
        || e.labels?.length)).map(e => e.outerHTML.slice(0, 120))"""
LEVELS = "[...document.querySelectorAll('h1, h2, h3, h4')].map(h => Number(h.tagName[1]))"


@pytest.mark.parametrize("kind", ["diagnosis", "run"])
def test_everything_has_a_name_and_headings_nest(open_tab, kind, diagnosis_path, run_path):
    tab = open_tab({"diagnosis": diagnosis_path, "run": run_path}[kind])
    assert tab.page.evaluate(UNLABELLED) == []
    levels = tab.page.evaluate(LEVELS)
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in zip(levels, levels[1:], strict=False))
    ids = tab.page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))


CONTRAST = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
      .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
      .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => { for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] > 0.95) return c; } return [255, 255, 255]; };
  return [...document.querySelectorAll('main p, main dt, main dd, main li, main h1, main h2, \
main h3, main summary, main td, main th button')].filter(e => e.checkVisibility()).map(e => {
      const [a, b] = [light(parse(getComputedStyle(e).color)), light(behind(e))];
      return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.outerHTML.slice(0, 90)];
  }).filter(([ratio]) => ratio < 4.5); }"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
@pytest.mark.parametrize("kind", ["diagnosis", "run"])
def test_it_reads_well_at_every_width(open_tab, kind, size, scheme, diagnosis_path, run_path):
    path = {"diagnosis": diagnosis_path, "run": run_path}[kind]
    tab = open_tab(path, size=size, scheme=scheme)
    page = tab.page
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    assert page.evaluate(CONTRAST) == []
    if kind == "diagnosis":
        page.click(cell(8, 2))
        page.mouse.move(0, 0)
        page.evaluate("scrollTo(0, 0)")
    SHOTS.mkdir(parents=True, exist_ok=True)
    name = f"{kind}-{'phone' if size is PHONE else 'desktop'}-{scheme}.png"
    page.screenshot(path=SHOTS / name, full_page=True)
    assert os.path.getsize(SHOTS / name) > 20_000
    tab.assert_clean()

// The map of all heads, and the panel that tells everything about one.

const heads = { metric: null, layer: 0, head: 0, isChosen: false };
let redrawHeads = () => {};

function drawHeads(holder, figure) {
  const { metrics, families } = PAGE.heads;
  const byHead = metrics.filter((metric) => metric.values.length);
  const select = el("select", { id: "metric", onchange: () => chooseMetric(select.value) });
  for (const [family, heading] of Object.entries(families)) {
    const own = byHead.filter((metric) => metric.family === family);
    if (own.length) select.append(el("optgroup", { label: heading }, ...own.map((m) => el("option", { value: m.name }, m.label))));
  }
  const [map, about, panel] = [el("div"), el("div", { class: "about" }), el("aside", { class: "head-panel", "aria-label": "The chosen head", "aria-live": "polite" })];
  holder.append(el("div", { class: "bar" }, el("label", {}, "Measure", select)), el("div", { class: "heads-layout" }, el("div", {}, map, about), panel));
  heads.metric = figure.first;
  if (figure.start) Object.assign(heads, { layer: figure.start[0], head: figure.start[1], isChosen: true });
  let width = 0;
  redrawHeads = () => {
    const metric = metricNamed(heads.metric);
    select.value = metric.name;
    if (width) map.replaceChildren(...headMap(metric, width));
    about.replaceChildren(...aboutMetric(metric));
    panel.replaceChildren(...headPanel());
  };
  onWidth(map, (now) => ((width = now), redrawHeads()));
}

function chooseMetric(name) {
  heads.metric = name;
  redrawHeads();
}

function chooseHead(layer, head) {
  Object.assign(heads, { layer, head, isChosen: true });
  redrawHeads();
  document.querySelector(".cell.chosen")?.focus({ preventScroll: true });
  document.querySelector(".head-panel").scrollIntoView({ block: "nearest" });
}

function chooseLayer(layer) {
  Object.assign(heads, { layer, head: 0, isChosen: true });
  redrawHeads();
  document.querySelector(`.cell[data-layer="${layer}"]`)?.focus({ preventScroll: true });
}

function headScale(metric) {
  const values = finite(metric.values.flat());
  const isLog = metric.log && values.length > 0 && values.every((value) => value > 0) && spread(values) > 20;
  return makeScale(values, 0, 1, isLog, false);
}

const KIND_ROOM = 22; // for the heading above the layers of one kind

// Rows of the map from top to bottom: each layer's place in the data and its y.
function mapRows(h) {
  const rows = [];
  let y = 24;
  for (const kind of PAGE.heads.kinds) {
    if (kind.title) y += KIND_ROOM;
    for (const l of kind.layers) {
      rows[l] = y;
      y += h;
    }
  }
  return [rows, y];
}

function headMap(metric, width) {
  const { layers, kinds, num_heads: count, findings } = PAGE.heads;
  const longest = Math.max(...layers.map((layer) => layer.label.length), 2);
  const left = Math.min(14 + 7 * longest, width * 0.34);
  const w = Math.min(88, (width - left - 20) / count);
  const h = Math.max(17, Math.min(56, 400 / layers.length, w));
  const scale = headScale(metric);
  const [rows, bottom] = mapRows(h);
  const root = svg("svg", { viewBox: `0 0 ${width} ${bottom + 26}`, role: "grid", "aria-label": `${metric.label}, by layer and head` }, hatch());
  const every = Math.ceil(18 / w);
  for (let head = 0; head < count; head += every) root.append(svg("text", { x: left + w * (head + 0.5), y: 16, "text-anchor": "middle", "aria-hidden": "true" }, String(head)));
  for (const kind of kinds) {
    if (kind.title) root.append(svg("text", { x: left, y: rows[kind.layers[0]] - 6, class: "kind", "aria-hidden": "true" }, kind.title));
    for (const l of kind.layers) root.append(headRow(metric, scale, layers[l], l, { left, w, h, y: rows[l] }));
  }
  const ring = svg("rect", { class: "ring", width: w, height: h, rx: 3, visibility: "hidden" });
  const circle = (l, head) => fill(ring, { x: left + w * head, y: rows[l], visibility: "visible" }, []);
  root.addEventListener("focusin", (event) => circle(Number(event.target.dataset.layer), Number(event.target.dataset.head)));
  if (heads.isChosen) circle(heads.layer, heads.head);
  const size = Math.max(6, Math.min(9, w * 0.4));
  for (const f of worstFirst(findings)) {
    const x = f.head >= 0 ? left + w * (f.head + 1) - size - 3 : left + w * count + 5;
    root.append(flag(f.severity, x, rows[f.layer] + 3, size));
  }
  root.append(ring);
  root.append(svg("text", { x: left + (w * count) / 2, y: bottom + 18, "text-anchor": "middle", "aria-hidden": "true" }, "head"));
  return [root, colourKey(scale, metric), flagKey(findings, metric)];
}

// One flag a place: that of the worst finding there, which comes first.
function worstFirst(findings) {
  return findings.filter((f, i) => findings.findIndex((other) => other.layer === f.layer && other.head === f.head) === i);
}

function headRow(metric, scale, layer, l, { left, w, h, y }) {
  const row = svg("g", { role: "row", "aria-label": layer.name });
  const room = Math.floor((left - 10) / 6.6);
  const text = layer.label.length > room ? `\u2026${layer.label.slice(-room + 1)}` : layer.label;
  row.append(svg("text", { x: left - 8, y: y + h / 2 + 4, "text-anchor": "end" }, text, svg("title", {}, layer.name)));
  (metric.values[l] ?? []).forEach((value, head) => row.append(...headCell(metric, scale, layer, l, head, value, { x: left + w * head, y, w, h })));
  return row;
}

function headCell(metric, scale, layer, l, head, value, { x, y, w, h }) {
  const isKnown = typeof value === "number" && Number.isFinite(value) && (!scale.isLog || value > 0);
  const isHere = heads.layer === l && heads.head === head;
  const label = `${layer.name}, head ${head}: ${metric.label} ${show(value)}`;
  const cell = svg("rect", {
    x, y, width: w, height: h, rx: 3, role: "gridcell", "aria-label": label, tabindex: isHere ? 0 : -1, "data-layer": l, "data-head": head, "aria-selected": String(isHere && heads.isChosen),
    class: `cell${isKnown ? "" : " empty"}${isHere && heads.isChosen ? " chosen" : ""}`, style: isKnown ? { fill: viridis(scale(value)) } : {},
  });
  const lines = [`${layer.name}, head ${head}`, `${metric.label}: ${show(value, 6)}`, ...PAGE.heads.findings.filter((f) => f.layer === l && f.head === head).map((f) => `${f.severity}: ${f.text}`)];
  cell.addEventListener("pointermove", (event) => showTip(lines, event.clientX, event.clientY));
  cell.addEventListener("pointerleave", hideTip);
  cell.addEventListener("focus", () => {
    const box = cell.getBoundingClientRect();
    if (cell.matches(":focus-visible")) showTip(lines, box.left + box.width / 2, box.top);
  });
  cell.addEventListener("blur", hideTip);
  cell.addEventListener("click", () => chooseHead(l, head));
  cell.addEventListener("keydown", (event) => moveBetweenCells(event, l, head));
  if (isKnown || value === null) return [cell];
  return [cell, svg("text", { x: x + w / 2, y: y + h / 2 + 4, class: "glyph label" }, Number.isNaN(value) ? "?" : show(value))];
}

function moveBetweenCells(event, layer, head) {
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    return chooseHead(layer, head);
  }
  const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
  const shown = PAGE.heads.kinds.flatMap((kind) => kind.layers);
  const row = step && shown[shown.indexOf(layer) + step[0]];
  const next = step && document.querySelector(`.cell[data-layer="${row}"][data-head="${head + step[1]}"]`);
  if (!next) return;
  event.preventDefault();
  event.target.setAttribute("tabindex", -1);
  next.setAttribute("tabindex", 0);
  next.focus();
}

function colourKey(scale, metric) {
  const stops = Array.from({ length: 11 }, (_, i) => svg("stop", { offset: i / 10, "stop-color": viridis(i / 10) }));
  const middle = scale.isLog ? Math.sqrt(scale.low * scale.high) : (scale.low + scale.high) / 2;
  const root = svg("svg", { viewBox: "0 0 320 34", role: "img", "aria-label": `Colours from ${show(scale.low)} (dark) to ${show(scale.high)} (bright)${scale.isLog ? ", logarithmic" : ""}`, style: { maxWidth: "340px" } });
  root.append(svg("defs", {}, svg("linearGradient", { id: "ramp" }, ...stops)), svg("rect", { width: 320, height: 12, rx: 4, fill: "url(#ramp)" }));
  [[0, scale.low, "start"], [160, middle, "middle"], [320, scale.high, "end"]].forEach(([x, value, anchor]) => root.append(svg("text", { x, y: 28, "text-anchor": anchor }, show(value, 3) + (anchor === "middle" && scale.isLog ? " (log)" : ""))));
  return root;
}

function flagKey(findings, metric) {
  const key = el("div", { class: "keys" });
  for (const severity of ["severe", "warning", "note"]) {
    if (findings.some((f) => f.severity === severity)) key.append(el("span", {}, svg("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" }, flag(severity, 1, 1, 8)), `${severity} finding`));
  }
  const values = metric.values.flat();
  if (values.some((value) => value === Infinity)) key.append(el("span", {}, "\u221e infinite"));
  if (values.some((value) => Number.isNaN(value))) key.append(el("span", {}, "? tried, has no value"));
  return key;
}

function aboutMetric(metric) {
  const equation = el("code", {}, metric.equation);
  prettify(equation);
  const lines = metric.words ? [el("p", { class: "words" }, metric.words)] : [];
  if (metric.equation) lines.push(el("p", { class: "equation" }, equation));
  return [...lines, ...metric.conventions.map((text) => el("p", { class: "quiet convention" }, text))];
}

function headPanel() {
  const { layers, metrics, families, findings } = PAGE.heads;
  const { layer, head } = heads;
  if (!heads.isChosen) return [el("h3", {}, "One head"), el("p", { class: "quiet" }, "Choose a cell of the map: every number of that head appears here, each beside those of all other heads.")];
  const parts = [el("h3", {}, `${layers[layer].name}, head ${head}`)];
  for (const f of findings.filter((f) => f.layer === layer && (f.head === head || f.head < 0))) parts.push(toldOf(f));
  const shown = metricNamed(heads.metric);
  if ((shown.values[layer]?.[head] ?? null) !== null) parts.push(el("h4", {}, "On the map"), strip(shown, shown.values[layer][head]));
  for (const [family, heading] of Object.entries(families)) {
    const own = metrics.filter((m) => m.family === family && (m.values[layer]?.[head] ?? null) !== null && !isSameAsLower(m, layer, head));
    if (own.length) parts.push(el("h4", {}, heading), ...own.map((metric) => strip(metric, metric.values[layer][head])));
  }
  const whole = metrics.filter((m) => (m.whole?.[layer] ?? null) !== null);
  if (whole.length) parts.push(el("details", {}, el("summary", {}, "The whole layer"), el("dl", { class: "pairs" }, ...whole.flatMap((m) => [el("dt", {}, m.label), el("dd", {}, show(m.whole[layer]))]))));
  return parts;
}

// An upper end that meets its lower one would only say the same number again.
function isSameAsLower(metric, layer, head) {
  const lower = metric.name.includes("_upper") && metricNamed(metric.name.replace("_upper", "_lower"));
  return lower && lower.values[layer]?.[head] === metric.values[layer][head];
}

function toldOf(f) {
  const value = toNumber(f.value);
  const words = el("div", {}, el("span", { class: "grade" }, f.severity), ` ${f.head < 0 ? "whole layer: " : ""}${f.text}`);
  return el("div", { class: `told ${f.severity}` }, words, el("div", {}, el("code", {}, f.metric), " ", el("b", {}, show(value)), el("span", { class: "quiet" }, ` (threshold ${show(f.threshold)})`)));
}

function strip(metric, value) {
  const scale = headScale(metric);
  const all = svg("svg", { viewBox: "0 0 92 14", "aria-hidden": "true" }, svg("line", { x1: 3, x2: 89, y1: 7, y2: 7, class: "grid-line" }));
  const at = (v) => 3 + 86 * scale(v);
  const others = finite(metric.values.flat()).map((other) => `M${at(other).toFixed(1)} 4v6`).join("");
  all.append(svg("path", { d: others, "stroke-width": 1, "stroke-opacity": 0.28, style: { stroke: "var(--soft)" } }));
  if (Number.isFinite(value)) all.append(svg("circle", { cx: at(value), cy: 7, r: 4.2, style: { fill: "var(--accent)", stroke: "var(--paper)" } }));
  const name = el("button", { type: "button", class: metric.name === heads.metric ? "on" : null, title: "Show on the map", onclick: () => chooseMetric(metric.name) }, metric.label);
  return el("div", { class: "strip" }, name, all, el("b", {}, show(value)));
}

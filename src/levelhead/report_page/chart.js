// One chart over an x axis: lines, bands, dots, spikes; a cursor that reads all of them out.

const HEIGHT = 250;

function chart(holder, spec) {
  const hidden = new Set();
  const legend = el("ul", { class: "legend", "aria-label": "Series; press to hide or show" });
  const place = el("div");
  const canLog = finite(allValues(spec.series)).every((value) => value > 0) && spread(allValues(spec.series)) > 3;
  const state = { isLog: spec.log && canLog && spread(allValues(spec.series)) > 20 };
  const box = el("input", { type: "checkbox", onchange: () => ((state.isLog = box.checked), draw()) });
  box.checked = state.isLog;
  const bar = el("div", { class: "bar" }, legend, canLog ? el("label", { class: "scale" }, box, "log scale") : null);
  spec.series.forEach((series, number) => legend.append(legendItem(series, number, hidden, () => draw())));
  if (spec.series.length < 2) legend.hidden = true;
  bar.hidden = legend.hidden && !canLog;
  holder.append(bar, place);
  let width = 0;
  const draw = () => width && place.replaceChildren(plot(spec, spec.series.filter((s) => !hidden.has(s)), width, state.isLog));
  onWidth(place, (now) => ((width = now), draw()));
}

function legendItem(series, number, hidden, redraw) {
  series.number = number;
  const sample = svg("svg", { viewBox: "0 0 30 12", "aria-hidden": "true" }, svg("line", { x1: 1, x2: 29, y1: 6, y2: 6, ...lineLook(series) }), marker(number, 15, 6, 3, markLook(series)));
  const button = el("button", { type: "button", "aria-pressed": "true" }, sample, el("span", {}, series.label));
  if (/^W_/.test(series.label)) prettify(button.lastChild);
  button.addEventListener("click", () => {
    if (!hidden.delete(series)) hidden.add(series);
    button.setAttribute("aria-pressed", String(!hidden.has(series)));
    redraw();
  });
  return el("li", {}, button);
}

const allValues = (list) => list.flatMap((s) => [...s.mid, ...(s.low ?? []), ...(s.high ?? []), ...(s.dots ?? []).map((dot) => dot[1])]);

function spread(values) {
  const known = finite(values);
  return known.length ? known.reduce((a, b) => Math.max(a, b)) / known.reduce((a, b) => Math.min(a, b)) : 1;
}

function lineLook(series) {
  const dash = series.style === "bound" ? "7 4" : series.style === "surrogate" ? "2 4" : DASHES[series.number % DASHES.length];
  return { fill: "none", "stroke-width": 2, "stroke-dasharray": dash, "stroke-linejoin": "round", style: { stroke: seriesColour(series.number) } };
}

function markLook(series) {
  return { "stroke-width": 1.5, style: { fill: series.style === "surrogate" ? "var(--card)" : seriesColour(series.number), stroke: seriesColour(series.number) } };
}

function plot(spec, series, width, isLog) {
  const values = allValues(series);
  const names = spec.axis ? nameRoom(spec.axis, width) : null;
  const height = HEIGHT + (names?.extra ?? 0);
  const [top, bottom, right] = [16, HEIGHT - 46, width - 12];
  const y = makeScale(values, bottom, top, isLog);
  const left = 18 + 7.2 * Math.max(...ticks(y, 5).map((value) => show(value).length), 2);
  const xs = spec.axis ? spec.axis.x : series.flatMap((s) => s.x);
  const x = makeScale(xs, left + (spec.axis ? 12 : 2), right - (spec.axis ? 12 : 4), false, false);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0, "aria-label": `${spec.title}: chart of ${series.map((s) => s.label).join(", ")}. Arrow keys read the numbers.` });
  root.append(yAxis(y, left, right, 5));
  if (spec.axis) root.append(nameAxis(spec.axis, names, x, [top, bottom], (left + right) / 2, spec.xLabel, height));
  else root.append(xAxis(ticks(x, Math.max(2, Math.floor(width / 80))).map((value) => [x(value), show(value)]), bottom, spec.xLabel, (left + right) / 2));
  root.append(svg("line", { x1: left, x2: right, y1: bottom, y2: bottom, class: "axis-line" }));
  const at = (value) => (value === Infinity ? top : value === -Infinity || (isLog && value <= 0) ? bottom : y(value));
  const faint = series.length > 3 ? 0.09 : 0.15;
  for (const s of series) root.append(drawBand(s, x, at, faint), drawDots(s, x, at));
  for (const s of series) root.append(drawLine(s, x, at, xs.length / (spec.axis ? 1 : series.length)), drawEvents(s, x, at, top));
  addCursor(root, spec, series, x, [...new Set(xs)].sort((a, b) => a - b), [top, bottom]);
  return root;
}

const SLANT = 50; // degrees, of names that do not fit side by side
const LONGEST_NAME = 16;

// How the names of the layers are set: side by side, slanted, or every so many.
function nameRoom(axis, width) {
  const pitch = (width - 80) / Math.max(1, axis.x.at(-1));
  const longest = Math.max(...axis.names.map((name) => name.length));
  const isSlanted = longest > 4 && 7 * longest + 8 > pitch;
  const wanted = isSlanted ? 15 : 7 * longest + 8;
  const drop = isSlanted ? Math.min(longest, LONGEST_NAME) * 6.4 * Math.sin((SLANT * Math.PI) / 180) - 6 : 0;
  const lines = axis.kinds.some((kind) => kind.title) ? Math.max(...axis.kinds.map((kind) => kindLines(kind, pitch).length)) : 0;
  return { isSlanted, every: Math.max(1, Math.ceil(wanted / pitch)), extra: drop + Math.max(0, lines - 1) * 15, drop, pitch };
}

function kindLines(kind, pitch) {
  const room = Math.max(6, Math.floor(((kind.to - kind.from + 0.9) * pitch) / 6.8));
  if (kind.title.length <= room) return [kind.title];
  return kind.title.split(" ").map((word) => (word.length > room ? `${word.slice(0, room - 1)}\u2026` : word));
}

function nameAxis(axis, names, x, [top, bottom], middle, label, height) {
  const group = svg("g", { "aria-hidden": "true" });
  axis.names.forEach((name, i) => {
    const nth = axis.kinds.reduce((start, kind) => (kind.from <= axis.x[i] ? axis.x.indexOf(kind.from) : start), 0);
    if ((i - nth) % names.every) return;
    const text = name.length > LONGEST_NAME ? `\u2026${name.slice(1 - LONGEST_NAME)}` : name;
    const [px, py] = [x(axis.x[i]), bottom + 18];
    const turned = names.isSlanted ? { "text-anchor": "end", transform: `rotate(${-SLANT} ${px + 4} ${py - 4})` } : { "text-anchor": "middle" };
    group.append(svg("text", { x: px, y: py, ...turned }, text));
  });
  if (!axis.kinds.some((kind) => kind.title)) {
    group.append(svg("text", { x: middle, y: height - 9, "text-anchor": "middle" }, label));
    return group;
  }
  axis.kinds.forEach((kind, n) => {
    const centre = x((kind.from + kind.to) / 2);
    kindLines(kind, names.pitch).forEach((line, nth) => group.append(svg("text", { x: centre, y: bottom + 37 + names.drop + 15 * nth, "text-anchor": "middle", class: "kind" }, line, svg("title", {}, kind.title))));
    if (n) group.append(svg("line", { x1: x(kind.from - 0.85), x2: x(kind.from - 0.85), y1: top, y2: bottom, class: "grid-line" }));
  });
  return group;
}

// Stretches of a series between gaps: unknown values, and where the next kind of layer starts.
function stretches(s, isKnown) {
  const found = [];
  let open = null;
  s.x.forEach((_, i) => {
    if (s.starts?.has(i)) open = null;
    if (!isKnown(i)) open = null;
    else if (open) open.push(i);
    else found.push((open = [i]));
  });
  return found;
}

function drawBand(s, x, at, opacity) {
  const group = svg("g");
  if (!s.low || !s.high) return group;
  const isKnown = (i) => typeof s.low[i] === "number" && typeof s.high[i] === "number" && !Number.isNaN(s.low[i] + s.high[i]);
  for (const places of stretches(s, isKnown)) {
    if (places.length < 2) continue;
    const ends = (side) => places.map((i) => `${x(s.x[i])} ${at(side[i])}`);
    const path = `M${ends(s.low).join("L")}L${ends(s.high).reverse().join("L")}Z`;
    group.append(svg("path", { d: path, "fill-opacity": opacity, style: { fill: seriesColour(s.number) } }));
  }
  return group;
}

function drawDots(s, x, at) {
  const group = svg("g");
  for (const [place, value] of s.dots ?? []) if (typeof value === "number" && !Number.isNaN(value)) group.append(svg("circle", { cx: x(place), cy: at(value), r: 2.4, "fill-opacity": 0.45, style: { fill: seriesColour(s.number) } }));
  return group;
}

function drawLine(s, x, at, count) {
  const group = svg("g");
  const isKnown = (i) => typeof s.mid[i] === "number" && Number.isFinite(s.mid[i]);
  const path = stretches(s, isKnown).map((places) => `M${places.map((i) => `${x(s.x[i])} ${at(s.mid[i])}`).join("L")}`).join("");
  if (path) group.append(svg("path", { d: path, ...lineLook(s) }));
  s.mid.forEach((value, i) => {
    if (value === Infinity) group.append(svg("text", { x: x(s.x[i]), y: at(value), "text-anchor": "middle", style: { fill: seriesColour(s.number), fontWeight: 700 } }, "\u221e"));
    else if (count <= 40 && Number.isFinite(value) && value !== null) group.append(marker(s.number, x(s.x[i]), at(value), 3.2, markLook(s)));
  });
  return group;
}

function drawEvents(s, x, at, top) {
  const group = svg("g");
  for (const i of s.spikes ?? []) group.append(svg("path", { class: "spike", d: `M${x(s.x[i])} ${at(s.mid[i]) - 5}l6 -11h-12z`, style: { fill: seriesColour(s.number), stroke: "var(--card)" } }, svg("title", {}, `spike: ${show(s.mid[i])} at ${show(s.x[i])}`)));
  s.mid.forEach((value, i) => {
    if (Number.isNaN(value)) group.append(brokenMark(x(s.x[i]), top, s, `NaN at ${show(s.x[i])}`));
  });
  for (const [seed, step] of s.broken ?? []) group.append(brokenMark(x(step), top, s, `seed ${seed} diverged at ${show(step)}`));
  return group;
}

function brokenMark(x, y, s, text) {
  return svg("path", { class: "broken", d: `M${x - 5} ${y - 5}l10 10m0 -10l-10 10`, fill: "none", "stroke-width": 2.5, style: { stroke: seriesColour(s.number) } }, svg("title", {}, text));
}

function addCursor(root, spec, series, x, places, [top, bottom]) {
  if (!places.length) return;
  const line = svg("line", { y1: top, y2: bottom, class: "axis-line", visibility: "hidden" });
  root.append(line);
  let now = -1;
  const read = (index) => {
    now = Math.max(0, Math.min(places.length - 1, index));
    const place = places[now];
    line.setAttribute("visibility", "visible");
    line.setAttribute("x1", x(place));
    line.setAttribute("x2", x(place));
    return [spec.axis ? spec.axis.fullNames.get(place) : `${spec.xLabel} ${show(place)}`, ...series.flatMap((s) => readOut(s, place))];
  };
  root.addEventListener("pointermove", (event) => {
    const box = root.getBoundingClientRect();
    const at = ((event.clientX - box.left) * root.viewBox.baseVal.width) / box.width;
    const nearest = places.reduce((best, place, i) => (Math.abs(x(place) - at) < Math.abs(x(places[best]) - at) ? i : best), 0);
    showTip(read(nearest), event.clientX, event.clientY);
  });
  const leave = () => (line.setAttribute("visibility", "hidden"), hideTip());
  root.addEventListener("pointerleave", leave);
  root.addEventListener("blur", leave);
  root.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const lines = read(now + step);
    const box = root.getBoundingClientRect();
    showTip(lines, box.left + (x(places[now]) / root.viewBox.baseVal.width) * box.width, box.top + 20);
    say(lines.join("; "));
  });
}

function readOut(s, place) {
  const i = s.x.indexOf(place);
  if (i < 0) return [];
  const upper = s.midUpper?.[i];
  const middle = typeof upper === "number" && upper !== s.mid[i] ? `${show(s.mid[i])} \u2026 ${show(upper)}` : show(s.mid[i]);
  const band = typeof s.low?.[i] === "number" ? `, ${show(s.low[i])} to ${show(s.high[i])}` : "";
  return [`${s.label}: ${middle}${band}${s.spikes?.includes(i) ? " (spike)" : ""}${s.count ? `, n = ${s.count[i]}` : ""}`];
}

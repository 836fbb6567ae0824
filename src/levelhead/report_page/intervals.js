// Paired differences: a point, its interval, the single pairs; one row a variant.

const ROW = 46;

function drawIntervals(holder, figure) {
  onWidth(holder, (width) => holder.replaceChildren(intervals(figure, width)));
}

function intervals(figure, width) {
  const isNarrow = width < 520;
  const left = isNarrow ? 14 : Math.min(200, 24 + 7.4 * Math.max(...figure.rows.map((row) => row.label.length)));
  const row = isNarrow ? ROW + 14 : ROW;
  const [top, right] = [30, width - 14];
  const bottom = top + row * figure.rows.length;
  const x = makeScale(shownRange(figure), left + 8, right - 8, false);
  const root = svg("svg", { viewBox: `0 0 ${width} ${bottom + 44}`, role: "group", "aria-label": figure.title });
  for (const value of ticks(x, Math.max(2, Math.floor(width / 80)))) {
    root.append(svg("line", { x1: x(value), x2: x(value), y1: top, y2: bottom, class: "grid-line" }), svg("text", { x: x(value), y: bottom + 18, "text-anchor": "middle" }, show(value)));
  }
  root.append(svg("text", { x: (left + right) / 2, y: bottom + 38, "text-anchor": "middle" }, figure.unit));
  const zero = x(figure.reference);
  root.append(svg("line", { x1: zero, x2: zero, y1: top - 6, y2: bottom, class: "reference" }));
  if (zero - left > 60) root.append(svg("text", { x: zero - 8, y: top - 12, "text-anchor": "end" }, `\u2190 ${figure.ends[0]}`));
  if (right - zero > 60) root.append(svg("text", { x: zero + 8, y: top - 12 }, `${figure.ends[1]} \u2192`));
  figure.rows.forEach((r, n) => root.append(intervalRow(r, r.number, figure, x, top + row * (n + 0.5) + (isNarrow ? 8 : 0), left, isNarrow)));
  return root;
}

// One round that waited for the machine would squeeze all else: a thin bar is cut, with an arrow,
// at three times the reach of everything that is not thin.
function shownRange(figure) {
  const firm = [figure.reference, ...figure.rows.flatMap((r) => [r.middle, ...(r.interval ?? []), ...r.dots])];
  const reach = 3 * Math.max(...firm.map((value) => Math.abs(value - figure.reference)));
  const thin = figure.rows.flatMap((r) => r.thin ?? []);
  return [...firm, ...thin.map((value) => Math.max(figure.reference - reach, Math.min(figure.reference + reach, value)))];
}

function thinBar(r, x, y, colour) {
  const [from, to] = r.thin.map((value) => Math.max(x.from, Math.min(x.to, x(value))));
  const group = svg("g", {}, svg("line", { x1: from, x2: to, y1: y, y2: y, "stroke-width": 2, "stroke-opacity": 0.6, style: { stroke: colour } }));
  if (x(r.thin[1]) > x.to) group.append(svg("path", { d: `M${x.to + 7} ${y}l-9 -5v10z`, style: { fill: colour } }, svg("title", {}, `reaches ${show(r.thin[1])}`)));
  if (x(r.thin[0]) < x.from) group.append(svg("path", { d: `M${x.from - 7} ${y}l9 -5v10z`, style: { fill: colour } }, svg("title", {}, `reaches ${show(r.thin[0])}`)));
  return group;
}

function intervalRow(r, number, figure, x, y, left, isNarrow) {
  const colour = seriesColour(number);
  const lines = [`${r.label}: ${r.verdict}`, `${r.middle >= 0 && figure.reference === 0 ? "+" : ""}${show(r.middle)} ${figure.unit}`];
  if (r.interval) lines.push(`95 % interval ${r.interval.map((v) => show(v)).join(" to ")}`);
  if (r.thin) lines.push(`${r.interval ? "bootstrap" : "range"} ${r.thin.map((v) => show(v)).join(" to ")}`);
  if (r.n) lines.push(`n = ${r.n} pairs`);
  const group = svg("g", { tabindex: 0, role: "img", class: "interval", "aria-label": lines.join("; ") });
  group.append(svg("rect", { x: 0, y: y - 20, width: x.to + 8, height: 40, fill: "transparent" }));
  group.append(svg("text", isNarrow ? { x: left, y: y - 16, class: "label" } : { x: left - 10, y: y + 4, "text-anchor": "end", class: "label" }, r.label.length > 42 ? `${r.label.slice(0, 40)}\u2026` : r.label));
  if (r.thin) group.append(thinBar(r, x, y + (r.interval ? 9 : 0), colour));
  if (r.interval) group.append(svg("line", { x1: x(r.interval[0]), x2: x(r.interval[1]), y1: y, y2: y, "stroke-width": 6, "stroke-linecap": "round", "stroke-opacity": 0.42, style: { stroke: colour } }));
  for (const dot of r.dots) group.append(svg("circle", { cx: x(dot), cy: y + 9, r: 2.6, style: { fill: colour } }));
  group.append(marker(number, x(r.middle), y, 5.5, { "stroke-width": 1.5, style: { fill: colour, stroke: "var(--card)" } }));
  group.addEventListener("pointermove", (event) => showTip(lines, event.clientX, event.clientY));
  group.addEventListener("pointerleave", hideTip);
  group.addEventListener("focus", () => {
    const box = group.getBoundingClientRect();
    showTip(lines, x(r.middle) + box.left, box.top);
  });
  group.addEventListener("blur", hideTip);
  return group;
}

// Tables: sorted by a heading, filtered by a word, taken away as CSV.

const FIRST_ROWS = 60;

function drawTable(holder, figure) {
  const rows = figure.rows.map((row) => row.map((value) => toNumber(value) ?? value));
  holder.append(tableOf(figure.columns, rows, `${figure.id}.csv`));
}

function tableOf(columns, rows, name, extra = []) {
  const state = { column: -1, isDown: false, word: "", isWhole: false };
  const isText = columns.map((_, c) => rows.some((row) => typeof row[c] === "string") );
  const body = el("tbody");
  const heads = columns.map((column, c) => {
    const button = el("button", { type: "button", onclick: () => sort(c) }, column);
    return el("th", { scope: "col", class: isText[c] ? "text" : null, "aria-sort": "none" }, button);
  });
  const more = el("button", { type: "button", class: "more", onclick: () => ((state.isWhole = true), draw()) });
  const search = el("input", { type: "search", placeholder: "filter rows", "aria-label": "Filter rows", oninput: () => ((state.word = search.value.toLowerCase()), draw()) });
  const csv = el("button", { type: "button", class: "csv", onclick: () => download(name, [columns, ...chosen()]) }, "Download CSV");
  const sort = (c) => {
    state.isDown = state.column === c ? !state.isDown : !isText[c];
    state.column = c;
    heads.forEach((head, i) => {
      head.setAttribute("aria-sort", i !== c ? "none" : state.isDown ? "descending" : "ascending");
      head.firstChild.textContent = columns[i] + (i !== c ? "" : state.isDown ? " \u25be" : " \u25b4");
    });
    draw();
  };
  const chosen = () => {
    const kept = rows.filter((row) => !state.word || row.some((value) => typeof value === "string" && value.toLowerCase().includes(state.word)));
    return state.column < 0 ? kept : [...kept].sort((a, b) => compare(a[state.column], b[state.column], state.isDown));
  };
  const draw = () => {
    const all = chosen();
    const shown = state.isWhole ? all : all.slice(0, FIRST_ROWS);
    body.replaceChildren(...shown.map((row) => el("tr", {}, ...row.map((value, c) => el("td", { class: isText[c] ? "text" : null, title: isText[c] ? value : null }, value === null || value === undefined ? "" : show(value))))));
    more.hidden = shown.length === all.length;
    more.textContent = `Show all ${all.length} rows`;
  };
  draw();
  const isLong = rows.length > 8;
  return el("div", {}, el("div", { class: "bar" }, ...extra, isLong ? search : null, csv), el("div", { class: "table-wrap", tabindex: 0, role: "region", "aria-label": "Table; scrolls" }, el("table", {}, el("thead", {}, el("tr", {}, ...heads)), body)), more);
}

function compare(a, b, isDown) {
  const isGone = (value) => value === null || value === undefined || Number.isNaN(value);
  if (isGone(a) || isGone(b)) return isGone(a) - isGone(b); // what is missing stays last
  const order = typeof a === "number" && typeof b === "number" ? (a < b ? -1 : a > b ? 1 : 0) : String(a).localeCompare(String(b), "en", { numeric: true });
  return isDown ? -order : order;
}

function drawNumbers(holder) {
  const { metrics, families } = PAGE.heads;
  const present = Object.keys(families).filter((family) => metrics.some((metric) => metric.family === family));
  const place = el("div");
  const select = el("select", { "aria-label": "Which measures", onchange: () => draw() }, ...present.map((family) => el("option", { value: family }, families[family])));
  const long = el("button", { type: "button", onclick: () => download("diagnosis.csv", longRows()) }, "All numbers with conventions (CSV)");
  const draw = () => {
    const own = metrics.filter((metric) => metric.family === select.value);
    const columns = ["layer", "head", ...own.map((metric) => metric.name)];
    place.replaceChildren(tableOf(columns, wideRows(own), `${select.value}.csv`));
  };
  draw();
  holder.append(el("div", { class: "bar" }, el("label", {}, "Measures", select), long), place);
}

function wideRows(metrics) {
  const { layers, num_heads: count } = PAGE.heads;
  return layers.flatMap((layer, l) => {
    const whole = metrics.some((m) => m.whole) ? [[layer.name, "layer", ...metrics.map((m) => m.whole?.[l] ?? null)]] : [];
    const heads = Array.from({ length: count }, (_, h) => [layer.name, h, ...metrics.map((m) => m.values[l]?.[h] ?? null)]);
    return [...whole, ...heads].filter((row) => row.slice(2).some((value) => value !== null));
  });
}

function longRows() {
  const rows = [["layer", "layer_idx", "head", "metric", "value", "convention"]];
  for (const [name, value, words] of PAGE.heads.of_model) rows.push(["", -1, -1, name, toNumber(value), words]);
  for (const metric of PAGE.heads.metrics) {
    PAGE.heads.layers.forEach((layer, l) => {
      const add = (head, value) => value !== null && value !== undefined && rows.push([layer.name, layer.idx, head, metric.name, value, metric.conventions.join("; ")]);
      add(-1, metric.whole?.[l]);
      metric.values[l]?.forEach((value, head) => add(head, value));
    });
  }
  return rows;
}

// Figures over depth: the numbers of all heads, summed up a layer at a time.

function drawDepth(holder, figure) {
  const layers = PAGE.heads.layers;
  const series = figure.series.map((s) => depthSeries(s, figure.series.length <= 2));
  chart(holder, { title: figure.title, series, log: figure.log, names: layers.map((l) => l.short), fullNames: layers.map((l) => l.name), xLabel: "layer" });
}

function metricNamed(name) {
  return PAGE.heads.metrics.find((metric) => metric.name === name);
}

function depthSeries(s, isDotted) {
  const middle = metricNamed(s.middle);
  const byLayer = (name, take) => name && PAGE.heads.layers.map((_, layer) => take(metricNamed(name), layer));
  const low = s.low ? byLayer(s.low, perLayer) : middle.values.length ? byLayer(s.middle, (m, l) => smallest(m.values[l])) : null;
  const high = s.high ? byLayer(s.high, perLayer) : middle.values.length ? byLayer(s.middle, (m, l) => largest(m.values[l])) : null;
  const dots = isDotted ? middle.values.flatMap((row, layer) => row.map((value) => [layer, value])) : [];
  return { label: s.label, style: s.style, x: PAGE.heads.layers.map((_, i) => i), mid: byLayer(s.middle, perLayer), midUpper: byLayer(s.middle_upper, perLayer), low, high, dots };
}

function perLayer(metric, layer) {
  const own = metric.whole?.[layer];
  return own !== null && own !== undefined ? own : median(metric.values[layer] ?? []);
}

const smallest = (row) => (finite(row).length ? finite(row).reduce((a, b) => Math.min(a, b)) : null);
const largest = (row) => (finite(row).length ? finite(row).reduce((a, b) => Math.max(a, b)) : null);

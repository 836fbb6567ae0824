// Figures over depth: the numbers of all heads, summed up a layer at a time.

// Layers in the order of the map: those of a kind side by side, the next kind after a gap.
const KIND_GAP = 0.7;

function depthAxis() {
  const { layers, kinds } = PAGE.heads;
  const axis = { order: [], x: [], names: [], fullNames: new Map(), starts: new Set(), kinds: [] };
  let at = 0;
  for (const kind of kinds) {
    if (!kind.layers.length) continue;
    axis.starts.add(axis.order.length);
    axis.kinds.push({ title: kind.title, from: at, to: at + kind.layers.length - 1 });
    for (const l of kind.layers) {
      axis.order.push(l);
      axis.x.push(at);
      axis.names.push(layers[l].label);
      axis.fullNames.set(at, layers[l].name);
      at += 1;
    }
    at += KIND_GAP;
  }
  return axis;
}

function drawDepth(holder, figure) {
  const axis = depthAxis();
  const series = figure.series.map((s) => depthSeries(s, figure.series.length <= 2, axis));
  chart(holder, { title: figure.title, series, log: figure.log, axis, xLabel: "layer" });
}

function metricNamed(name) {
  return PAGE.heads.metrics.find((metric) => metric.name === name);
}

function depthSeries(s, isDotted, axis) {
  const middle = metricNamed(s.middle);
  const byLayer = (name, take) => name && axis.order.map((layer) => take(metricNamed(name), layer));
  const low = s.low ? byLayer(s.low, perLayer) : middle.values.length ? byLayer(s.middle, (m, l) => smallest(m.values[l])) : null;
  const high = s.high ? byLayer(s.high, perLayer) : middle.values.length ? byLayer(s.middle, (m, l) => largest(m.values[l])) : null;
  const dots = isDotted && middle.values.length ? axis.order.flatMap((layer, i) => middle.values[layer].map((value) => [axis.x[i], value])) : [];
  return { label: s.label, style: s.style, x: axis.x, starts: axis.starts, mid: byLayer(s.middle, perLayer), midUpper: byLayer(s.middle_upper, perLayer), low, high, dots };
}

function perLayer(metric, layer) {
  const own = metric.whole?.[layer];
  return own !== null && own !== undefined ? own : median(metric.values[layer] ?? []);
}

const smallest = (row) => (finite(row).length ? finite(row).reduce((a, b) => Math.min(a, b)) : null);
const largest = (row) => (finite(row).length ? finite(row).reduce((a, b) => Math.max(a, b)) : null);

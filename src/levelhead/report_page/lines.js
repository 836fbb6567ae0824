// Curves over training steps.

function drawLines(holder, figure) {
  const series = figure.series.map((s) => ({
    label: s.label, x: s.steps, mid: s.middle.map(toNumber), low: s.low?.map(toNumber), high: s.high?.map(toNumber),
    count: s.count, spikes: s.spikes, broken: s.broken,
  }));
  chart(holder, { title: figure.title, series, log: false, xLabel: figure.x_label });
}

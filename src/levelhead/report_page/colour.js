// Viridis: even in lightness, so it reads without hue, in grey and with every colour blindness.
const VIRIDIS = [[68, 1, 84], [72, 36, 117], [65, 68, 135], [53, 95, 141], [42, 120, 142], [33, 145, 140], [34, 168, 132], [68, 191, 112], [122, 209, 81], [189, 223, 38], [253, 231, 37]];
const NUM_SERIES_COLOURS = 7;
const DASHES = ["", "7 4", "2 3", "9 3 2 3", "4 2", "12 4", "1 2"];
const MARKERS = ["circle", "square", "triangle", "diamond", "down", "cross", "plus"];

function viridis(share) {
  const place = Math.max(0, Math.min(1, share)) * (VIRIDIS.length - 1);
  const low = Math.min(Math.floor(place), VIRIDIS.length - 2);
  const rgb = VIRIDIS[low].map((c, i) => Math.round(c + (VIRIDIS[low + 1][i] - c) * (place - low)));
  return `rgb(${rgb.join(" ")})`;
}

function seriesColour(number) {
  return `var(--s${number % NUM_SERIES_COLOURS})`;
}

function marker(number, x, y, size, attributes = {}) {
  const kind = MARKERS[number % MARKERS.length];
  const s = size;
  if (kind === "circle") return svg("circle", { cx: x, cy: y, r: s, ...attributes });
  const paths = {
    square: `M${x - s} ${y - s}h${2 * s}v${2 * s}h${-2 * s}z`,
    triangle: `M${x} ${y - s * 1.2}l${s * 1.2} ${s * 2.1}h${-2.4 * s}z`,
    diamond: `M${x} ${y - s * 1.4}l${s * 1.4} ${s * 1.4}l${-s * 1.4} ${s * 1.4}l${-s * 1.4} ${-s * 1.4}z`,
    down: `M${x} ${y + s * 1.2}l${s * 1.2} ${-s * 2.1}h${-2.4 * s}z`,
    cross: `M${x - s} ${y - s}l${2 * s} ${2 * s}m0 ${-2 * s}l${-2 * s} ${2 * s}`,
    plus: `M${x} ${y - s * 1.2}v${2.4 * s}m${-1.2 * s} ${-1.2 * s}h${2.4 * s}`,
  };
  return svg("path", { d: paths[kind], ...attributes });
}

function flag(severity, x, y, size) {
  const shape = { severe: "M.3 0H.7L1 .3V.7L.7 1H.3L0 .7V.3z", warning: "M.5 0L1 1H0z", note: "M.5 0A.5.5 0 0 1 .5 1A.5.5 0 0 1 .5 0z" }[severity];
  return svg("path", { d: shape, class: `flag ${severity}`, transform: `translate(${x} ${y}) scale(${size})`, "vector-effect": "non-scaling-stroke" });
}

function hatch() {
  const pattern = svg("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
  pattern.append(svg("rect", { width: 6, height: 6, style: { fill: "var(--paper)" } }), svg("rect", { width: 2, height: 6, style: { fill: "var(--hatch)" } }));
  return svg("defs", {}, pattern);
}

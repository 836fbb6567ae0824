// Scales and axes.

function makeScale(values, from, to, isLog, isPadded = true) {
  const known = finite(values).filter((value) => !isLog || value > 0);
  let low = known.length ? known.reduce((a, b) => Math.min(a, b)) : isLog ? 1 : 0;
  let high = known.length ? known.reduce((a, b) => Math.max(a, b)) : isLog ? 10 : 1;
  if (low === high) [low, high] = isLog ? [low / 2, high * 2] : [low - (Math.abs(low) / 10 || 0.5), high + (Math.abs(high) / 10 || 0.5)];
  if (isPadded) [low, high] = padded(low, high, isLog);
  const [a, b] = isLog ? [Math.log(low), Math.log(high)] : [low, high];
  const scale = (value) => from + ((to - from) * ((isLog ? Math.log(value) : value) - a)) / (b - a);
  return Object.assign(scale, { low, high, isLog, from, to });
}

function padded(low, high, isLog) {
  if (isLog) {
    const room = (high / low) ** 0.06;
    return [low / room, high * room];
  }
  const room = (high - low) * 0.06;
  return [low >= 0 && low < room ? 0 : low - room, high + room];
}

function ticks(scale, count) {
  if (scale.isLog) return logTicks(scale, count);
  const raw = (scale.high - scale.low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= raw);
  const found = [];
  for (let n = Math.ceil(scale.low / step - 1e-9); n * step <= scale.high + step * 1e-9; n++) found.push(Number((n * step).toPrecision(12)));
  return found;
}

function logTicks(scale, count) {
  const [first, last] = [Math.floor(Math.log10(scale.low)), Math.ceil(Math.log10(scale.high))];
  const every = Math.max(1, Math.ceil((last - first) / Math.max(1, count)));
  const digits = last - first <= 2 ? [1, 2, 5] : [1];
  const found = [];
  for (let power = first; power <= last; power += every) for (const digit of digits) found.push(digit * 10 ** power);
  return found.filter((value) => value >= scale.low * 0.999 && value <= scale.high * 1.001);
}

function yAxis(scale, left, right, count) {
  const group = svg("g", { "aria-hidden": "true" });
  for (const value of ticks(scale, count)) {
    const y = scale(value);
    group.append(svg("line", { x1: left, x2: right, y1: y, y2: y, class: "grid-line" }));
    group.append(svg("text", { x: left - 8, y: y + 4, "text-anchor": "end" }, show(value)));
  }
  return group;
}

function xAxis(places, bottom, label, middle) {
  const group = svg("g", { "aria-hidden": "true" });
  for (const [x, text] of places) group.append(svg("text", { x, y: bottom + 18, "text-anchor": "middle" }, text));
  if (label) group.append(svg("text", { x: middle, y: bottom + 37, "text-anchor": "middle" }, label));
  return group;
}

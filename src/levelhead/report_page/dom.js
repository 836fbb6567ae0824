"use strict";
// Elements, numbers, the tip. Text only ever enters the page as text nodes and attributes.

const PAGE = JSON.parse(document.getElementById("data").textContent);

function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(node.style, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// "inf", "-inf" and "nan" stand as text in the data; null was never measured.
function toNumber(value) {
  if (typeof value === "number") return value;
  return { inf: Infinity, "-inf": -Infinity, nan: NaN }[value] ?? null;
}

function show(value, digits = 4) {
  if (value === null || value === undefined) return "not measured";
  if (typeof value !== "number") return String(value);
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "\u221e" : "\u2212\u221e";
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return value.toLocaleString("en").replace("-", "\u2212");
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) {
    const [mantissa, exponent] = value.toExponential(digits - 2).replace(/\.?0+e/, "e").split("e");
    if (mantissa === "1") return `10${superscript(Number(exponent))}`;
    return `${mantissa.replace("-", "\u2212")}\u00d710${superscript(Number(exponent))}`;
  }
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumSignificantDigits: digits }).replace("-", "\u2212");
}

function superscript(exponent) {
  return String(exponent).replace(/[-0-9]/g, (c) => (c === "-" ? "\u207b" : "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"[c]));
}

const finite = (values) => values.filter((value) => typeof value === "number" && Number.isFinite(value));

function median(values) {
  const known = values.filter((v) => typeof v === "number" && !Number.isNaN(v)).sort((a, b) => a - b);
  if (!known.length) return values.some((v) => Number.isNaN(v)) ? NaN : null;
  const middle = known.length >> 1;
  return known.length % 2 || known[middle] === known[middle - 1] ? known[middle] : (known[middle - 1] + known[middle]) / 2;
}

const tip = document.getElementById("tip");

function showTip(lines, x, y) {
  tip.replaceChildren(el("b", {}, lines[0]), ...lines.slice(1).map((line) => el("div", {}, line)));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(6, Math.min(x + 14, innerWidth - width - 6))}px`;
  tip.style.top = `${y - height - 12 < 6 ? y + 18 : y - height - 12}px`;
}

function hideTip() {
  tip.hidden = true;
}

function say(text) {
  document.getElementById("say").textContent = text;
}

function onWidth(node, draw) {
  let last = 0;
  new ResizeObserver(() => {
    const width = Math.floor(node.clientWidth);
    if (width && width !== last) draw((last = width));
  }).observe(node);
}

// Greek names, relations, _x, _{x} and ^x of an equation, as one would write them.
const SIGNS = { theta: "\u03b8", kappa: "\u03ba", sigma: "\u03c3", Lambda: "\u039b", Phi: "\u03a6", tau: "\u03c4", gamma: "\u03b3", delta: "\u03b4", alpha: "\u03b1", sum: "\u2211" };

function prettify(node) {
  let text = node.textContent.replace(/\b(theta|kappa|sigma|Lambda|Phi|tau|gamma|delta|alpha|sum)(?![a-z])/g, (name) => SIGNS[name]);
  text = text.replace(/<=/g, "\u2264").replace(/\+-/g, "\u00b1").replace(/->/g, "\u2192").replace(/\|\|/g, "\u2016").replace(/\binf\b/g, "\u221e").replace(/ \. /g, "\u00b7").replace(/ - /g, " \u2212 ").replace(/= -/g, "= \u2212");
  const parts = text.split(/([_^](?:\{[^}]*\}|[A-Za-z0-9\u0370-\u03ff\u221e]+))/);
  node.replaceChildren(...parts.map((part) => {
    if (!/^[_^]./.test(part)) return document.createTextNode(part);
    return el(part[0] === "_" ? "sub" : "sup", {}, part.slice(1).replace(/^\{|\}$/g, ""));
  }));
}

function download(name, rows) {
  const text = rows.map((row) => row.map(csvCell).join(",")).join("\r\n") + "\r\n";
  const link = el("a", { href: URL.createObjectURL(new Blob(["\ufeff", text], { type: "text/csv" })), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function csvCell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return Number.isFinite(value) ? String(value) : Number.isNaN(value) ? "nan" : value > 0 ? "inf" : "-inf";
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value); // a spreadsheet would run it
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

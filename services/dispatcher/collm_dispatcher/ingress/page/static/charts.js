// Plots that keep round dots and even strokes at any width: the picture is stretched, its labels are text beside it.

import { h } from "./dom.js";

const W = 1000, H = 1000;

export function spark(points, { top, label }) {
  const { x, y } = scales([points], { from: 0, top });
  const line = path(points, x, y);
  const [first, last] = [points[0], points[points.length - 1]];
  const area = points.length > 1 ? `${line}L${x(last[0])} ${H}L${x(first[0])} ${H}Z` : "";
  return h("svg", { class: "spark", viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    h("path", { class: "area", d: area }), h("path", { class: "line", d: line }));
}

// lines: {name, points, hue}; dots: {x, y, hue, title}; marks: {x, title}. Labels come from xLabel and yLabel.
export function plot({ lines = [], dots = [], marks = [], from, xLabel, yLabel, label }) {
  const all = [...lines.map((line) => line.points), dots.map((dot) => [dot.x, dot.y])];
  const { x, y, range } = scales(all, { from });
  const ticks = nice(range.low, range.high);
  const picture = h("svg", { viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    ticks.map((value) => h("line", { class: "grid", x1: 0, x2: W, y1: y(value), y2: y(value) })),
    marks.map((mark) => h("line", { class: "mark", x1: x(mark.x), x2: x(mark.x), y1: 0, y2: H })),
    lines.map((line) => h("path", { class: `line hue${line.hue % 6}`, d: path(line.points, x, y) })),
    dots.map((dot) => h("path", { class: `dot hue${dot.hue % 6}`, d: `M${x(dot.x)} ${y(dot.y)}h0` })));
  return h("div", { class: "plot" },
    h("div", { class: "y", "aria-hidden": "true" },
      ticks.map((value) => h("span", { style: { top: `${y(value) / 10}%` } }, yLabel(value)))),
    h("div", { class: "picture" }, picture,
      marks.map((mark) => h("span", { class: "flag", style: { left: `${x(mark.x) / 10}%` } }, mark.title))),
    h("div", { class: "x", "aria-hidden": "true" },
      h("span", {}, xLabel(range.left)), h("span", {}, xLabel(range.right))));
}

export function legend(items) {
  return h("ul", { class: "legend" }, items.map(({ name, hue, kind = "line" }) =>
    h("li", {}, h("i", { class: `${kind} hue${hue % 6}` }), name)));
}

function scales(lists, { from, top } = {}) {
  const points = lists.flat();
  const xs = points.map((point) => point[0]), ys = points.map((point) => point[1]);
  const left = Math.min(...xs), right = Math.max(...xs);
  let low = from ?? Math.min(...ys), high = top ?? Math.max(...ys);
  if (high - low < 1e-9) high = low + (Math.abs(low) || 1);
  if (top === undefined) { const room = (high - low) * 0.08; high += room; if (from === undefined) low = low < 0 ? low - room : Math.max(0, low - room); }
  const within = (value) => Math.min(H, Math.max(0, value));
  return {
    x: (value) => round(right > left ? ((value - left) / (right - left)) * W : W / 2),
    y: (value) => round(within(H - ((value - low) / (high - low)) * H)),
    range: { left, right, low, high },
  };
}

function path(points, x, y) {
  return points.map(([at, value], index) => `${index ? "L" : "M"}${x(at)} ${y(value)}`).join("");
}

function nice(low, high) {
  const rough = (high - low) / 4, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high; value += step) found.push(value);
  return found;
}

const round = (value) => Math.round(value * 10) / 10;

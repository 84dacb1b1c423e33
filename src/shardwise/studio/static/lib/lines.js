// A chart of lines with direct labels: told apart by colour, dash and a letter, which the legend repeats.

import { axes, scale } from "studio/lib/axes";
import { h } from "studio/lib/dom";
import { shown } from "studio/lib/format";
import { colours, numbered } from "studio/lib/theme";

const DASHES = [[], [7, 3], [2, 3], [9, 3, 2, 3], [4, 2], [12, 4], [1, 2], [6, 2, 1, 2]];

/** Which letter, colour and dash the n-th line has. */
export function style(n) {
  return { letter: String.fromCharCode(65 + (n % 26)), colour: numbered(n), dash: DASHES[(n + Math.floor(n / 8)) % 8] };
}

/** lines: [{name, points: [[x, y], ...], n, bound, strong, dots}]: a line breaks where y is null; dots: marks its points. options: units, names, logX, logY, marks: [[x, text]]. Returns
 * what is at a place, in words. */
export function lines(context, width, height, series, options) {
  const theme = colours(), points = series.flatMap((each) => each.points.filter(there));
  if (!points.length) return;
  const box = { left: 64, right: width - 26, top: 26, bottom: height - 44 };
  const xs = points.map((p) => p[0]), ys = points.map((p) => p[1]).filter((v) => v > 0 || !options.logY);
  const low = options.logY ? Math.min(...ys) : options.tight ? Math.min(...ys) * 0.97 : Math.min(0, ...ys), high = Math.max(...ys, options.top ?? -Infinity);
  const x = scale(Math.min(...xs), Math.max(...xs), box.left, box.right, options.logX);
  const y = scale(low, options.logY ? high : high * 1.05 || 1, box.bottom, box.top, options.logY);
  axes(context, theme, box, x, y, options);
  for (const [at, words] of options.marks ?? []) {
    if (at < x.low || at > x.high) continue;
    context.strokeStyle = theme.muted;
    context.setLineDash([2, 3]);
    context.beginPath();
    context.moveTo(x(at), box.top);
    context.lineTo(x(at), box.bottom);
    context.stroke();
    context.setLineDash([]);
    if (words) {
      context.fillStyle = theme.ink;
      context.textAlign = x(at) > (box.left + box.right) / 2 ? "right" : "left";
      context.fillText(words, x(at) + (context.textAlign === "left" ? 5 : -12), box.top + 8);
    }
  }
  const placed = [];
  for (const each of series) {
    const look = each.bound ? { colour: theme.muted, dash: [3, 4], letter: "" } : style(each.n);
    context.strokeStyle = look.colour;
    context.lineWidth = each.strong ? 3 : 1.6;
    context.setLineDash(look.dash);
    context.beginPath();
    each.points.forEach(([px, py], i) => { if (py !== null) context[i && there(each.points[i - 1]) ? "lineTo" : "moveTo"](x(px), y(py)); });
    context.stroke();
    context.setLineDash([]);
    const drawn = each.points.filter(there);
    context.fillStyle = look.colour;
    for (const [px, py] of each.dots ? drawn : []) context.fillRect(x(px) - 2.5, y(py) - 2.5, 5, 5);
    if (look.letter && drawn.length) letter(context, theme, look, x, y, drawn, placed);
  }
  context.lineWidth = 1;
  return (px, py) => nearest(series, x, y, px, py, options);
}

const there = ([, y]) => y !== null;

/** The point of a line that is nearest in x, of the line that is nearest there. */
function nearest(series, x, y, px, py, { xUnit, yUnit, xName = "" }) {
  let best = "", least = 40;
  for (const { name, points: all } of series) {
    const points = all.filter(there);
    if (!name || !points.length) continue;
    const point = points.reduce((a, b) => (Math.abs(x(b[0]) - px) < Math.abs(x(a[0]) - px) ? b : a));
    const far = Math.hypot(x(point[0]) - px, y(point[1]) - py);
    if (far < least) [best, least] = [`${name}\n${xName} ${shown(point[0], xUnit)}: ${shown(point[1], yUnit)}`, far];
  }
  return best;
}

function letter(context, theme, look, x, y, points, placed) {
  // Where another letter lies already, a place further along the line.
  for (let i = points.length - 1; i >= 0; i--) {
    const spot = [x(points[i][0]), y(points[i][1])];
    if (placed.some(([a, b]) => Math.abs(a - spot[0]) < 16 && Math.abs(b - spot[1]) < 16) && i > 0) continue;
    placed.push(spot);
    context.fillStyle = theme.surface;
    context.strokeStyle = look.colour;
    context.lineWidth = 1.5;
    context.beginPath();
    context.arc(spot[0], spot[1], 8, 0, 7);
    context.fill();
    context.stroke();
    context.fillStyle = theme.ink;
    context.textAlign = "center";
    context.fillText(look.letter, spot[0], spot[1] + 0.5);
    return;
  }
}

/** A legend of lines: letter, colour and name. */
export function legend(series) {
  return series.map((each) => {
    const look = each.bound ? null : style(each.n);
    return h("li", { class: each.strong && "strong" },
      h("span", { class: "key", style: look ? `border-color:${look.colour}` : "border-style:dashed", "aria-hidden": "true" }, look?.letter ?? ""),
      each.name);
  });
}

// Scales and axes for canvases: linear and logarithmic, with round marks and names.

import { mark } from "studio/lib/format";

/** Round numbers between low and high: 1, 2 or 5 times a power of ten. */
function ticks(low, high, about = 6) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const rough = span / about, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= rough * 0.999);
  const found = [];
  // Bounded: steps too small to be told apart from each other would never end.
  const first = Math.ceil(low / step - 1e-9), last = Math.min(first + 50, Math.floor(high / step + 1e-9));
  for (let k = 0; k <= last - first; k++) found.push((first + k) * step);
  return found;
}

/** Powers of ten (or of `base`) between low and high, thinned to about so many. */
function powers(low, high, about = 7, base = 10) {
  const first = Math.ceil(Math.log(low) / Math.log(base) - 1e-9), last = Math.floor(Math.log(high) / Math.log(base) + 1e-9);
  const step = Math.max(1, Math.ceil((last - first + 1) / about)), found = [];
  for (let i = first; i <= last; i += step) found.push(base ** i);
  // Within one or two decades, 2 and 5 times the powers as well.
  if (high / low < 150) for (let i = first - 1; i <= last; i++) for (const m of [2, 5]) if (m * base ** i >= low && m * base ** i <= high) found.push(m * base ** i);
  return found;
}

/** value -> pixel. log: logarithmic. */
export function scale(low, high, from, to, log = false) {
  const f = log ? Math.log : (v) => v, a = f(low), b = f(high);
  const map = (value) => from + ((f(value) - a) / (b - a || 1)) * (to - from);
  map.low = low;
  map.high = high;
  map.log = log;
  map.back = (pixel) => {
    const at = a + ((pixel - from) / (to - from || 1)) * (b - a);
    return log ? Math.exp(at) : at;
  };
  return map;
}

/** Grid lines and marks below and left of a box. x, y: scales; units: of their marks. */
export function axes(context, theme, box, x, y, { xUnit, yUnit, xName, yName, xMarks, yMarks }) {
  const width = box.right - box.left, edge = context.canvas.width / context.getTransform().a;
  const xs = xMarks ?? (x.log ? powers(x.low, x.high, Math.max(2, width / 90)) : ticks(x.low, x.high, Math.max(2, width / 90)));
  const ys = yMarks ?? (y.log ? powers(y.low, y.high, 6) : ticks(y.low, y.high, 5));
  context.lineWidth = 1;
  context.strokeStyle = theme.grid;
  context.fillStyle = theme.muted;
  context.textAlign = "right";
  const high = apart(12);
  for (const value of ys) {
    line(context, box.left, y(value), box.right, y(value));
    if (high(y(value), 6)) context.fillText(mark(value, yUnit), box.left - 8, y(value));
  }
  context.textAlign = "center";
  const wide = apart(6);
  for (const value of xs) {
    line(context, x(value), box.top, x(value), box.bottom);
    // The last mark stays on the canvas.
    const words = mark(value, xUnit), half = context.measureText(words).width / 2, at = Math.min(x(value), edge - half);
    if (wide(at, half)) context.fillText(words, at, box.bottom + 14);
  }
  context.strokeStyle = theme.line;
  line(context, box.left, box.bottom, box.right, box.bottom);
  context.fillStyle = theme.muted;
  if (xName) context.fillText(xName, (box.left + box.right) / 2, box.bottom + 33);
  if (yName) {
    context.textAlign = "left";
    context.fillText(yName, box.left, box.top - 14);
  }
}

/** Whether marks have room: each at a place, so far to both sides, and `gap` from every one before it. */
function apart(gap) {
  const taken = [];
  return (at, half) => {
    if (taken.some(([other, size]) => Math.abs(at - other) < half + size + gap)) return false;
    taken.push([at, half]);
    return true;
  };
}

export function line(context, x1, y1, x2, y2) {
  const sharp = (v) => Math.round(v) + 0.5;
  context.beginPath();
  if (x1 === x2) [x1, x2] = [sharp(x1), sharp(x2)];
  if (y1 === y2) [y1, y2] = [sharp(y1), sharp(y2)];
  context.moveTo(x1, y1);
  context.lineTo(x2, y2);
  context.stroke();
}

/** Words over a drawing, legible on any of it. */
export function halo(context, theme, words, x, y) {
  context.save();
  context.strokeStyle = theme.surface;
  context.lineWidth = 4;
  context.lineJoin = "round";
  context.strokeText(words, x, y);
  context.restore();
  context.fillText(words, x, y);
}

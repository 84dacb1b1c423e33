// Events of many ranks over time, from typed columns: culled by the window, and what is thinner than a pixel is joined.
// A hundred thousand events go into one pixel buffer; letters and hatches come on top where there is room for them.

import { axes, scale } from "studio/lib/axes";
import { colourOf, colours, hatched, inkOn, kinds } from "studio/lib/theme";

export const LEFT = 62, RIGHT = 12, BOTTOM = 40, TOP = 8;

/** Sorted by row and start, with the first and last event of each row. kinds: names by number. */
export function prepare({ rank, start, seconds, kind, micro, stage }, rows, names) {
  const n = start.length, from = new Int32Array(rows + 1);
  for (let i = 0; i < n; i++) from[rank[i] + 1] += 1;
  for (let r = 0; r < rows; r++) from[r + 1] += from[r];
  const fill = from.slice(), order = new Int32Array(n);
  for (let i = 0; i < n; i++) order[fill[rank[i]]++] = i;
  const starts = new Float64Array(n), ends = new Float64Array(n), kindOf = new Uint8Array(n);
  let latest = 0, sorted = true;
  const place = () => {
    for (let j = 0; j < n; j++) {
      const i = order[j];
      starts[j] = start[i];
      ends[j] = start[i] + seconds[i];
      kindOf[j] = kind[i];
      latest = Math.max(latest, ends[j]);
    }
  };
  place();
  for (let r = 0; r < rows; r++) {
    for (let j = from[r] + 1; j < from[r + 1]; j++) if (starts[j] < starts[j - 1]) { sorted = false; break; }
    if (!sorted) order.subarray(from[r], from[r + 1]).sort((a, b) => start[a] - start[b]);
  }
  if (!sorted) place();
  // The latest end so far: rises within a row even where events nest, so that a window's first event is found by halves.
  const reach = ends.slice();
  for (let r = 0; r < rows; r++) for (let j = from[r] + 1; j < from[r + 1]; j++) reach[j] = Math.max(reach[j], reach[j - 1]);
  return { rows, from, order, starts, ends, reach, kindOf, micro, stage, names, latest };
}

export function rowHeight(rows) {
  return Math.max(4, Math.min(34, Math.floor(560 / Math.max(rows, 1))));
}

/** Where the rows begin: behind their names. */
export function leftOf(events, width) {
  return Math.min(events.left ?? LEFT, width * 0.35);
}

function fitted(context, words, width) {
  let short = words;
  while (short.length > 4 && context.measureText(short).width > width) short = `${short.slice(0, -2)}…`;
  return short;
}

export function ganttHeight(rows) {
  return TOP + rows * rowHeight(rows) + BOTTOM;
}

/** window: [from, to] in seconds. labels: row -> its name; marked: a row that stands out. Returns the time scale. */
export function drawGantt(context, width, events, window, { labels, markRows = true, marked = null }) {
  const theme = colours(), tall = rowHeight(events.rows), bottom = TOP + events.rows * tall;
  const left = leftOf(events, width), box = { left, right: width - RIGHT, top: TOP, bottom };
  const x = scale(window[0], window[1], box.left, box.right);
  context.fillStyle = theme.raised;
  for (let r = 0; r < events.rows; r++) context.fillRect(box.left, TOP + r * tall, box.right - box.left, tall - (tall > 8 ? 2 : tall > 5 ? 1 : 0));
  paintRows(context, events, window, box, tall);
  if (tall >= 12) letters(context, events, window, box, x, tall);
  if (marked !== null && marked < events.rows) {
    context.strokeStyle = theme.ink;
    context.lineWidth = 2;
    context.strokeRect(box.left, TOP + marked * tall - 1, box.right - box.left, tall);
    context.lineWidth = 1;
  }
  context.fillStyle = theme.ink;
  context.textAlign = "right";
  const every = Math.max(1, Math.ceil(14 / tall));
  if (markRows) for (let r = 0; r < events.rows; r += every) context.fillText(fitted(context, labels(r), left - 12), left - 10, TOP + r * tall + tall / 2);
  axes(context, theme, { ...box, top: bottom }, x, scale(0, 1, bottom, bottom), { xUnit: "seconds", xName: "time", yMarks: [] });
  return x;
}

/** The rows in device pixels: of each column of pixels the kind that fills most of it. */
function paintRows(context, events, window, box, tall) {
  const { a: ratio } = context.getTransform();
  const wide = Math.round((box.right - box.left) * ratio), high = Math.round(events.rows * tall * ratio);
  if (wide < 1 || high < 1) return;
  const image = context.createImageData(wide, high), pixels = new Uint32Array(image.data.buffer);
  const palette = Uint32Array.from(events.names, (name) => rgba(colourOf(name)));
  const faint = Uint32Array.from(events.names, (name) => rgba(colourOf(name), 0.45));
  const background = rgba(colours().raised), perPixel = wide / (window[1] - window[0]);
  const line = new Uint32Array(wide), gap = tall > 8 ? 2 : tall > 5 ? 1 : 0;
  for (let r = 0; r < events.rows; r++) {
    line.fill(background);
    paintLine(line, events, r, window, perPixel, palette, faint);
    const first = Math.round(r * tall * ratio), last = Math.round(((r + 1) * tall - gap) * ratio);
    for (let y = first; y < Math.min(last, high); y++) pixels.set(line, y * wide);
  }
  const below = rgba(colours().surface);
  for (let r = 0; gap && r < events.rows; r++) {
    const first = Math.round(((r + 1) * tall - gap) * ratio), last = Math.round((r + 1) * tall * ratio);
    for (let y = first; y < Math.min(last, high); y++) pixels.fill(below, y * wide, (y + 1) * wide);
  }
  const { e, f } = context.getTransform();
  context.putImageData(image, Math.round(box.left * ratio + e), Math.round(box.top * ratio + f));
}

function paintLine(line, { from, starts, ends, reach, kindOf }, row, [low, high], perPixel, palette, faint) {
  const wide = line.length;
  let covered = 0, at = -1;
  for (let j = firstAfter(reach, from[row], from[row + 1], low); j < from[row + 1] && starts[j] < high; j++) {
    const a = (starts[j] - low) * perPixel, b = (ends[j] - low) * perPixel;
    const first = Math.max(0, Math.floor(a)), last = Math.min(wide - 1, Math.ceil(b) - 1);
    if (b - a < 1) {
      // Thinner than a pixel: it takes the pixel where it and its like fill half of it, else it is faint.
      if (first !== at) { at = first; covered = 0; }
      covered += b - a;
      if (first < wide) line[first] = covered >= 0.5 ? palette[kindOf[j]] : faint[kindOf[j]];
      continue;
    }
    line.fill(palette[kindOf[j]], first, last + 1);
    // A seam between neighbours of the same kind.
    if (b - a > 3 && last > first) line[first] = faint[kindOf[j]];
  }
}

/** The first event of a row after which something goes on beyond a time. */
function firstAfter(ends, low, high, time) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ends[middle] <= time) low = middle + 1;
    else high = middle;
  }
  return low;
}

function letters(context, events, window, box, x, tall) {
  const { from, order, starts, ends, reach, kindOf, micro, stage, names } = events;
  const seam = colours().surface, least = 15, perPixel = (box.right - box.left) / (window[1] - window[0]);
  context.save();
  context.beginPath();
  context.rect(box.left, box.top, box.right - box.left, box.bottom - box.top);
  context.clip();
  context.textAlign = "center";
  const fills = names.map((name) => (kinds[name].hatch ? hatched(context, name) : null)), inks = names.map(inkOn);
  for (let r = 0; r < events.rows; r++) {
    const y = box.top + r * tall, h = tall - (tall > 8 ? 2 : 1);
    for (let j = firstAfter(reach, from[r], from[r + 1], window[0]); j < from[r + 1] && starts[j] < window[1]; j++) {
      const w = (ends[j] - starts[j]) * perPixel;
      if (w < least || ends[j] <= window[0]) continue;
      const k = kindOf[j], left = x(starts[j]);
      if (fills[k]) {
        context.fillStyle = fills[k];
        context.fillRect(left, y, w, h);
      }
      context.fillStyle = seam;
      context.fillRect(left + w - 1, y, 1, h);
      const i = order[j];
      const word = events.name ? events.name(i) : `${kinds[names[k]].letter}${micro[i]}`;
      const full = events.chunked && w > 44 ? `${word} ·${stage[i]}` : word;
      if (context.measureText(full).width > w - 4) continue;
      context.fillStyle = inks[k];
      context.fillText(full, left + w / 2, y + h / 2 + 0.5);
    }
  }
  context.restore();
}

/** A frame around the events of a window that are among `chosen`, by their index; `first` has a thicker one. */
export function outlined(context, width, events, window, chosen, first) {
  const tall = rowHeight(events.rows), left = leftOf(events, width), x = scale(window[0], window[1], left, width - RIGHT);
  context.strokeStyle = colours().ink;
  for (let r = 0; r < events.rows; r++) {
    for (let j = firstAfter(events.reach, events.from[r], events.from[r + 1], window[0]); j < events.from[r + 1] && events.starts[j] < window[1]; j++) {
      const i = events.order[j], a = Math.max(left, x(events.starts[j])), b = Math.min(width - RIGHT, x(events.ends[j]));
      if (!chosen[i] || b < left) continue;
      context.lineWidth = i === first ? 3 : 1.2;
      context.strokeRect(a, TOP + r * tall, Math.max(2, b - a), tall - 2);
    }
  }
  context.lineWidth = 1;
}

/** The time that is selected. */
export function shaded(context, width, events, window, [from, to]) {
  const left = leftOf(events, width), x = scale(window[0], window[1], left, width - RIGHT);
  const a = Math.max(left, x(from)), b = Math.min(width - RIGHT, x(to));
  if (b <= a) return;
  context.fillStyle = colours().accent;
  context.globalAlpha = 0.18;
  context.fillRect(a, TOP, b - a, events.rows * rowHeight(events.rows));
  context.globalAlpha = 1;
  context.strokeStyle = colours().accent;
  context.strokeRect(a, TOP, b - a, events.rows * rowHeight(events.rows));
}

/** The event at a pixel, or -1. */
export function eventAt(events, window, width, px, py) {
  const row = Math.floor((py - TOP) / rowHeight(events.rows));
  const left = leftOf(events, width);
  if (row < 0 || row >= events.rows || px < left || px > width - RIGHT) return -1;
  const time = window[0] + ((px - left) / (width - RIGHT - left)) * (window[1] - window[0]);
  let found = -1;
  for (let j = firstAfter(events.reach, events.from[row], events.from[row + 1], time); j < events.from[row + 1] && events.starts[j] <= time; j++) {
    // The innermost of events that nest is the one that began last.
    if (events.ends[j] > time) found = events.order[j];
  }
  return found;
}

function rgba(hex, strength = 1) {
  const back = parseInt(colours().raised.slice(1), 16), n = parseInt(hex.slice(1), 16);
  const mix = (shift) => Math.round(strength * (n >> shift & 255) + (1 - strength) * (back >> shift & 255));
  return (255 << 24 | mix(0) << 16 | mix(8) << 8 | mix(16)) >>> 0;
}

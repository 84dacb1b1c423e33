// Stacked horizontal bars on one scale, with a limit; told apart by colour, hatch and, where it fits, name.

import { axes, line, scale } from "studio/lib/axes";
import { mark, share, shown } from "studio/lib/format";
import { colourOf, colours, hatched, inkOn, kinds, numbered } from "studio/lib/theme";

export const ROW = 34;

/** rows: [{label, detail, parts: [[kind or number, value]], total, bad, words}]; words: in place of the total; names: of parts, by number or kind; limit: a dashed line;
 * unit: of all values. Returns what is at a place, in words. */
export function bars(context, width, rows, { unit, names = [], limit = null, limitName = "", left = 150, cut = 4 }) {
  const theme = colours(), start = Math.min(left, width * 0.4), end = width - 92, top = 20, bottom = top + rows.length * ROW;
  const most = Math.max(...rows.map((row) => Math.max(row.total, sum(row.parts))), 1e-30);
  const high = limit ? Math.min(Math.max(most, limit) * 1.03, limit * cut) : most * 1.03;
  const x = scale(0, high, start, end);
  axes(context, theme, { left: start, right: end, top, bottom }, x, scale(0, 1, bottom, bottom), { xUnit: unit, yMarks: [] });
  rows.forEach((row, r) => {
    const y = top + r * ROW;
    context.fillStyle = theme.ink;
    context.textAlign = "right";
    context.fillText(clip(context, row.label, start - 12), start - 10, y + (row.detail ? 10 : 16));
    if (row.detail) {
      context.fillStyle = theme.muted;
      context.fillText(clip(context, row.detail, start - 12), start - 10, y + 24);
    }
    let at = start;
    for (const [kind, value] of row.parts) {
      const next = Math.min(end, at + (x(value) - start));
      if (next - at > 0.4) part(context, theme, kind, at, y + 5, next - at, ROW - 12, nameOf(kind, names));
      at = next;
    }
    if (sum(row.parts) > high) broken(context, theme, end, y + 5, ROW - 12);
    context.textAlign = "left";
    context.fillStyle = row.bad ? theme.bad : theme.ink;
    context.fillText(row.words ?? `${shown(row.total, unit)}${row.bad ? " ✗" : row.good ? " ✓" : ""}`, end + 8, y + 16);
  });
  if (limit && limit <= high) {
    context.strokeStyle = theme.bad;
    context.lineWidth = 1.8;
    context.setLineDash([5, 3]);
    line(context, x(limit), top - 4, x(limit), bottom);
    context.setLineDash([]);
    context.lineWidth = 1;
    context.fillStyle = theme.bad;
    context.textAlign = x(limit) > (start + end) / 2 ? "right" : "left";
    context.fillText(`${limitName} ${mark(limit, unit)}`, x(limit) + (context.textAlign === "right" ? -6 : 6), 9);
  }
  return (px, py) => {
    const row = rows[Math.floor((py - top) / ROW)];
    return row && py >= top ? partAt(row, px, x, start, names, unit) : "";
  };
}

/** The part of a row at x, or the whole row outside its bar. */
function partAt(row, px, x, start, names, unit) {
  const head = [row.label, row.detail].filter(Boolean).join(", ");
  let at = start;
  for (const [kind, value] of px < start ? [] : row.parts) {
    at += x(value) - start;
    if (px < at) return `${head}\n${nameOf(kind, names)}: ${shown(value, unit)}, ${share(value / sum(row.parts))}`;
  }
  return `${head}\n${shown(row.total, unit)} in all`;
}

export function barsHeight(rows) {
  return 20 + rows * ROW + 26;
}

function nameOf(kind, names) {
  return names[kind] ?? kinds[kind].label;
}

function part(context, theme, kind, x, y, w, h, name) {
  const named = typeof kind === "string";
  context.fillStyle = named ? hatched(context, kind) : numbered(kind);
  context.fillRect(x, y, w, h);
  context.fillStyle = theme.surface;
  context.fillRect(x + w - 1, y, 1, h);
  const wide = context.measureText(name).width + 6;
  if (wide > w - 4) return;
  // Under the name no hatch, and ink that is legible on any colour.
  context.fillStyle = named ? colourOf(kind) : "rgba(0,0,0,.45)";
  context.fillRect(x + (w - wide) / 2, y + h / 2 - 8, wide, 16);
  context.fillStyle = named ? inkOn(kind) : "#ffffff";
  context.textAlign = "center";
  context.fillText(name, x + w / 2, y + h / 2 + 0.5);
}

/** Two strokes across a bar that is longer than its axis: its number is beside it. */
function broken(context, theme, end, y, h) {
  context.fillStyle = theme.surface;
  for (const x of [end - 20, end - 13]) {
    context.beginPath();
    context.moveTo(x, y + h + 1);
    context.lineTo(x + 6, y - 1);
    context.lineTo(x + 9.5, y - 1);
    context.lineTo(x + 3.5, y + h + 1);
    context.fill();
  }
}

export function clip(context, text, width) {
  let short = text;
  while (short.length > 3 && context.measureText(short).width > width) short = `${short.slice(0, -2)}…`;
  return short;
}

function sum(parts) {
  return parts.reduce((all, [, value]) => all + value, 0);
}

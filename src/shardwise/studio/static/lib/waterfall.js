// A waterfall: from one sum to another, a bar for each difference, beginning where the one above ends.

import { axes, line, scale } from "studio/lib/axes";
import { barsHeight, clip, ROW } from "studio/lib/bars";
import { shown } from "studio/lib/format";
import { colours } from "studio/lib/theme";

export const waterfallHeight = barsHeight;

/** rows: [{label, from, to, sum, plain, words}]; sum: a total, not a difference; plain: there is nothing to be better or worse than. Returns what is at a place, in words. */
export function waterfall(context, width, rows, { unit, left = 190 }) {
  const theme = colours(), start = Math.min(left, width * 0.4), end = width - 92, top = 20, bottom = top + rows.length * ROW;
  const high = Math.max(...rows.map((row) => Math.max(row.from, row.to)), 1e-30) * 1.03, x = scale(0, high, start, end);
  axes(context, theme, { left: start, right: end, top, bottom }, x, scale(0, 1, bottom, bottom), { xUnit: unit, yMarks: [] });
  rows.forEach((row, r) => {
    const y = top + r * ROW, [a, b] = [x(Math.min(row.from, row.to)), x(Math.max(row.from, row.to))];
    context.fillStyle = row.sum ? theme.muted : row.plain ? theme.accent : row.to > row.from ? theme.bad : theme.good;
    context.fillRect(a, y + 5, Math.max(1, b - a), ROW - 12);
    context.strokeStyle = theme.line;
    if (rows[r + 1]) line(context, x(row.to), y + ROW - 7, x(row.to), y + ROW + 5);
    context.fillStyle = theme.ink;
    context.textAlign = "right";
    context.fillText(clip(context, row.label, start - 12), start - 10, y + 16);
    context.textAlign = "left";
    context.fillText(words(row, unit), end + 8, y + 16);
  });
  return (px, py) => {
    const row = rows[Math.floor((py - top) / ROW)];
    return row && py >= top ? `${row.label}\n${words(row, unit)}${row.words ? `\n${row.words}` : ""}` : "";
  };
}

function words(row, unit) {
  const change = row.to - row.from;
  return row.sum ? shown(row.to, unit) : `${change < 0 ? "−" : "+"}${shown(Math.abs(change), unit)}`;
}

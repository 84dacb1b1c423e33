// Experts: rows and bytes of each rank. Left its rows, and how long it waits for the busiest one; right what it sends and receives.

import { line, scale } from "studio/lib/axes";
import { bytes, share } from "studio/lib/format";
import { h } from "studio/lib/dom";
import { colourOf, colours, hatched, inkOn } from "studio/lib/theme";

const ROW = 36, TOP = 24, FOOT = 22;

export const loadHeight = (ranks) => TOP + ranks * ROW + FOOT;

export function loadKeys() {
  const item = (style, words) => h("li", {}, h("span", { class: "swatch", style, "aria-hidden": "true" }), words);
  return [item("background:var(--k-forward)", "rows of its experts"), item("background:var(--k-rest)", "it waits"),
    item("background:var(--k-comm)", "sends, above"), item("background:var(--muted)", "receives, below")];
}

/** data: an answer with the table `loads`. Returns what is at a place: {words, rank}. */
export function drawLoad(context, width, data, pointed) {
  const theme = colours(), { columns } = data.tables.loads, ranks = columns.rank.length, { mean } = data.more;
  const left = width < 520 ? 24 : 66, middle = left + (width - left) * 0.56, full = Math.max(...columns.rows);
  const rows = scale(0, full, left, middle), traffic = scale(0, Math.max(...columns.sends, ...columns.receives, 1), middle + 20, width - (width < 520 ? 4 : 62));
  context.fillStyle = theme.muted;
  context.textAlign = "left";
  context.fillText("rows", left, 10);
  context.fillText(width < 520 ? "bytes" : "bytes, to and from other ranks", middle + 20, 10);
  for (let r = 0; r < ranks; r++) {
    const y = TOP + r * ROW;
    if (r === pointed) {
      context.fillStyle = theme.grid;
      context.fillRect(0, y - 4, width, ROW - 2);
    }
    context.fillStyle = theme.ink;
    context.textAlign = "right";
    context.fillText(width < 520 ? `${r}` : `rank ${r}`, left - 9, y + 13);
    context.fillStyle = colourOf("forward");
    context.fillRect(left, y + 3, rows(columns.rows[r]) - left, 20);
    const waits = columns.waits[r] * columns.rows[r] / (1 - columns.waits[r] || 1);
    context.fillStyle = hatched(context, "rest");
    context.fillRect(rows(columns.rows[r]), y + 3, rows(waits) - left, 20);
    context.fillStyle = inkOn("forward");
    context.textAlign = "left";
    if (rows(columns.rows[r]) - left > 44) context.fillText(columns.rows[r].toLocaleString("en-US"), left + 7, y + 13.5);
    context.fillStyle = hatched(context, "comm");
    context.fillRect(middle + 20, y + 3, traffic(columns.sends[r]) - middle - 20, 9);
    context.fillStyle = theme.muted;
    context.fillRect(middle + 20, y + 14, traffic(columns.receives[r]) - middle - 20, 9);
    if (width < 520) continue;
    context.fillText(bytes(Math.max(columns.sends[r], columns.receives[r])), traffic(Math.max(columns.sends[r], columns.receives[r])) + 6, y + 13);
  }
  context.strokeStyle = theme.ink;
  context.setLineDash([4, 3]);
  line(context, rows(mean), TOP - 4, rows(mean), TOP + ranks * ROW);
  context.setLineDash([]);
  context.fillStyle = theme.ink;
  context.textAlign = "center";
  context.fillText(`mean ${mean.toLocaleString("en-US", { maximumFractionDigits: 1 })}`, rows(mean), TOP + ranks * ROW + 12);
  return (px, py) => at(columns, Math.floor((py - TOP) / ROW));
}

function at(columns, r) {
  if (!(r in columns.rank)) return null;
  const waits = columns.waits[r] ? `waits ${share(columns.waits[r])} of the time` : "the others wait for it";
  return { rank: r, words: `rank ${r}: ${columns.rows[r].toLocaleString("en-US")} rows, ${columns["times the mean"][r].toFixed(2)} times the mean; ${waits}\nsends ${bytes(columns.sends[r])}, receives ${bytes(columns.receives[r])}` };
}

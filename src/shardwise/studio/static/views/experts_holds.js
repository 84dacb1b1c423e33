// Experts: who has which of them. A row per rank with its place on the axes; a cell per expert, filled by the part that it has.

import { colourOf, colours } from "studio/lib/theme";

const ROW = 42, HIGH = 24, TOP = 26;

export const heldHeight = (ranks) => TOP + ranks * ROW + 4;

/** data: an answer with the table `held`. Returns what is at a place: {words, rank}. */
export function drawHeld(context, width, data, pointed) {
  const theme = colours(), { ranks, experts, columns } = data.more, left = width < 520 ? 112 : 190;
  const wide = (width - left - 4) / experts, gap = wide > 14 ? 4 : 0;
  context.fillStyle = theme.muted;
  context.textAlign = "right";
  context.fillText("expert", left - 10, 10);
  ranks.forEach((one, rank) => {
    const y = TOP + rank * ROW;
    if (rank === pointed) {
      context.fillStyle = theme.grid;
      context.fillRect(0, y - 8, width, ROW - 4);
    }
    places(context, theme, data.tables.held.columns, rank, left, y);
    context.fillStyle = theme.raised;
    context.fillRect(left, y, wide * experts, HIGH);
    context.strokeStyle = theme.line;
    if (!gap) context.strokeRect(left - 0.5, y - 0.5, wide * experts + 1, HIGH + 1);
    for (let e = 0; gap && e < experts; e++) context.strokeRect(left + e * wide + 0.5, y + 0.5, wide - gap, HIGH - 1);
    context.fillStyle = colourOf("forward");
    const [from, to] = one.columns, top = y + (from / columns) * HIGH, high = ((to - from) / columns) * HIGH;
    if (!gap) context.fillRect(left + one.experts[0] * wide, top, (one.experts[1] - one.experts[0]) * wide, high);
    for (let e = one.experts[0]; gap && e < one.experts[1]; e++) context.fillRect(left + e * wide, top, wide - gap + 1, high);
  });
  numbers(context, theme, experts, left, wide, gap);
  return (px, py) => at(data, Math.floor((py - TOP + 8) / ROW), Math.floor((px - left) / wide));
}

/** A rank's two names: its place on the dense axes, and on those of experts. */
function places(context, theme, columns, rank, left, y) {
  const of = (axes) => axes.map((axis) => `${axis} ${columns[axis][rank]}`).join(", ");
  context.textAlign = "right";
  context.fillStyle = theme.ink;
  context.fillText(left < 150 ? `rank ${rank}` : `rank ${rank}: ${of(["dp", "tp"])}`, left - 10, y + 4);
  context.fillStyle = theme.muted;
  context.fillText(left < 150 ? of(["ep", "etp"]) : of(["edp", "ep", "etp"]), left - 10, y + 20);
}

function numbers(context, theme, experts, left, wide, gap) {
  context.fillStyle = theme.muted;
  context.textAlign = "center";
  const every = wide > 22 ? 1 : 2 ** Math.ceil(Math.log2(28 / wide));
  for (let e = 0; e < experts; e += every) context.fillText(String(e), left + e * wide + (wide - gap) / 2, 10);
}

function at(data, rank, expert) {
  const one = data.more.ranks[rank];
  if (!one) return null;
  const { columns } = data.tables.held, names = ["dp", "tp", "edp", "ep", "etp"].map((axis) => `${axis} ${columns[axis][rank]}`).join(", ");
  if (!(expert >= 0 && expert < data.more.experts)) return { words: `rank ${rank}: ${names}`, rank };
  const has = expert >= one.experts[0] && expert < one.experts[1], [from, to] = one.columns;
  const part = to - from === data.more.columns ? "all of it" : `columns ${from.toLocaleString("en-US")} to ${(to - 1).toLocaleString("en-US")} of ${data.more.columns.toLocaleString("en-US")}`;
  return { words: `rank ${rank}, expert ${expert}: ${has ? part : "not here"}\n${names}`, rank };
}

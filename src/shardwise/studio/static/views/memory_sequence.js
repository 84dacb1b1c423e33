// Memory: a sequence over context-parallel ranks. Left the tokens of each rank, right its attention beside the mean.

import { line, scale } from "studio/lib/axes";
import { count } from "studio/lib/format";
import { colours, hatched } from "studio/lib/theme";

const ROW = 34, TOP = 24;

export const sequenceHeight = (ranks) => TOP + ranks * ROW + 8;

/** data: an answer with the table `sequence`. Returns what is at a place, in words. */
export function drawSequence(context, width, data) {
  const theme = colours(), { columns } = data.tables.sequence, ranks = columns.rank.length;
  const left = 92, middle = left + (width - left) * 0.52;
  const tokens = scale(0, data.more.sequence_tokens, left, middle);
  const most = Math.max(...columns.attention, ...columns["attention, plain cut"]);
  const mean = columns.attention.reduce((all, each) => all + each, 0) / ranks;
  const work = scale(0, most, middle + 24, width - 12);
  heading(context, theme, left, "its tokens of a sequence; below, in a plain cut");
  heading(context, theme, middle + 24, "its attention; below, in a plain cut");
  for (let r = 0; r < ranks; r++) {
    const y = TOP + r * ROW;
    context.fillStyle = theme.ink;
    context.textAlign = "right";
    context.fillText(`cp rank ${columns.rank[r]}`, left - 10, y + 12);
    context.strokeStyle = theme.muted;
    context.strokeRect(left, y + 3, middle - left, 12);
    context.fillStyle = hatched(context, "saved");
    for (const [from, to] of [["first chunk from", "to"], ["second chunk from", "to "]]) {
      span(context, tokens, columns[from][r], columns[to][r], y + 3, 12);
    }
    span(context, work, 0, columns.attention[r], y + 3, 12);
    context.fillStyle = theme.muted;
    span(context, tokens, columns["plain cut from"][r], columns[" to"][r], y + 19, 6);
    span(context, work, 0, columns["attention, plain cut"][r], y + 19, 6);
  }
  context.strokeStyle = theme.ink;
  context.setLineDash([4, 3]);
  line(context, work(mean), TOP, work(mean), TOP + ranks * ROW - 4);
  context.setLineDash([]);
  return (px, py) => words(columns, mean, Math.floor((py - TOP) / ROW));
}

function heading(context, theme, x, text) {
  context.fillStyle = theme.muted;
  context.textAlign = "left";
  context.fillText(text, x, 10);
}

function span(context, x, from, to, y, height) {
  context.fillRect(x(from), y, Math.max(x(to) - x(from), 1), height);
}

function words(columns, mean, r) {
  if (!(r in columns.rank)) return "";
  const tokens = (from, to) => `${columns[from][r].toLocaleString("en-US")} to ${(columns[to][r] - 1).toLocaleString("en-US")}`;
  const times = (flops) => `${count(flops)}FLOP, ${(flops / mean).toFixed(3)} of the mean`;
  return `cp rank ${columns.rank[r]}: tokens ${tokens("first chunk from", "to")} and ${tokens("second chunk from", "to ")}\n`
    + `attention ${times(columns.attention[r])}\nplain cut: tokens ${tokens("plain cut from", " to")}, ${times(columns["attention, plain cut"][r])}`;
}

/** The balance in one sentence. */
export function balanceWords(data) {
  const { columns } = data.tables.sequence, over = (work) => Math.max(...work) * work.length / work.reduce((all, each) => all + each, 0);
  return `The busiest rank has ${over(columns.attention).toFixed(3)} times the mean of attention's work; in a plain cut ${over(columns["attention, plain cut"]).toFixed(3)} times.`;
}

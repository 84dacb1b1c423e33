// Experts: one layer step by step. Left the rows of each rank's tokens, right the rows of its experts; between them they travel.

import { halo, line } from "studio/lib/axes";
import { bytes } from "studio/lib/format";
import { h } from "studio/lib/dom";
import { colours, hatched, numbered } from "studio/lib/theme";

const ROW = 56, HIGH = 24, TOP = 30;
/** The step at which rows reach their experts. */
const ARRIVED = 3;

export const layerHeight = (ranks) => TOP + ranks * ROW;

export function layerKeys() {
  const item = (style, words) => h("li", {}, h("span", { class: "swatch", style, "aria-hidden": "true" }), words);
  return [item("background:linear-gradient(90deg, var(--k-parameters) 33%, var(--k-comm) 33% 66%, var(--k-optimizer) 66%)", "rows: color and number of their expert's rank"),
    item("background:var(--muted)", "tokens before they are routed"), item("background:var(--good)", "tokens with their result"),
    item("background:var(--k-rest)", "the rank waits"), h("li", {}, "all bars on one scale")];
}

/** Where bars are: {left, right: first pixel of each side, row: pixels of a row}. */
function placed(width, { ranks }) {
  const left = width < 520 ? 50 : 66, gap = Math.max(24, width * 0.05);
  const most = Math.max(...ranks.map((one) => one.routes.length)), full = Math.max(...ranks.map(rowsOf));
  const row = (width - left - gap - 4) / (most + full);
  return { left, right: left + most * row + gap, row, full, most };
}

const rowsOf = (one) => sum(one.loads);

/** data: an answer; at: the step, broken while one is under way. Returns what is at a place: {words, rank}. */
export function drawLayer(context, width, data, at, pointed) {
  const theme = colours(), place = placed(width, data.more), now = Math.ceil(at), part = at % 1 || 1, step = data.more.steps[now];
  headings(context, theme, place, width);
  data.more.ranks.forEach((one, rank) => {
    const y = TOP + rank * ROW;
    if (rank === pointed) {
      context.fillStyle = theme.grid;
      context.fillRect(0, y - 5, width, ROW - 4);
    }
    context.fillStyle = theme.ink;
    context.textAlign = "right";
    context.fillText(width < 520 ? `${rank}` : `rank ${rank}`, place.left - 9, y + HIGH / 2);
    lanes(context, theme, place, one, y);
    if (now < ARRIVED) hosts(context, theme, place, one, y);
    context.fillStyle = theme.muted;
    context.textAlign = "left";
    context.fillText(step.words[rank], place.left, y + HIGH + 12);
  });
  DRAWN[step.act](context, theme, place, data, part);
  return (x, y) => under(data, place, now, x, y);
}

function headings(context, theme, place, width) {
  context.fillStyle = theme.muted;
  context.textAlign = "left";
  context.fillText(width < 520 ? "its tokens" : "rows of its tokens", place.left, 10);
  context.fillText(width < 520 ? "its experts" : "rows of its experts", place.right, 10);
}

/** The grounds of both sides: as wide as the rows that a rank has there. */
function lanes(context, theme, place, one, y) {
  context.fillStyle = theme.raised;
  context.fillRect(place.left, y, one.routes.length * place.row, HIGH);
  context.fillRect(place.right, y, place.full * place.row, HIGH);
  context.strokeStyle = theme.line;
  context.strokeRect(place.left - 0.5, y - 0.5, one.routes.length * place.row + 1, HIGH + 1);
  context.strokeRect(place.right - 0.5, y - 0.5, place.full * place.row + 1, HIGH + 1);
}

/** The experts that wait for rows. */
function hosts(context, theme, place, one, y) {
  const [from, to] = one.experts, words = to - from === 1 ? `expert ${from}` : `experts ${from} to ${to - 1}`;
  context.fillStyle = theme.muted;
  context.textAlign = "left";
  context.fillText(words, place.right + 8, y + HIGH / 2 + 0.5);
}

const DRAWN = {
  hold: (context, theme, place, { more }) => more.ranks.forEach((one, rank) => {
    context.fillStyle = theme.muted;
    context.fillRect(place.left, TOP + rank * ROW, one.tokens * place.row, HIGH);
  }),
  route: (context, theme, place, data, part) => slices(context, theme, place, data, (i, sorted, one) => i * (one.tokens / one.routes.length + (1 - one.tokens / one.routes.length) * part), part),
  sort: (context, theme, place, data, part) => {
    slices(context, theme, place, data, (i, sorted) => i + (sorted - i) * ease(part), 1);
    if (part === 1) blocks(context, theme, place, data, 0);
  },
  dispatch: (context, theme, place, data, part) => blocks(context, theme, place, data, ease(part)),
  compute: computed,
  return: (context, theme, place, data, part) => blocks(context, theme, place, data, 1 - ease(part)),
  combine: (context, theme, place, data, part) => {
    if (part < 1) blocks(context, theme, place, data, 0);
    context.globalAlpha = part;
    data.more.ranks.forEach((one, rank) => {
      const wide = one.routes.length + (one.tokens - one.routes.length) * ease(part);
      context.fillStyle = theme.raised;
      context.fillRect(place.left, TOP + rank * ROW, one.routes.length * place.row, HIGH);
      context.fillStyle = theme.good;
      context.fillRect(place.left, TOP + rank * ROW, wide * place.row, HIGH);
    });
    context.globalAlpha = 1;
  },
};

const ease = (part) => (1 - Math.cos(Math.PI * part)) / 2;

/** Single rows in the order of their tokens, on their way to that of their experts' ranks. */
function slices(context, theme, place, { more }, position, shown) {
  more.ranks.forEach((one, rank) => {
    const y = TOP + rank * ROW, next = starts(one.sends), wide = Math.max(0.6, place.row - (place.row > 4 ? 1 : 0));
    one.routes.forEach((to, i) => {
      const x = place.left + position(i, next[to]++, one) * place.row;
      context.fillStyle = theme.muted;
      if (shown < 1) context.fillRect(x, y, wide, HIGH);
      context.globalAlpha = shown;
      context.fillStyle = numbered(one.group[to]);
      context.fillRect(x, y, wide, HIGH);
      context.globalAlpha = 1;
    });
  });
}

/** All rows from one rank to another as one block. there: 0 at their tokens' rank, 1 at their experts'. */
function blocks(context, theme, place, { more }, there) {
  const flights = more.ranks.flatMap((one, rank) => {
    const from = starts(one.sends);
    return one.group.map((to, i) => ({ rank, to, rows: one.sends[i], from: from[i], into: starts(more.ranks[to].receives)[one.place] }));
  });
  for (const { rank, to, rows, from, into } of flights) {
    if (!rows) continue;
    const x1 = place.left + from * place.row, x2 = place.right + into * place.row;
    const x = x1 + (x2 - x1) * there, y = TOP + (rank + (to - rank) * there) * ROW;
    block(context, theme, numbered(to), x, y, rows * place.row, there === 1 ? `from ${rank}` : `${to}`);
  }
}

function block(context, theme, colour, x, y, wide, label) {
  context.fillStyle = colour;
  context.fillRect(x, y, wide, HIGH);
  context.fillStyle = theme.surface;
  context.fillRect(x + wide - 1, y, 1, HIGH);
  const room = context.measureText(label).width + 8;
  if (wide < room + 3) return;
  context.fillStyle = "rgba(0,0,0,.5)";
  context.fillRect(x + (wide - room) / 2, y + HIGH / 2 - 8, room, 16);
  context.fillStyle = "#ffffff";
  context.textAlign = "center";
  context.fillText(label, x + wide / 2, y + HIGH / 2 + 0.5);
}

/** Experts go through their rows, all at one pace; who is done waits for the busiest one. */
function computed(context, theme, place, { more }, part) {
  const cursor = part * place.full;
  more.ranks.forEach((one, rank) => {
    const y = TOP + rank * ROW, begins = starts(one.loads), rows = rowsOf(one);
    const slowest = Math.max(...one.group.map((other) => rowsOf(more.ranks[other])));
    one.loads.forEach((n, i) => {
      if (n) block(context, theme, numbered(rank), place.right + begins[i] * place.row, y, n * place.row, `expert ${one.experts[0] + i}`);
    });
    if (cursor < rows) {
      context.globalAlpha = 0.62;
      context.fillStyle = theme.raised;
      context.fillRect(place.right + cursor * place.row, y, (rows - cursor) * place.row, HIGH);
      context.globalAlpha = 1;
    }
    const waits = Math.min(cursor, slowest) - rows;
    if (waits <= 0) return;
    context.fillStyle = hatched(context, "rest");
    context.fillRect(place.right + rows * place.row, y, waits * place.row, HIGH);
    context.fillStyle = theme.ink;
    context.textAlign = "center";
    if (waits * place.row > 44) halo(context, theme, "waits", place.right + (rows + waits / 2) * place.row, y + HIGH / 2);
  });
  context.strokeStyle = theme.ink;
  context.setLineDash([4, 3]);
  line(context, place.right + cursor * place.row, TOP - 6, place.right + cursor * place.row, TOP + more.ranks.length * ROW - 30);
  context.setLineDash([]);
}

/** First rows of parts that follow each other. */
function starts(parts) {
  let at = 0;
  return Array.from(parts, (n) => (at += n) - n);
}

const sum = (values) => values.reduce((all, each) => all + each, 0);

/** The part in which a row is, or -1. */
function partOf(parts, row) {
  return starts(parts).findIndex((start, i) => row >= start && row < start + parts[i]);
}

function under({ more }, place, now, x, y) {
  const rank = Math.floor((y - TOP + 5) / ROW), one = more.ranks[rank];
  if (!one) return null;
  const rows = (n) => `${n.toLocaleString("en-US")} row${n === 1 ? "" : "s"}, ${bytes(n * more.row_bytes)}`;
  if (x >= place.right) {
    const expert = partOf(one.loads, (x - place.right) / place.row);
    return { rank, words: expert < 0 ? `rank ${rank}: its experts have ${rows(rowsOf(one))}` : `expert ${one.experts[0] + expert} on rank ${rank}: ${rows(one.loads[expert])}` };
  }
  const row = (x - place.left) / place.row;
  if (now === 1 && one.routes[Math.floor(row)] !== undefined) return { rank, words: `token ${Math.floor(row / (one.routes.length / one.tokens))} of rank ${rank}: a row for rank ${one.group[one.routes[Math.floor(row)]]}` };
  const to = now > 1 && now < more.steps.length - 1 ? partOf(one.sends, row) : -1;
  if (to < 0) return { rank, words: `rank ${rank}: ${one.tokens} tokens` };
  return { rank, words: one.group[to] === rank ? `rank ${rank} keeps ${rows(one.sends[to])}` : `rank ${rank} to rank ${one.group[to]}: ${rows(one.sends[to])}` };
}

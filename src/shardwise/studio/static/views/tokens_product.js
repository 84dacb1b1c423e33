// A worked product over two ranks: x meets columns of W1, h meets rows of W2, and the partial results are added up.

import { figure } from "studio/lib/figure";
import { player } from "studio/lib/player";
import { colourOf, colours, hatched } from "studio/lib/theme";

const TOP = 26, HIGH = 232;

/** The figure; `set` shows another answer's. */
export function productFigure(page) {
  let data = null, at = 0;
  const play = player(page, { name: "_product", label: "Step of the product", seconds: 2.4, onFrame: (position) => { at = position; self.redraw(); } });
  const self = figure(page, { name: "product", title: "Cut by column, then by row, with numbers", above: [play.node], height: (width) => (width < 560 ? 2 * HIGH : HIGH),
    draw: (context, width) => data && draw(context, width, data, at) });

  function set(answer) {
    data = answer.more.product;
    self.note.textContent = "y = f(x W1) W2 on ranks 0 and 1; f makes negative numbers 0. Columns are columns in every drawing of this page.";
    self.show(answer);
    play.show(data.sentences, Number(page.local("_product", 0)));
    self.describe(data.sentences.join(" "));
  }

  return { ...self, set, play };
}

/** Where everything is: the first product beside the second one, or above it where there is little room. */
function places(width, { x, columns }) {
  const narrow = width < 560, half = narrow ? width : width / 2, n = x.length;
  const cell = Math.min(34, Math.floor((half - 40) / (2 * n + 2.5)), Math.floor((HIGH - TOP - 30) / (n + 1.6)));
  const left = narrow ? 0 : half, top = narrow ? HIGH : 0, mid = (box) => box.y + (n * cell) / 2;
  const w1 = { x: (n + 0.9) * cell, y: TOP, cols: n, rows: n }, w2 = { x: left + (n + 0.9) * cell, y: top + TOP, cols: n, rows: n };
  const below = (box, row) => ({ x: box.x, y: box.y + (n + 0.55 + 1.15 * row) * cell, cols: n, rows: 1 });
  return { cell, n, w1, w2, x: { x: 0, y: mid(w1) - cell / 2, cols: n, rows: 1 }, h: below(w1, 0),
    again: { x: left, y: mid(w2) - cell / 2, cols: n, rows: 1 },
    partials: columns.map((_, rank) => ({ x: w2.x + (n + 0.9) * cell, y: w2.y + rank * 1.3 * cell, cols: n, rows: 1 })), y: { x: w2.x + (n + 0.9) * cell, y: w2.y + 3 * cell, cols: n, rows: 1 } };
}

function draw(context, width, data, at) {
  const theme = colours(), p = fitted(width, data), step = Math.ceil(at), done = (n) => Math.min(1, Math.max(0, at - n + 1));
  const owner = (i) => data.columns.findIndex((each) => each.includes(i)), font = context.font;
  context.textAlign = "left";
  context.fillStyle = theme.muted;
  for (const [box, name] of [[p.x, "x, whole on both"], [p.w1, "W1, by column"], [p.w2, "W2, by row"], [p.again, "h"]]) context.fillText(name, box.x, box.y - 11);
  matrix(context, theme, p, p.x, [data.x], () => null);
  matrix(context, theme, p, p.w1, data.first, (_, column) => owner(column), step === 1 ? done(1) : 0);
  matrix(context, theme, p, p.w2, data.second, (row) => owner(row), step === 2 ? done(2) : 0);
  context.fillStyle = theme.muted;
  context.fillText("h = f(x W1)", p.h.x, p.h.y + p.cell + 12);
  for (const box of [p.h, p.again]) matrix(context, theme, p, box, [data.h], (_, column) => owner(column), 0, done(1));
  data.partials.forEach((values, rank) => {
    context.fillStyle = theme.muted;
    context.textAlign = "left";
    context.fillText(rank ? "+" : "partial results", p.partials[rank].x, p.partials[rank].y - (rank ? 0.15 * p.cell : 11));
    matrix(context, theme, p, p.partials[rank], [values], () => rank, 0, done(2));
  });
  context.fillStyle = theme.muted;
  context.textAlign = "left";
  context.fillText("y, their sum, on both", p.y.x, p.y.y - 9, width - p.y.x);
  matrix(context, theme, p, p.y, [data.y], () => null, 0, done(3));
  context.font = font;
  return (px, py) => under(data, p, px, py, owner);
}

function fitted(width, data) {
  const p = places(width, data), most = p.partials[0].x + p.n * p.cell;
  // The second product has a third vector beside it.
  return most <= width ? p : places(width - (most - width) * 1.15, data);
}

/** Numbers in cells; of: the rank of a cell, or null where every rank has it; glow: how far it is being used; shown: how
 * far its numbers have come. */
function matrix(context, theme, { cell }, { x, y }, rows, of, glow = 0, shown = 1) {
  rows.forEach((row, r) => row.forEach((value, c) => {
    const rank = of(r, c), left = x + c * cell, top = y + r * cell;
    context.globalAlpha = rank === null ? 0 : 0.14 + 0.86 * shown;
    context.fillStyle = rank ? hatched(context, "a-borrowed") : colourOf("a");
    if (rank !== null) context.fillRect(left, top, cell - 1.5, cell - 1.5);
    context.globalAlpha = 1;
    context.strokeStyle = glow > 0 ? theme.ink : theme.line;
    context.lineWidth = glow > 0 ? 2 : 1;
    context.strokeRect(left + 0.5, top + 0.5, cell - 2.5, cell - 2.5);
    context.lineWidth = 1;
    if (shown < 0.5) return;
    const wide = context.measureText(String(value)).width + 7;
    context.fillStyle = theme.surface;
    context.fillRect(left + cell / 2 - wide / 2 - 1, top + cell / 2 - 9, wide, 17);
    context.fillStyle = theme.ink;
    context.textAlign = "center";
    context.fillText(String(value), left + cell / 2 - 1, top + cell / 2);
  }));
  context.textAlign = "left";
}

/** What is under the pointer, in words. */
function under(data, p, x, y, owner) {
  const cellOf = (box) => {
    const column = Math.floor((x - box.x) / p.cell), row = Math.floor((y - box.y) / p.cell);
    return x >= box.x && y >= box.y && column < box.cols && row < box.rows ? [row, column] : null;
  };
  const say = (box, words) => { const at = cellOf(box); return at && words(...at); };
  const sum = (left, right) => left.map((value, i) => `${value} x ${right[i]}`).join(" + ");
  return say(p.w1, (row, column) => `rank ${owner(column)}: column ${column} of W1\nrow ${row}: ${data.first[row][column]}`)
    || say(p.w2, (row, column) => `rank ${owner(row)}: row ${row} of W2\ncolumn ${column}: ${data.second[row][column]}`)
    || say(p.h, (_, i) => `rank ${owner(i)}: f(${sum(data.x, data.first.map((each) => each[i]))}) = ${data.h[i]}`)
    || say(p.again, (_, i) => `rank ${owner(i)}: number ${i} of h is ${data.h[i]}`)
    || p.partials.reduce((found, box, rank) => found || say(box, (_, i) => `rank ${rank}: ${sum(data.columns[rank].map((k) => data.h[k]), data.columns[rank].map((k) => data.second[k][i]))} = ${data.partials[rank][i]}`), null)
    || say(p.y, (_, i) => `every rank: ${data.partials.map((each) => each[i]).join(" + ")} = ${data.y[i]}`)
    || say(p.x, (_, i) => `every rank: number ${i} of x is ${data.x[i]}`) || "";
}

// A product over tensor-parallel ranks: x meets columns of W1, h meets rows of W2, and the partial sums are added up.

import { figure } from "studio/lib/figure";
import { bytes } from "studio/lib/format";
import { player } from "studio/lib/player";
import { colours, numbered } from "studio/lib/theme";

const TOP = 30, HEIGHT = 178, VECTOR = 12, BOTTOM = HEIGHT - 14;

/** The figure; `set` shows another answer's. */
export function productFigure(page, ranks) {
  let data = null, at = 0;
  const play = player(page, { name: "_product", label: "Step of the product", seconds: 2.2, onFrame: (position) => { at = position; self.redraw(); } });
  const self = figure(page, { name: "product", title: "Why tensor parallelism needs one sum", height: HEIGHT, extras: [play.node], ranks,
    draw: (context, width) => data && draw(context, width, data, at, ranks.now()) });

  function set(answer) {
    data = answer.more.product;
    self.node.classList.toggle("absent", !data);
    if (!data) return;
    self.note.textContent = `The feed-forward part of ${data.layout}: y = f(x W1) W2, every rank in its colour.`;
    play.show(data.sentences, Number(page.local("_product", data.sentences.length - 1)));
    self.show(answer);
    self.describe(data.sentences.join(" "));
  }

  return { ...self, set };
}

/** Where everything is, in pixels: x and h and y are vectors, W1 and W2 as wide as their columns, partial sums a row each. */
function places(width, { hidden, ffn, slices }) {
  const gap = width < 560 ? 18 : 34, ratio = Math.min(3, Math.max(1.2, ffn / hidden)), high = BOTTOM - TOP;
  const small = Math.min(110, (width - 4 * gap) / (2 * ratio + 3)), wide = Math.min(small * ratio, (width - 4 * gap - 3 * small) / 2 + small * 0.2);
  const mid = TOP + high / 2, row = Math.min(VECTOR, (high - 30) / slices.length);
  const x = { x: 0, y: mid - VECTOR / 2, w: small, h: VECTOR }, w1 = { x: small + gap, y: TOP, w: wide, h: Math.min(high, small) };
  const h = { x: w1.x, y: w1.y + w1.h + 26, w: wide, h: VECTOR }, w2 = { x: w1.x + wide + gap, y: TOP, w: small, h: high };
  const parts = { x: w2.x + small + gap, y: TOP, w: small, h: row }, y = { x: parts.x + small + gap, y: mid - VECTOR / 2, w: small, h: VECTOR };
  x.y = w1.y + w1.h / 2 - VECTOR / 2;
  return { x, w1, h, w2, parts, y };
}

function draw(context, width, data, at, pointed) {
  const theme = colours(), p = places(width, data), n = data.slices.length;
  const done = (step) => Math.min(1, Math.max(0, at - step + 1));
  const names = [[p.x, "x"], [p.w1, "W1"], [p.h, "h = f(x W1)"], [p.w2, "W2"], [p.parts, width < 560 ? "partial" : "partial sums"], [p.y, "y, their sum"]];
  context.fillStyle = theme.muted;
  context.textAlign = "center";
  for (const [sign, left, right, y] of [["×", p.x, p.w1, p.x.y + 6], ["×", p.w1, p.w2, p.h.y + 6], ["=", p.w2, p.parts, p.y.y + 6], ["→", p.parts, p.y, p.y.y + 6]]) context.fillText(sign, (left.x + left.w + right.x) / 2, y);
  context.textAlign = "left";
  for (const [box, name] of names) context.fillText(width < 560 ? name.split(/[ ,]/)[0] : name, box.x, box.y - 12);
  whole(context, theme, p.x, 1);
  data.slices.forEach((slice, i) => {
    const [from, to] = [slice.start / data.ffn, slice.stop / data.ffn], strong = pointed === null || pointed === slice.rank ? 1 : 0.25;
    const piece = (x, y, w, h, shown) => {
      context.globalAlpha = 0.12 * strong + 0.88 * strong * shown;
      context.fillStyle = numbered(slice.rank);
      context.fillRect(x, y, Math.max(1, w - 1), Math.max(1, h - 1));
      context.globalAlpha = strong;
      if (w > 16 && h > 12.5) label(context, String(slice.rank), x + w / 2 - 0.5, y + h / 2);
      context.globalAlpha = 1;
    };
    piece(p.w1.x + from * p.w1.w, p.w1.y, (to - from) * p.w1.w, p.w1.h, 1);
    piece(p.h.x + from * p.h.w, p.h.y, (to - from) * p.h.w, p.h.h, done(1));
    piece(p.w2.x, p.w2.y + from * p.w2.h, p.w2.w, (to - from) * p.w2.h, 1);
    const row = p.parts.y + (p.w2.h - n * p.parts.h) / 2 + i * p.parts.h, summed = at > 2 ? done(3) : 0;
    piece(p.parts.x, row, p.parts.w, p.parts.h, done(2));
    // On their way to the sum, where they come to lie over each other.
    if (summed > 0 && summed < 1) piece(p.parts.x + (p.y.x - p.parts.x) * summed, row + (p.y.y - row) * summed, p.parts.w, p.parts.h, 0.6);
  });
  frame(context, theme, p.y);
  whole(context, theme, p.y, at > 2 ? done(3) : 0);
  return (x, y) => under(data, p, x, y);
}

/** A vector that every rank has. */
function whole(context, theme, box, shown) {
  context.globalAlpha = shown;
  context.fillStyle = theme.ink;
  context.fillRect(box.x, box.y, box.w, box.h);
  context.globalAlpha = 1;
}

/** A rank's number, legible on any colour. */
function label(context, word, x, y) {
  const wide = context.measureText(word).width + 6;
  context.fillStyle = "rgba(0,0,0,.45)";
  context.fillRect(x - wide / 2, y - 6, wide, 12);
  context.fillStyle = "#ffffff";
  context.textAlign = "center";
  context.fillText(word, x, y + 0.5);
}

function frame(context, theme, { x, y, w, h }) {
  context.strokeStyle = theme.line;
  context.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
}

/** What is under the pointer: its rank, and words. */
function under({ slices, ffn, hidden }, p, x, y) {
  const inside = (box, high = box.h) => x >= box.x && x < box.x + box.w && y >= box.y && y < box.y + high;
  const at = (share) => slices.find(({ start, stop }) => start / ffn <= share && share < stop / ffn);
  const told = (slice, words) => slice && { rank: slice.rank, words: `rank ${slice.rank}: ${words(slice)}` };
  const span = ({ start, stop }) => `${start.toLocaleString("en-US")} to ${(stop - 1).toLocaleString("en-US")}`;
  if (inside(p.w1)) return told(at((x - p.w1.x) / p.w1.w), (each) => `columns ${span(each)} of W1`);
  if (inside(p.h)) return told(at((x - p.h.x) / p.h.w), (each) => `numbers ${span(each)} of h`);
  if (inside(p.w2)) return told(at((y - p.w2.y) / p.w2.h), (each) => `rows ${span(each)} of W2\nof W1 and W2 together ${bytes(each.nbytes)}`);
  if (inside(p.parts, p.w2.h)) return told(slices[Math.floor((y - p.parts.y - (p.w2.h - slices.length * p.parts.h) / 2) / p.parts.h)], () => `a partial sum of all ${hidden.toLocaleString("en-US")} numbers`) ?? "";
  if (inside(p.x) || inside(p.y)) return `${hidden.toLocaleString("en-US")} numbers, on every rank`;
  return "";
}

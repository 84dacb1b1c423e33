// One layer on every device: its matrices in miniature with the part that each rank has, filled by area, and what moves.

import { colourOf, colours, hatched, inkOn } from "studio/lib/theme";
import { bytes, seconds, share as percent } from "studio/lib/format";
import { h } from "studio/lib/dom";
import { byRank, partWords, short } from "studio/views/tokens_matrices";

const ROW = 34, HIGH = 24, TOP = 88, GAP = 5, BAR = 7, LANE = 14;
const ACTS = { hold: "", gather: "G", multiply: "M", one: "M", sum: "S", free: "F", send: "X", wait: "W", first: "" };
const ACT_WORDS = { gather: "gathers", multiply: "multiplies", one: "multiplies", sum: "sums", free: "frees", send: "sends on", wait: "waits", first: "has the token" };

export function layerHeight(width, data) {
  if (!data) return 100;
  const each = heightOf(data);
  return width < 640 ? data.more.sides.length * each : each;
}

function heightOf(data) {
  return rowTop(Math.max(...data.more.sides.map((side) => side.devices.length))) + (data.more.sides.some((side) => side.gathers) ? LANE + 14 : 8);
}

export function layerKeys() {
  const item = (style, words) => h("li", {}, h("span", { class: "swatch", style, "aria-hidden": "true" }), words);
  return [item("background:var(--k-forward)", "weights that a device holds, by area"), item("background:var(--k-communication)", "gathered, to be freed again"),
    item("background:var(--k-comm)", "on its way"), item("background:var(--muted);width:7px", "memory for weights of this layer and the next, all bars on one scale"), h("li", {}, "G gathers · M multiplies · S sums · X sends · F frees · W waits")];
}

/** Where everything of the sides is: {left, top, wide, strip, matrices: [{name, x, w}], bar, right} in pixels. */
export function layerPlaces(width, data) {
  const { sides, matrices } = data.more, narrow = width < 640, wide = Math.floor(narrow ? width : width / sides.length - 14);
  const left = narrow ? 46 : 54, strip = narrow ? 22 : 36, words = narrow ? 92 : 104;
  const start = left + strip + 12, room = wide - words - start - BAR - 8 - GAP * (matrices.length - 1);
  const widths = shared(matrices.map((m) => m.rows * m.columns), room, Math.min(22, Math.floor(room / matrices.length)));
  return sides.map((side, i) => {
    let x = start;
    const placed = matrices.map((matrix, m) => {
      const w = widths[m];
      x += w + GAP;
      return { ...matrix, x: x - w - GAP, w };
    });
    return { left: narrow ? 0 : Math.round(i * (width / sides.length + 7)), top: narrow ? i * heightOf(data) : 0, wide, label: left, strip: { x: left, w: strip }, matrices: placed, bar: x + 3, right: wide - words };
  });
}

/** Whole pixels in proportion to sizes, at least `least` each. */
function shared(sizes, room, least) {
  let small = new Set();
  for (;;) {
    const rest = room - small.size * least, sum = sizes.reduce((all, size, i) => (small.has(i) ? all : all + size), 0);
    const more = sizes.map((size, i) => i).filter((i) => !small.has(i) && sizes[i] / sum * rest < least);
    if (!more.length) return sizes.map((size, i) => (small.has(i) ? least : Math.floor(size / sum * rest)));
    small = new Set([...small, ...more]);
  }
}

export function rowTop(rank) {
  return TOP + rank * ROW;
}

export const MATRIX_HEIGHT = HIGH;

export function drawLayer(context, width, data, at, pointed) {
  const step = Math.round(at), part = at - Math.floor(at), now = Math.ceil(at);
  layerPlaces(width, data).forEach((place, i) => {
    context.save();
    context.translate(place.left, place.top);
    drawSide(context, data, place, data.more.sides[i], "AB"[i], part ? now : step, part || 1, pointed);
    context.restore();
  });
  return (x, y) => layerAt(width, data, x, y);
}

function drawSide(context, data, place, side, letter, step, part, pointed) {
  const theme = colours(), act = side.acts[step], held = byRank(side), most = Math.max(...data.more.sides.flatMap((each) => each.memory));
  const between = (values) => values[Math.max(0, step - 1)] * (1 - part) + values[step] * part, memory = between(side.memory);
  heading(context, theme, data, place, side, letter, step);
  side.devices.forEach((device, rank) => {
    const y = rowTop(rank);
    if (rank === pointed) highlight(context, theme, place, y);
    context.fillStyle = theme.ink;
    context.textAlign = "right";
    context.fillText(`rank ${rank}`, place.label - 8, y + HIGH / 2);
    strip(context, theme, place.strip, device, data.more.layers, y);
    for (const matrix of place.matrices) {
      frame(context, theme, matrix.x, y, matrix.w, HIGH);
      borrowed(context, side, held, device, matrix, act, part, y);
      context.fillStyle = colourOf("forward");
      fill(context, held[rank][matrix.name]?.boxes, matrix, y);
    }
    frame(context, theme, place.bar, y, BAR, HIGH);
    context.fillStyle = theme.muted;
    if (device.stage === 0) context.fillRect(place.bar, y + HIGH * (1 - memory / most), BAR, HIGH * memory / most);
    does(context, theme, side, act, device, place.right, y, device.stage === 0 ? memory : 0);
  });
  if (side.gathers) lane(context, theme, side, place, between(side.ahead));
  flights(context, theme, side, held, act, place, part);
}

/** The row of the rank that is pointed at, here or in another drawing. */
function highlight(context, theme, place, y) {
  context.fillStyle = theme.grid;
  context.beginPath();
  context.roundRect(-4, y - 5, place.wide + 6, ROW, 5);
  context.fill();
}

/** What of the next layer has come meanwhile. */
function lane(context, theme, side, place, ahead) {
  const y = rowTop(side.devices.length) + 2, x = place.matrices[0].x, w = place.bar - 3 - GAP - x;
  context.fillStyle = theme.muted;
  context.textAlign = "right";
  context.fillText("next layer", x - 8, y + LANE / 2);
  frame(context, theme, x, y, w, LANE);
  context.fillStyle = hatched(context, "communication");
  context.fillRect(x, y, w * ahead, LANE);
  context.fillStyle = theme.muted;
  context.textAlign = "left";
  context.fillText(`${percent(ahead)} there`, place.right + 8, y + LANE / 2);
}

function heading(context, theme, data, place, side, letter, step) {
  const font = context.font, soFar = side.seconds.slice(0, step + 1).reduce((all, each) => all + each, 0);
  context.textAlign = "left";
  context.fillStyle = theme.ink;
  context.font = font.replace("12px", "600 14px");
  context.fillText(`${letter}: ${side.layout}`, 0, 9);
  const named = context.measureText(`${letter}: ${side.layout}`).width;
  context.font = font;
  context.textAlign = "right";
  const sum = `so far ${seconds(soFar)}`, takes = side.seconds[step] ? `takes ${seconds(side.seconds[step])}; ${sum}` : sum;
  const told = soFar ? [takes, sum].find((words) => context.measureText(words).width < place.wide - named - 16) : "";
  context.fillText(told ?? "", place.wide - 4, 9);
  context.textAlign = "left";
  context.fillStyle = theme.muted;
  const note = side.ranks > side.devices.length ? ` (${side.devices.length} of ${side.ranks} ranks are drawn)` : "";
  wrap(context, side.words[step] + note, place.wide).slice(0, 2).forEach((line, i) => context.fillText(line, 0, 29 + i * 16));
  let free = 0;
  for (const matrix of place.matrices) {
    // A name that does not fit over its matrix is a line higher, over its neighbours; the pointer tells what has no room.
    const name = short(matrix.name), long = context.measureText(name).width;
    if (long <= matrix.w + GAP - 1) context.fillText(name, matrix.x, TOP - 12);
    else if (matrix.x > free) {
      context.fillText(name, matrix.x, TOP - 26);
      free = matrix.x + long + 4;
    }
  }
  context.textAlign = "right";
  context.fillText("layers", place.strip.x + place.strip.w, TOP - 12);
}

/** All layers from left to right, with this rank's share of each. */
function strip(context, theme, { x, w }, device, layers, y) {
  frame(context, theme, x, y, w, HIGH);
  const [from, to] = device.layers;
  context.fillStyle = colourOf("forward");
  context.fillRect(x + from / layers * w, y + device.begins * HIGH, (to - from) / layers * w, device.share * HIGH);
}

/** The ground of a matrix, and its edge around it: on it, it would cover thin slices. */
function frame(context, theme, x, y, w, high) {
  context.fillStyle = theme.raised;
  context.fillRect(x, y, w, high);
  context.strokeStyle = theme.line;
  context.strokeRect(x - 0.5, y - 0.5, w + 1, high + 1);
}

function fill(context, boxes, { x, w }, y) {
  for (const [left, top, wide, high] of boxes ?? []) context.fillRect(x + left * w, y + top * HIGH, wide * w, high * HIGH);
}

/** What a rank has of a matrix that is another's: chunk after chunk as they come round the ring, until they are freed. */
function borrowed(context, side, held, device, matrix, act, part, y) {
  if (!side.gathers || !["gather", "multiply", "free"].includes(act)) return;
  const n = device.group.length, mine = device.group.indexOf(device.rank), come = act === "gather" ? part * (n - 1) : n - 1;
  context.fillStyle = hatched(context, "communication");
  for (let hop = 1; hop < n; hop++) {
    const owner = device.group[(mine - hop + n) % n];
    context.globalAlpha = act === "free" ? 1 - part : Math.min(1, Math.max(0, come - hop + 1));
    if (context.globalAlpha) fill(context, held[owner]?.[matrix.name]?.boxes, matrix, y);
  }
  context.globalAlpha = 1;
}

function does(context, theme, side, act, device, right, y, memory) {
  const idle = act !== "hold" && device.stage !== 0, doing = idle ? "wait" : act === "wait" ? "first" : act, letter = ACTS[doing];
  if (letter) {
    const kind = { M: "forward", G: "communication", S: "comm", X: "comm", F: "rest", W: "rest" }[letter];
    context.globalAlpha = idle ? 0.45 : 1;
    context.fillStyle = hatched(context, kind);
    context.beginPath();
    context.roundRect(right + 8, y + 2, 20, 20, 4);
    context.fill();
    context.fillStyle = inkOn(kind);
    context.textAlign = "center";
    context.fillText(letter, right + 18, y + 12.5);
    context.globalAlpha = 1;
  }
  context.textAlign = "left";
  context.fillStyle = idle ? theme.muted : theme.ink;
  const x = right + (letter ? 34 : 8), below = doing === "hold" ? `${percent(device.of_all)} of all` : memory ? bytes(memory) : "";
  context.fillText(doing === "hold" ? device.can : ACT_WORDS[doing], x, y + (below ? 6.5 : 12.5));
  context.fillStyle = theme.muted;
  context.fillText(below, x, y + 19.5);
}

/** What travels between the devices: whole chunks in ring order while they gather, vectors while they sum or send. */
function flights(context, theme, side, held, act, place, part) {
  if (!["gather", "sum", "send"].includes(act) || part >= 1) return;
  const middle = (rank) => rowTop(rank) + HIGH / 2;
  for (const device of side.devices.filter((each) => each.stage === 0)) {
    if (act === "send") {
      if (device.next !== null && device.next < side.devices.length) tile(context, theme, place.strip.x + place.strip.w + 6, middle(device.rank) + (middle(device.next) - middle(device.rank)) * part);
      continue;
    }
    const all = act === "gather" ? device.group : device.sums, n = all.length, hop = part * (n - 1), at = all.indexOf(device.rank) + Math.floor(hop);
    const from = all[at % n], to = all[(at + 1) % n];
    if (n < 2 || Math.max(from, to) >= side.devices.length) continue;
    const y = rowTop(from) + (rowTop(to) - rowTop(from)) * (hop % 1);
    if (act === "sum") tile(context, theme, place.bar + BAR + 8, y + HIGH / 2);
    else chunk(context, theme, place, held[device.rank], y);
  }
}

/** All of what a rank holds of the layer, on its way from one row to the next. */
function chunk(context, theme, place, held, y) {
  context.fillStyle = colourOf("comm");
  for (const matrix of place.matrices) fill(context, held[matrix.name]?.boxes, matrix, y);
}

function tile(context, theme, x, y) {
  context.fillStyle = colourOf("comm");
  context.strokeStyle = theme.surface;
  context.beginPath();
  context.roundRect(x - 4, y - 4, 8, 8, 3);
  context.fill();
  context.stroke();
}

function wrap(context, words, width) {
  const found = [""];
  for (const word of words.split(" ")) {
    const longer = found[found.length - 1] ? `${found[found.length - 1]} ${word}` : word;
    if (context.measureText(longer).width > width && found[found.length - 1]) found.push(word);
    else found[found.length - 1] = longer;
  }
  return found;
}

/** What is under the pointer: its rank, and words. */
function layerAt(width, data, px, py) {
  for (const [i, place] of layerPlaces(width, data).entries()) {
    const side = data.more.sides[i], x = px - place.left, y = py - place.top, rank = Math.floor((y - TOP) / ROW), device = side.devices[rank];
    if (x < 0 || x > place.wide || y < TOP) continue;
    if (!device) return side.gathers && y - rowTop(side.devices.length) < LANE + 4 ? { words: "the next layer: its gather begins when this one's arithmetic does" } : null;
    return { rank, words: y - rowTop(rank) > HIGH ? "" : wordsAt(data, side, device, place, x) };
  }
  return null;
}

function wordsAt(data, side, device, place, x) {
  const { rank } = device;
  if (x < place.strip.x + place.strip.w) return `rank ${rank}: layers ${device.layers[0] + 1} to ${device.layers[1]}, ${percent(device.share)} of each\n${percent(device.of_all)} of all layers`;
  const matrix = place.matrices.find((each) => x >= each.x && x <= each.x + each.w);
  if (matrix) return partWords(rank, matrix, byRank(side)[rank][matrix.name], data.more.width);
  return x < place.bar || device.stage !== 0 ? "" : `rank ${rank}: weights of this layer and the next\n${bytes(Math.min(...side.memory))} before, ${bytes(Math.max(...side.memory))} at most`;
}

// One layer on every device: its matrices in miniature with the part that each rank has, filled by area, and what moves.

import { colourOf, colours, hatched, inkOn } from "studio/lib/theme";
import { seconds, share as percent } from "studio/lib/format";
import { h } from "studio/lib/dom";
import { byRank, partWords, short } from "studio/views/tokens_matrices";

const ROW = 34, HIGH = 24, TOP = 88, GAP = 5;
const ACTS = { hold: "", gather: "G", multiply: "M", one: "M", sum: "S", free: "F", send: "X", wait: "W", first: "" };
const ACT_WORDS = { gather: "gathers", multiply: "multiplies", one: "multiplies", sum: "sums", free: "frees", send: "sends on", wait: "waits", first: "has the token" };

export function layerHeight(width, data) {
  if (!data) return 100;
  const each = heightOf(data);
  return width < 640 ? data.more.sides.length * each : each;
}

function heightOf(data) {
  return TOP + Math.max(...data.more.sides.map((side) => side.devices.length)) * ROW + 8;
}

export function layerKeys() {
  const item = (style, words) => h("li", {}, h("span", { class: "swatch", style, "aria-hidden": "true" }), words);
  return [item("background:var(--k-forward)", "weights that a device holds, by area"), item("background:var(--k-communication)", "gathered, to be freed again"),
    item("background:var(--k-comm)", "on its way"), h("li", {}, "G gathers · M multiplies · S sums · X sends · F frees · W waits")];
}

/** Where everything of the sides is: {left, top, wide, strip, matrices: [{name, x, w}], right} in pixels. */
export function layerPlaces(width, data) {
  const { sides, matrices } = data.more, narrow = width < 640, wide = Math.floor(narrow ? width : width / sides.length - 14);
  const left = narrow ? 46 : 54, strip = narrow ? 26 : 46, words = narrow ? 96 : 112;
  const start = left + strip + 14, room = wide - words - start - GAP * (matrices.length - 1);
  const widths = shared(matrices.map((m) => m.rows * m.columns), room, Math.min(22, Math.floor(room / matrices.length)));
  return sides.map((side, i) => {
    let x = start;
    const placed = matrices.map((matrix, m) => {
      const w = widths[m];
      x += w + GAP;
      return { ...matrix, x: x - w - GAP, w };
    });
    return { left: narrow ? 0 : Math.round(i * (width / sides.length + 7)), top: narrow ? i * heightOf(data) : 0, wide, label: left, strip: { x: left, w: strip }, matrices: placed, right: wide - words };
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

export function drawLayer(context, width, data, at) {
  const step = Math.round(at), part = at - Math.floor(at), now = Math.ceil(at);
  layerPlaces(width, data).forEach((place, i) => {
    context.save();
    context.translate(place.left, place.top);
    drawSide(context, data, place, data.more.sides[i], "AB"[i], part ? now : step, part || 1);
    context.restore();
  });
  return (x, y) => layerAt(width, data, x, y);
}

function drawSide(context, data, place, side, letter, step, part) {
  const theme = colours(), act = side.acts[step], held = byRank(side);
  heading(context, theme, data, place, side, letter, step);
  side.devices.forEach((device, rank) => {
    const y = rowTop(rank);
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
    does(context, theme, side, act, device, place.right, y);
  });
  flights(context, theme, side, held, act, place, part);
}

function heading(context, theme, data, place, side, letter, step) {
  const font = context.font, soFar = side.seconds.slice(0, step + 1).reduce((all, each) => all + each, 0);
  context.textAlign = "left";
  context.fillStyle = theme.ink;
  context.font = font.replace("12px", "600 14px");
  context.fillText(`${letter}: ${side.layout}`, 0, 9);
  context.font = font;
  context.textAlign = "right";
  context.fillText(soFar ? `${side.seconds[step] ? `takes ${seconds(side.seconds[step])}; so far ` : "so far "}${seconds(soFar)}` : "", place.wide - 4, 9);
  context.textAlign = "left";
  context.fillStyle = theme.muted;
  const note = side.ranks > side.devices.length ? ` (${side.devices.length} of ${side.ranks} ranks are drawn)` : "";
  wrap(context, side.words[step] + note, place.wide).slice(0, 2).forEach((line, i) => context.fillText(line, 0, 29 + i * 16));
  context.fillText("layers", place.strip.x, TOP - 12);
  for (const matrix of place.matrices) {
    const name = short(matrix.name);
    if (context.measureText(name).width <= matrix.w + GAP - 1) context.fillText(name, matrix.x, TOP - 12);
  }
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

function does(context, theme, side, act, device, right, y) {
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
  context.fillText(doing === "hold" ? device.can : ACT_WORDS[doing], right + (letter ? 34 : 8), y + (doing === "hold" ? 7 : 12.5));
  if (doing !== "hold") return;
  context.fillStyle = theme.muted;
  context.fillText(`${percent(device.of_all)} of all`, right + 8, y + 20);
}

/** Tiles that travel between the devices while they gather, sum or send. */
function flights(context, theme, side, held, act, place, part) {
  if (!["gather", "sum", "send"].includes(act) || part >= 1) return;
  const size = act === "gather" ? 12 : 7, middle = (rank) => rowTop(rank) + HIGH / 2;
  const tile = (x, y) => {
    context.fillStyle = colourOf("comm");
    context.strokeStyle = theme.surface;
    context.beginPath();
    context.roundRect(x - size / 2, y - size / 2, size, size, 3);
    context.fill();
    context.stroke();
  };
  for (const device of side.devices.filter((each) => each.stage === 0)) {
    if (act === "send") {
      if (device.next !== null && device.next < side.devices.length) tile(place.strip.x + place.strip.w + 7, middle(device.rank) + (middle(device.next) - middle(device.rank)) * part);
      continue;
    }
    const all = act === "gather" ? device.group : device.sums, n = all.length, hop = part * (n - 1), at = all.indexOf(device.rank) + Math.floor(hop);
    const from = all[at % n], to = all[(at + 1) % n];
    if (n < 2 || Math.max(from, to) >= side.devices.length) continue;
    const x = act === "gather" ? centre(place, held[device.rank]) : place.right - 12;
    tile(x, middle(from) + (middle(to) - middle(from)) * (hop % 1));
  }
}

/** The middle of the largest part that a rank has, in pixels. */
function centre(place, held) {
  let best = place.matrices[0].x, most = 0;
  for (const matrix of place.matrices) for (const [left, , wide, high] of held[matrix.name]?.boxes ?? []) {
    if (wide * matrix.w * high > most) [best, most] = [matrix.x + (left + wide / 2) * matrix.w, wide * matrix.w * high];
  }
  return best;
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

/** What is under the pointer, in words. */
function layerAt(width, data, px, py) {
  const places = layerPlaces(width, data);
  for (const [i, place] of places.entries()) {
    const side = data.more.sides[i], x = px - place.left, y = py - place.top, rank = Math.floor((y - TOP) / ROW), device = side.devices[rank];
    if (!device || x < 0 || x > place.wide || y - rowTop(rank) > HIGH) continue;
    if (x < place.strip.x + place.strip.w) return `rank ${rank}: layers ${device.layers[0] + 1} to ${device.layers[1]}, ${percent(device.share)} of each\n${percent(device.of_all)} of all layers`;
    const matrix = place.matrices.find((each) => x >= each.x && x <= each.x + each.w);
    return matrix ? partWords(rank, matrix, byRank(side)[rank][matrix.name], data.more.width) : "";
  }
  return "";
}

// Both strategies write an answer at the pace that is predicted: two lanes of devices, words, and the bytes that they cost.

import { h, still } from "studio/lib/dom";
import { figure } from "studio/lib/figure";
import { bytes, count, share } from "studio/lib/format";
import { drawLinear, linearHeight } from "studio/lib/linear";
import { colourOf, colours, hatched } from "studio/lib/theme";

const TEXT = "Each word here stands for one token of an answer, at the pace that is predicted. The words are no model's: they only show how fast one would read. Where the weights of a layer have to be gathered first, every token waits for all of them. Where the token's vector travels instead, the weights stay where they are, and the next word is there at once.".split(" ");
const BOX = 46, LANE = BOX + 28, GAP = 26, NARROW = 640;

/** The figure; `set` shows another answer of tokens, `run` the times of its tokens. */
export function raceFigure(page) {
  let data = null, times = [], most = 0, time = null, running = false, before = 0, frame = 0;
  const button = h("button", { type: "button", class: "primary", onclick: () => (still() ? later(1) : running ? pause() : start()) });
  const clock = h("output", { class: "muted", "aria-live": "off" }), said = h("p", { class: "unseen", "aria-live": "polite" });
  const lanes = ["A", "B"].map((side) => {
    const name = h("p", { class: "strong" }), fit = h("p", {}), facts = h("p", { class: "counter" });
    const words = h("div", { class: "words", "aria-hidden": "true", dataset: { side } });
    return { name, fit, facts, words, head: h("div", {}, name, fit), foot: h("div", {}, facts, words) };
  });
  const heads = h("div", { class: "lanes" }), feet = h("div", { class: "lanes" });
  const self = figure(page, { name: "race", title: "The race, at the pace that is predicted", above: [heads], extras: [feet, h("div", { class: "row race" }, button, clock), said],
    height: (width) => (data ? laneHeight(width) + linearHeight(width, data.more.sides) : 200),
    draw: (context, width) => data && draw(context, width, data, { running, layers: (i) => layerOf(i) }) });

  function laneHeight(width) {
    return width < NARROW ? data.more.sides.length * LANE : LANE;
  }

  function set(given) {
    data = given;
    const { sides } = given.more;
    sides.forEach((side, i) => {
      lanes[i].name.replaceChildren(`${"AB"[i]}: ${side.name} `, h("span", { class: "muted" }, side.layout));
      lanes[i].fit.textContent = side.fits || "the memory of the devices is not known";
      lanes[i].fit.className = side.fits.startsWith("does not") ? "bad" : "muted";
    });
    heads.replaceChildren(...sides.map((_, i) => lanes[i].head));
    feet.replaceChildren(...sides.map((_, i) => lanes[i].foot));
    self.note.textContent = "";
    self.show(given);
    self.describe(`${sides.map((side, i) => `${"AB"[i]}, ${side.layout}: ${count(side.speed)} words a second, ${bytes(side.sends)} sent by each device for one`).join("; ")}. Areas show the bytes on one linear scale.`);
  }

  /** each: seconds so far after every token, by side; length: tokens of the answer. */
  function run(each, length) {
    pause();
    [times, most, time] = [each, length, null];
    tell();
  }

  function counted(side, by = time) {
    if (by === null || !times.length) return 0;
    const after = times[side].findIndex((end) => end > by);
    return Math.min(most, after < 0 ? times[side].length : after);
  }

  /** The layer in which a side's token is, or 0 where it is between two or goes too fast to be seen. */
  function layerOf(side) {
    const n = counted(side), own = times[side];
    if (time === null || !own || n >= most || data.more.sides[side].seconds < 0.1) return 0;
    const start = n ? own[n - 1] : 0;
    return Math.min(data.more.layers, 1 + Math.floor((data.more.layers * (time - start)) / (own[n] - start)));
  }

  /** The first `n` words in a lane's box. */
  function write({ words }, n) {
    while (words.children.length > n) words.lastChild.remove();
    for (let i = words.children.length; i < n; i++) words.append(h("span", {}, `${TEXT[i % TEXT.length]} `));
    words.scrollTop = words.scrollHeight;
  }

  function start() {
    if (!times.length) return;
    if (time === null || done()) time = 0;
    running = true;
    before = performance.now();
    frame = requestAnimationFrame(turn);
    tell();
  }

  function turn(now) {
    // As the clock on the wall has it, unless the tab was hidden.
    const passed = (now - before) / 1000;
    before = now;
    time += passed < 1 ? passed : 0;
    if (done()) running = false;
    else frame = requestAnimationFrame(turn);
    tell();
  }

  function later(seconds) {
    time = time === null || done() ? 0 : time + seconds;
    tell();
    said.textContent = `${Math.floor(time)} s after the prompt: ${data.more.sides.map((_, i) => `${"AB"[i]} has written ${counted(i)} of ${most} tokens`).join(", ")}.`;
  }

  function done() {
    return times.every((_, side) => counted(side) >= most);
  }

  function pause() {
    running = false;
    cancelAnimationFrame(frame);
    tell();
  }

  function tell() {
    button.textContent = running ? "Stop" : still() ? (time === null ? "Start the race" : "One second later") : time === null || done() ? "Start the race" : "Continue";
    clock.textContent = time === null ? "" : `${time.toFixed(1)} s on the clock`;
    data?.more.sides.forEach((side, i) => {
      const n = counted(i);
      lanes[i].facts.textContent = `${count(side.speed)} words a second · ${n.toLocaleString("en-US")} written · ${bytes(n * side.sends)} sent by each device`;
      write(lanes[i], n);
    });
    self.redraw();
  }

  page.cleanup(() => cancelAnimationFrame(frame));
  return { ...self, set, run, start, pause };
}

/** Lanes of devices, each as high as one layer: what it holds of it is filled, what it borrows for every token hatched. */
function draw(context, width, data, { running, layers }) {
  const { sides } = data.more, narrow = width < NARROW, wide = narrow ? width : (width - GAP * (sides.length - 1)) / sides.length;
  const places = sides.map((side, i) => {
    const x = narrow ? 0 : i * (wide + GAP), y = narrow ? i * LANE : 0;
    lane(context, side, "ab"[i], x, y, wide, running, layers(i), data.more.layers);
    return { x, y };
  });
  const under = drawLinear(context, width, sides, narrow ? sides.length * LANE : LANE);
  return (px, py) => {
    const i = places.findIndex(({ x, y }) => px >= x && px < x + wide && py >= y && py < y + BOX);
    if (i < 0) return under(px, py);
    const device = sides[i].devices[Math.floor(((px - places[i].x) * sides[i].devices.length) / wide)];
    return `${"AB"[i]}, device ${device.rank}: ${device.can}\nholds ${share(device.share)} of a layer, ${share(device.of_all)} of all`;
  };
}

function lane(context, side, hue, left, top, wide, running, layer, layers) {
  const theme = colours(), n = side.devices.length, each = wide / n;
  side.devices.forEach((device, i) => {
    const x = left + i * each, w = each - 4, held = Math.max(1, BOX * device.share), bad = device.can === "does not fit";
    context.fillStyle = theme.raised;
    context.fillRect(x, top, w, BOX);
    if (side.gathers && !bad) {
      context.globalAlpha = running || layer ? 1 : 0.5;
      context.fillStyle = hatched(context, `${hue}-borrowed`);
      context.fillRect(x, top, w, BOX);
      context.globalAlpha = 1;
    }
    context.fillStyle = colourOf(hue);
    if (!bad) context.fillRect(x, top + BOX - held, w, held);
    context.strokeStyle = bad ? theme.bad : theme.line;
    context.strokeRect(x + 0.5, top + 0.5, w - 1, BOX - 1);
    if (bad) cross(context, x, top, w);
    context.textAlign = "center";
    if (w > 14) plate(context, theme, String(device.rank), x + w / 2, top + 12);
  });
  context.textAlign = "left";
  context.fillStyle = theme.muted;
  const state = side.fits.startsWith("does not") ? "nothing can run: it does not fit" : layer ? `this word is in layer ${layer} of ${layers}` : side.gathers ? "filled: held; hatched: borrowed for every word" : "filled: held of a layer, and enough to compute with";
  context.fillText(state, left, top + BOX + 12, wide);
}

function cross(context, x, y, w) {
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(x + w, y + BOX);
  context.moveTo(x + w, y);
  context.lineTo(x, y + BOX);
  context.stroke();
}

/** A rank's number on a plate of the page's own ground. */
function plate(context, theme, word, x, y) {
  const wide = context.measureText(word).width + 8;
  context.fillStyle = theme.surface;
  context.fillRect(x - wide / 2, y - 8, wide, 16);
  context.fillStyle = theme.ink;
  context.fillText(word, x, y + 0.5);
}

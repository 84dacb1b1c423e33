// Both strategies write an answer as fast as the prediction says: a word for every token, on a real clock.

import { h, still } from "studio/lib/dom";

const TEXT = "Each word here stands for one token of an answer, at the pace that is predicted. The words are no model's: they only show how fast one would read. Where the weights of a layer have to be gathered first, every token waits for all of them. Where the token's vector travels instead, the weights stay where they are, and the next word is there at once.".split(" ");

/** Boxes of words for each side, and the clock. onTick(): the clock has moved; stopped(): what else plays shall stop. */
export function race(onTick, stopped) {
  const button = h("button", { type: "button", onclick: () => (still() ? later(1) : running ? pause() : start()) });
  const clock = h("output", { class: "muted" });
  let times = [], most = 0, time = null, running = false, before = 0, frame = 0;
  const boxes = ["A", "B"].map((side) => h("div", { class: "words", "aria-hidden": "true", dataset: { side } }));

  /** each: seconds so far after every token, by side; length: tokens of the answer. */
  function set(each, length) {
    pause();
    [times, most, time] = [each, length, null];
    tell();
  }

  /** Tokens that a side has written by now or another time, or null where no race is on. */
  function count(side, by = time) {
    if (time === null) return null;
    const after = times[side].findIndex((end) => end > by);
    return Math.min(most, after < 0 ? times[side].length : after);
  }

  /** The first `n` words in a side's box. */
  function write(side, n) {
    const box = boxes[side];
    while (box.children.length > n) box.lastChild.remove();
    for (let i = box.children.length; i < n; i++) box.append(h("span", {}, `${TEXT[i % TEXT.length]} `));
    box.scrollTop = box.scrollHeight;
  }

  function start() {
    stopped();
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
    onTick();
  }

  function later(seconds) {
    stopped();
    time = time === null || done() ? 0 : time + seconds;
    tell();
    onTick();
  }

  function done() {
    return times.every((_, side) => count(side) >= most);
  }

  function pause() {
    running = false;
    cancelAnimationFrame(frame);
    tell();
  }

  /** Back to what the slider says. */
  function leave() {
    pause();
    time = null;
    tell();
  }

  function tell() {
    button.textContent = running ? "Stop" : still() ? (time === null ? "Race in real time" : "One second later") : time === null || done() ? "Race in real time" : "Continue";
    clock.textContent = time === null ? "" : `${time.toFixed(1)} s on the clock`;
  }

  /** Whole seconds on the clock, or null where no race is on. */
  function seconds() {
    return time === null ? null : Math.floor(time);
  }

  return { controls: [button, clock], boxes, set, count, seconds, write, start, pause, leave };
}

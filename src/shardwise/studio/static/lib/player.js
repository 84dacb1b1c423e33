// Play, pause, step and scrub through frames. With reduced motion nothing plays by itself: Play goes one step.

import { h, still, unique } from "studio/lib/dom";

/** onFrame(position): a number from 0 to frames - 1, broken while a step is under way. name: its word in the URL. */
export function player(page, { name, label, onFrame, seconds = 1.1 }) {
  const id = unique("scrub");
  const play = h("button", { type: "button", class: "primary", onclick: toggle }, "Play");
  const back = h("button", { type: "button", "aria-label": "One step back", onclick: () => go(Math.ceil(at) - 1) }, "◂");
  const forth = h("button", { type: "button", "aria-label": "One step on", onclick: () => go(Math.floor(at) + 1) }, "▸");
  const scrub = h("input", { id, type: "range", min: 0, max: 0, step: 1, "aria-label": label,
    oninput: () => move(Number(scrub.value)), onchange: keep });
  const place = h("output", { for: id });
  const sentence = h("p", { class: "sentence", "aria-live": "polite" });
  const node = h("div", { class: "player" }, h("div", { class: "row" }, back, play, forth, scrub, place), sentence);
  let sentences = [], at = 0, running = false, before = 0, frame = 0, kept = page.local(name, null);

  function show(lines, position) {
    sentences = lines;
    kept = page.local(name, null);
    scrub.max = lines.length - 1;
    at = within(position);
    tell();
  }

  function within(position) {
    return Math.min(Math.max(0, Number.isFinite(position) ? position : 0), sentences.length - 1);
  }

  /** A step that was typed into the address of the open page. */
  function follow() {
    const wanted = page.local(name, null);
    if (wanted === kept) return;
    kept = wanted;
    if (wanted === null || !sentences.length || Math.round(at) === Number(wanted)) return;
    stop();
    at = within(Math.round(Number(wanted)));
    tell();
  }

  function tell() {
    const whole = Math.ceil(at);  // as the sentence: the step under way
    scrub.value = whole;
    place.textContent = `${whole} of ${sentences.length - 1}`;
    scrub.setAttribute("aria-valuetext", `step ${place.textContent}`);
    say(sentences[Math.ceil(at)] ?? "");
    play.textContent = running ? "Pause" : still() ? "Next step" : at >= sentences.length - 1 ? "Play again" : "Play";
    back.disabled = at <= 0;
    forth.disabled = at >= sentences.length - 1;
    onFrame(at);
  }

  function go(position) {
    move(position);
    keep();
  }

  function move(position) {
    stop();
    at = within(position);
    tell();
  }

  /** Into the address: once a slider is let go, since browsers limit how often an address may change. */
  function keep() {
    kept = String(at);
    page.setLocal({ [name]: at });
  }

  function toggle() {
    if (running) return go(Math.ceil(at));
    if (still()) return go(at >= sentences.length - 1 ? 0 : Math.floor(at) + 1);
    start();
  }

  function start() {
    if (at >= sentences.length - 1) at = 0;
    running = true;
    before = performance.now();
    frame = requestAnimationFrame(turn);
    tell();
  }

  function turn(now) {
    // A tab that was hidden must not jump to the end.
    const passed = Math.min(0.1, (now - before) / 1000);
    before = now;
    at = Math.min(sentences.length - 1, at + passed / seconds);
    if (at >= sentences.length - 1) return go(sentences.length - 1);
    tell();
    frame = requestAnimationFrame(turn);
  }

  function stop() {
    running = false;
    cancelAnimationFrame(frame);
  }

  /** Another sentence, until it moves again. */
  function say(line) {
    if (sentence.textContent !== line) sentence.textContent = line;
  }

  /** Stand still where it is. */
  function pause() {
    if (running) move(Math.ceil(at));
  }

  page.cleanup(stop);
  page.onLocal(follow);
  return { node, show, go, start, pause, say, get running() { return running; } };
}

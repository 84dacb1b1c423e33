// A window on time that people move: drag or arrow keys pan, wheel with Ctrl or + and - zoom, 0 shows all.

import { h } from "studio/lib/dom";
import { LEFT } from "studio/lib/gantt";

/** extent(): the whole time. Kept in the URL under `name`. onChange: redraw. left(): pixels before the time begins. onSelect(span):
 * Shift and drag have selected this time. */
export function timeWindow(page, { name, extent, onChange, left = () => LEFT, onSelect = null }) {
  let span = null, kept = page.local(name, "");
  const button = (label, words, act) => h("button", { type: "button", "aria-label": words, onclick: act }, label);
  const node = h("div", { class: "zoom", role: "group", "aria-label": "Time shown" },
    button("−", "Zoom out", () => zoom(1.6)), button("+", "Zoom in", () => zoom(1 / 1.6)),
    button("◂", "Earlier", () => pan(-0.3)), button("▸", "Later", () => pan(0.3)), button("All", "Show all", reset));

  function current() {
    if (!span) {
      const kept = page.local(name, "").split("~").map(Number);
      span = kept.length === 2 && kept[1] > kept[0] ? kept : [0, extent()];
    }
    return span;
  }

  function move(from, to, remember = true) {
    const whole = extent(), wide = Math.min(whole, Math.max(whole * 1e-6, to - from));
    const start = Math.min(Math.max(0, from), whole - wide);
    span = [start, start + wide];
    onChange();
    if (remember) keep();
  }

  let timer = 0;
  function keep() {
    clearTimeout(timer);
    timer = setTimeout(() => {
      const all = span[0] <= 0 && span[1] >= extent();
      kept = all ? "" : span.map((v) => Number(v.toPrecision(7))).join("~");
      page.setLocal({ [name]: kept });
    }, 150);
  }

  function zoom(factor, share = 0.5) {
    const [a, b] = current(), at = a + (b - a) * share;
    move(at - (at - a) * factor, at + (b - at) * factor);
  }

  function pan(share) {
    const [a, b] = current();
    move(a + (b - a) * share, b + (b - a) * share);
  }

  function reset() {
    move(0, extent());
  }

  function listen(canvas) {
    canvas.tabIndex = 0;
    canvas.addEventListener("keydown", (event) => {
      const act = { ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15), "+": () => zoom(1 / 1.4), "=": () => zoom(1 / 1.4), "-": () => zoom(1.4), 0: reset, Home: reset, w: () => zoom(1 / 1.4), s: () => zoom(1.4), a: () => pan(-0.15), d: () => pan(0.15) }[event.key];
      if (!act || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      act();
    });
    const shareAt = (event) => {
      const box = canvas.getBoundingClientRect();
      return Math.min(1, Math.max(0, (event.clientX - box.left - left()) / (box.width - left() - 12)));
    };
    const timeAt = (event) => {
      const [a, b] = current();
      return a + (b - a) * shareAt(event);
    };
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && Math.abs(event.deltaX) <= Math.abs(event.deltaY)) return;
      event.preventDefault();
      if (event.ctrlKey) zoom(Math.exp(event.deltaY / 200), shareAt(event));
      else pan(event.deltaX / canvas.clientWidth);
    }, { passive: false });
    let held = null;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      held = { x: event.clientX, span: [...current()], from: onSelect && event.shiftKey ? timeAt(event) : null };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!held) return;
      if (held.from !== null) return void onSelect([held.from, timeAt(event)].sort((a, b) => a - b));
      const [a, b] = held.span, by = (held.x - event.clientX) / (canvas.clientWidth - left() - 12) * (b - a);
      move(a + by, b + by);
    });
    for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => { held = null; });
    canvas.addEventListener("dblclick", (event) => zoom(1 / 2.5, shareAt(event)));
  }

  page.cleanup(() => clearTimeout(timer));
  page.onLocal(() => {
    // A window that was typed into the address of the open page.
    if (page.local(name, "") === kept) return;
    kept = page.local(name, "");
    span = null;
    onChange();
  });
  return { node, current, listen, move, zoom, pan, renew: () => { span = null; } };
}

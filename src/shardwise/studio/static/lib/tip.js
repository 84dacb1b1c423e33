// A few words beside the pointer.

import { h } from "studio/lib/dom";

/** words(x, y): text for a place on the canvas, or "". left(): the pointer has left it. */
export function tip(page, canvas, words, left = () => {}) {
  const node = h("div", { class: "tip", hidden: true, "aria-hidden": "true" });
  document.body.append(node);
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect(), says = words(event.clientX - box.left, event.clientY - box.top);
    node.hidden = !says;
    node.textContent = says;
    const x = event.clientX + 14 + node.offsetWidth > innerWidth ? event.clientX - node.offsetWidth - 10 : event.clientX + 14;
    node.style.left = `${Math.max(4, x)}px`;
    node.style.top = `${event.clientY + 14}px`;
  });
  canvas.addEventListener("pointerleave", () => {
    node.hidden = true;
    left();
  });
  page.cleanup(() => node.remove());
}

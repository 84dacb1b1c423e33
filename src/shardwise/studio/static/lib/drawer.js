// A drawer at the side of a view with its controls; while it is closed they are in one of the view's chapters.

import { h, unique } from "studio/lib/dom";

/** panels: what `panel` makes. `settle(place)`: where they are while the drawer is closed. */
export function controlDrawer(page, panels) {
  const id = unique("drawer"), row = h("div", { class: "panels scroll" }, panels.map((each) => each.node));
  const button = h("button", { type: "button", "aria-controls": id, onclick: () => page.setLocal({ _controls: isOpen() ? null : 1 }) }, "Change model, devices, strategies");
  const close = h("button", { type: "button", class: "quiet", onclick: () => { button.click(); button.focus(); } }, "Close");
  const node = h("aside", { id, class: "drawer", "aria-label": "Controls" }, h("div", { class: "head" }, h("p", { class: "strong" }, "Controls"), close));
  let elsewhere = node;
  const isOpen = () => page.local("_controls", "") === "1";

  function follow() {
    const open = isOpen(), home = open ? node : elsewhere;
    if (row.parentNode !== home) home.append(row);
    node.hidden = !open;
    button.setAttribute("aria-expanded", String(open));
    document.body.classList.toggle("drawn", open);
  }

  function settle(place) {
    elsewhere = place;
    follow();
  }

  page.onLocal(follow);
  page.cleanup(() => document.body.classList.remove("drawn"));
  return { button, node, settle };
}

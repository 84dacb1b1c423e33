// A drawer at the side of a view with its controls; one chapter may take them into itself.

import { h, unique } from "studio/lib/dom";

/** panels: what `panel` makes. `settle(place, when)`: where the panels are instead of in the drawer, and when. */
export function controlDrawer(page, panels) {
  const id = unique("drawer"), row = h("div", { class: "panels" }, panels.map((each) => each.node));
  const button = h("button", { type: "button", "aria-controls": id, onclick: () => page.setLocal({ _controls: isOpen() ? null : 1 }) }, "Change model, devices, strategies");
  const close = h("button", { type: "button", class: "quiet", onclick: () => { button.click(); button.focus(); } }, "Close");
  const node = h("aside", { id, class: "drawer", "aria-label": "Controls" }, h("div", { class: "head" }, h("p", { class: "strong" }, "Controls"), close));
  let elsewhere = null, at = () => false;
  const isOpen = () => page.local("_controls", "") === "1";

  function follow() {
    const away = at(), open = isOpen() && !away;
    const home = away ? elsewhere : node;
    if (row.parentNode !== home) home.append(row);
    node.hidden = !open;
    button.hidden = away;
    button.setAttribute("aria-expanded", String(open));
    document.body.classList.toggle("drawn", open);
  }

  function settle(place, when) {
    [elsewhere, at] = [place, when];
    follow();
  }

  page.onLocal(follow);
  page.cleanup(() => document.body.classList.remove("drawn"));
  return { button, node, settle };
}

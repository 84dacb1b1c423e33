// A legend of kinds: a patch of colour and hatch, and the kind's name.

import { h, s } from "studio/lib/dom";
import { kinds } from "studio/lib/theme";

/** letters: whether the drawing has them. */
export function swatches(names, letters = false) {
  return names.map((name) => {
    const kind = kinds[name];
    const patch = s("svg", { width: 20, height: 16, "aria-hidden": "true" },
      s("rect", { width: 20, height: 16, rx: 3, style: `fill:var(--k-${name})` }),
      kind.hatch && s("path", { d: kind.hatch, transform: "translate(6 4)", style: "stroke:#000;stroke-opacity:.35;stroke-width:1.2;fill:none" }),
      s("text", { x: 10, y: 12, "text-anchor": "middle", class: kind.white ? "on-dark" : "on-light" }, letters && kind.letter));
    return h("li", {}, patch, kind.label);
  });
}

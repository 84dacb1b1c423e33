// How a figure was computed: formulas with their numbers, and the command that gives the same.

import { h } from "studio/lib/dom";

export function explanation({ steps, command, source }) {
  return h("div", { class: "how" },
    h("ol", {}, steps.map((step) => h("li", {}, step))),
    command && h("p", {}, "The same on the command line: ", h("code", {}, command), copy(command)),
    source && h("p", { class: "muted" }, `Source: ${source}`));
}

function copy(text) {
  const button = h("button", { type: "button", class: "quiet small", onclick: async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Select it and copy";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  } }, "Copy");
  return button;
}

// Experts: how often each is chosen, and what it drops beyond its capacity.

import { axes, scale } from "studio/lib/axes";
import { h } from "studio/lib/dom";
import { colourOf, colours, hatched } from "studio/lib/theme";

export function capacityKeys() {
  const item = (style, words) => h("li", {}, h("span", { class: "swatch", style, "aria-hidden": "true" }), words);
  return [item("background:var(--k-forward)", "rows that it takes"), item("background:var(--k-gradients)", "rows that it drops")];
}

/** data: an answer with the table `capacity`. Returns what is at a place, in words. */
export function drawCapacity(context, width, height, data) {
  const theme = colours(), { columns } = data.tables.capacity, experts = columns.expert.length;
  const box = { left: 52, right: width - 8, top: 24, bottom: height - 40 }, wide = (box.right - box.left) / experts;
  const y = scale(0, Math.max(...columns["chosen by"]) * 1.05, box.bottom, box.top), x = scale(0, experts, box.left, box.right);
  const every = 2 ** Math.max(0, Math.ceil(Math.log2(32 / wide))), marks = columns.expert.filter((e) => e % every === 0);
  axes(context, theme, box, x, y, { xMarks: [], yName: "rows", xName: "expert" });
  context.textAlign = "center";
  for (const e of marks) context.fillText(String(e), x(e) + wide / 2, box.bottom + 13);
  const gap = wide > 8 ? 3 : wide > 3 ? 1 : 0;
  for (let e = 0; e < experts; e++) {
    const takes = y(columns.takes[e]), all = y(columns["chosen by"][e]);
    context.fillStyle = colourOf("forward");
    context.fillRect(x(e) + gap / 2, takes, wide - gap, box.bottom - takes);
    context.fillStyle = hatched(context, "gradients");
    context.fillRect(x(e) + gap / 2, all, wide - gap, takes - all);
  }
  return (px, py) => {
    const e = Math.floor((px - box.left) / wide);
    if (!(e in columns.expert) || py < box.top || py > box.bottom) return "";
    return `expert ${e}: chosen by ${columns["chosen by"][e]} rows\ntakes ${columns.takes[e]}, drops ${columns.drops[e]}`;
  };
}

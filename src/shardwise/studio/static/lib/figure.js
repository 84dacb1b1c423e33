// One figure of a view: its heading, its drawing, behind it a table, and on demand how it was computed.

import { h, unique } from "studio/lib/dom";
import { linked } from "studio/lib/glossary";
import { explanation } from "studio/lib/explain";
import { table } from "studio/lib/table";
import { onTheme } from "studio/lib/theme";
import { tip } from "studio/lib/tip";

/**
 * name: of its table and explanation in the answer. height: of the canvas in pixels, or a function of the width.
 * draw(context, width, height): called whenever size, theme or data change. hover(x, y): words next to the pointer; if left out,
 * the function that draw returns. Both may return {words, rank}: `ranks` (a `pointing`) is then told of the rank.
 * extras: nodes below the drawing.
 */
export function figure(page, { name, title, lead, height, draw, hover = null, extras = [], above = [], ranks = null }) {
  const canvas = h("canvas", { role: "img", "aria-label": title });
  const holder = h("div", { class: "drawing" }, canvas);
  const tableBox = h("div", { class: "behind", hidden: true }), howBox = h("div", { class: "behind", hidden: true });
  const tableButton = toggle("Table", tableBox, () => page.setLocal({ _tables: flip(page.local("_tables", ""), name) }));
  const howButton = toggle("How computed", howBox, () => page.setLocal({ _how: flip(page.local("_how", ""), name) }));
  const note = h("p", { class: "lead" }, linked(lead ?? ""));
  const heading = unique("figure");
  const node = h("section", { class: "figure", "aria-labelledby": heading, dataset: { figure: name } },
    h("div", { class: "head" }, h("h2", { id: heading }, title), h("div", { class: "buttons" }, tableButton, howButton)),
    note, ...above, holder, ...extras, tableBox, howBox);

  let answer = null, builtTable = null, builtHow = null, frame = 0, under = null;
  const self = { node, canvas, holder, show, redraw, describe, note };

  function show(data) {
    answer = data;
    builtTable = builtHow = null;
    opened();
    redraw();
  }

  function opened() {
    const wanted = (word) => page.local(word, "").split(",").includes(name);
    tableBox.hidden = !wanted("_tables");
    howBox.hidden = !wanted("_how");
    tableButton.setAttribute("aria-expanded", String(!tableBox.hidden));
    howButton.setAttribute("aria-expanded", String(!howBox.hidden));
    if (!tableBox.hidden && builtTable !== answer && answer?.tables[name]) {
      tableBox.replaceChildren(table(answer.tables[name]));
      builtTable = answer;
    }
    if (!howBox.hidden && builtHow !== answer && answer?.how[name]) {
      howBox.replaceChildren(explanation(answer.how[name]));
      builtHow = answer;
    }
  }

  function redraw() {
    cancelAnimationFrame(frame);
    frame = requestAnimationFrame(paint);
  }

  function paint() {
    if (!answer || !draw || !node.isConnected) return;
    const width = holder.clientWidth;
    if (width < 10) return;
    const tall = typeof height === "function" ? height(width) : height;
    const ratio = Math.min(3, devicePixelRatio || 1);
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(tall * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(tall * ratio);
      canvas.style.height = `${tall}px`;
    }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, tall);
    context.font = FONT;
    context.textBaseline = "middle";
    under = draw(context, width, tall);
  }

  /** What a screen reader says of the drawing. */
  function describe(words) {
    canvas.setAttribute("aria-label", words);
  }

  if (!draw) holder.hidden = true;
  else tip(page, canvas, (x, y) => {
    const there = (hover ?? under)?.(x, y) ?? "";
    ranks?.at(there.rank ?? null);
    return typeof there === "string" ? there : there.words;
  }, () => ranks?.at(null));
  ranks?.watch(redraw);
  page.cleanup(onTheme(redraw));
  page.onLocal(opened);
  const watcher = new ResizeObserver(redraw);
  watcher.observe(holder);
  page.cleanup(() => watcher.disconnect());
  return self;
}

const FONT = "12px system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";

function toggle(label, box, onclick) {
  const id = unique("behind");
  box.id = id;
  return h("button", { type: "button", class: "quiet", "aria-expanded": "false", "aria-controls": id, onclick }, label);
}

function flip(list, word) {
  const words = list.split(",").filter(Boolean);
  return (words.includes(word) ? words.filter((each) => each !== word) : [...words, word]).join(",");
}

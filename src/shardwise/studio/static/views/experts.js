// Experts: who has which experts, one layer step by step, the busiest rank, capacity, and what cutting experts would send.

import { chapterScroll } from "studio/lib/chapters";
import { choice, panel, select, slider, text } from "studio/lib/controls";
import { h } from "studio/lib/dom";
import { figure } from "studio/lib/figure";
import { bytes, share } from "studio/lib/format";
import { legend, lines } from "studio/lib/lines";
import { player } from "studio/lib/player";
import { pointing } from "studio/lib/pointed";
import { capacityKeys, drawCapacity } from "studio/views/experts_capacity";
import { drawHeld, heldHeight } from "studio/views/experts_holds";
import { drawLayer, layerHeight, layerKeys } from "studio/views/experts_layer";
import { drawLoad, loadHeight, loadKeys } from "studio/views/experts_load";

export const lead = "A layer of experts: a router sends each token to a few of many feed-forward parts, which are spread over ranks.";
/** Degrees that are not given follow the others. */
export const forgets = (changes) => (["model", "dp", "tp", "etp"].some((name) => name in changes) ? ["ep", ...("etp" in changes ? [] : ["etp"])] : []);

const CUT = { 1: "whole", 2: "cut in 2", 4: "cut in 4", 8: "cut in 8", 16: "cut in 16" };
const LOADS = { balanced: "Balanced", skewed: "Skewed" };

export function mount(root, page) {
  const model = text(page, "model", "Model", { size: 14 });
  const spread = [slider(page, "dp", "Data (dp)"), slider(page, "tp", "Tensor (tp)"), slider(page, "ep", "Expert (ep)"),
    select(page, "etp", "An expert is", { labels: CUT }), slider(page, "tokens", "Tokens of a sequence")];
  const load = choice(page, "load", "Load of the experts:", LOADS), ranks = pointing();
  const capacityControl = slider(page, "capacity", "Capacity", { words: (n) => `${n} times` });
  let data = null, step = 0;
  const play = player(page, { name: "_step", label: "Step of the layer", seconds: 2.4, onFrame: (at) => { step = at; layer.redraw(); } });
  const count = () => data?.more.ranks?.length ?? 1;
  const held = figure(page, { name: "held", title: "The experts of each rank", lead: "Each rank's place among the ranks of attention (dp, tp) and among those of experts (edp, ep, etp).", height: () => heldHeight(count()),
    draw: (context, width) => data && drawHeld(context, width, data, ranks.now()), ranks });
  const layer = figure(page, { name: "routed", title: "A layer on every rank", above: [play.node], extras: [h("ul", { class: "legend" }, layerKeys())], height: () => layerHeight(count()),
    draw: (context, width) => data && drawLayer(context, width, data, step, ranks.now()), ranks });
  const loads = figure(page, { name: "loads", title: "Rows and bytes of each rank", extras: [h("ul", { class: "legend" }, loadKeys())], height: () => loadHeight(count()),
    draw: (context, width) => data && drawLoad(context, width, data, ranks.now()), ranks });
  const capacity = figure(page, { name: "capacity", title: "What each expert takes and drops", above: [capacityControl.node], extras: [h("ul", { class: "legend" }, capacityKeys())], height: 250,
    draw: (context, width, height) => data && drawCapacity(context, width, height, data) });
  const curves = { dropped: chart(page, "dropped", "Drops against capacity", { yUnit: "share", xName: "capacity", yName: "rows that are dropped" }, () => data),
    exchanged: chart(page, "exchanged", "Bytes of a token, forward", { logX: true, xMarks: [2, 4, 8, 16, 32, 64], yUnit: "bytes", xName: "ranks", yName: "bytes that all ranks send for it" }, () => data) };
  const story = chapterScroll(page, [{ nodes: [held.node] }, { nodes: [layer.node], play, name: "_step" }, { nodes: [loads.node] },
    { nodes: [capacity.node, curves.dropped.node] }, { nodes: [curves.exchanged.node] }]);
  const dense = h("p", { class: "sentence" }), others = h("p", { class: "lead" });
  root.append(h("div", { class: "panels" }, panel("Model, ranks and tokens", model, ...spread, load).node), dense, others, story.nav, ...story.nodes);

  function show(given) {
    model.show(given);
    const none = Boolean(given.more.dense);
    for (const node of [story.nav, ...story.nodes, load.node, ...spread.map((each) => each.node)]) node.hidden = none;
    dense.hidden = others.hidden = !none;
    if (none) {
      dense.textContent = given.more.dense;
      others.replaceChildren(...given.more.offered.flatMap((name, i) => [i ? " · " : "", h("a", { href: `#experts?model=${name}` }, name)]));
      return;
    }
    data = given;
    for (const each of [...spread, load, capacityControl]) each.show(given);
    play.show(given.more.steps.map((each) => each.sentence), Number(page.local("_step", 0)));
    for (const each of [held, layer, loads, capacity]) each.show(given);
    tell(given);
    Object.values(curves).forEach((each) => each.set(given));
    story.show(given.more.chapters);
    story.settle();
  }

  /** What a screen reader says of the drawings. */
  function tell({ more, tables }) {
    const { columns } = tables.loads;
    held.describe(more.ranks.map((one, rank) => `rank ${rank}: experts ${one.experts[0]} to ${one.experts[1] - 1}`).join("; "));
    layer.describe(more.steps.map((each) => each.sentence).join(" "));
    loads.describe(columns.rank.map((rank, i) => `rank ${rank}: ${columns.rows[i]} rows, waits ${share(columns.waits[i])}, sends ${bytes(columns.sends[i])}`).join("; "));
    capacity.describe(`Bars of ${more.experts} experts. ${more.chapters[3].sentences.join(" ")}`);
  }

  return { show };
}

/** A figure of lines: a table's first column against its others. */
function chart(page, name, title, options, answer) {
  const keys = h("ul", { class: "legend" });
  const series = () => {
    const [first, ...others] = Object.keys(answer().tables[name].columns), { columns } = answer().tables[name];
    return others.map((each, n) => ({ name: each, n, dots: true, strong: true, points: Array.from(columns[first], (x, i) => [x, columns[each][i]]) }));
  };
  const made = figure(page, { name, title, extras: [keys], height: 280, draw: (context, width, height) => answer()?.tables[name] && lines(context, width, height, series(), options) });
  const set = (given) => {
    made.show(given);
    keys.replaceChildren(...legend(series()));
    made.describe(`Lines over ${options.xName}: ${series().map((each) => each.name).join(" and ")}.`);
  };
  return { ...made, set };
}

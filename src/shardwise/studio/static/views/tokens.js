// Tokens: who holds what of the weights, one layer step by step, and what every token adds up to; two strategies.

import { bars, barsHeight } from "studio/lib/bars";
import { chapterStage } from "studio/lib/chapters";
import { forgetsSizes, panel, select, sizes, slider, text } from "studio/lib/controls";
import { inside } from "studio/lib/data";
import { h } from "studio/lib/dom";
import { controlDrawer } from "studio/lib/drawer";
import { figure } from "studio/lib/figure";
import { seconds } from "studio/lib/format";
import { drawGantt, eventAt, ganttHeight, prepare, rowHeight, TOP as GANTT_TOP } from "studio/lib/gantt";
import { swatches } from "studio/lib/legend";
import { opensIn } from "studio/lib/opens";
import { player } from "studio/lib/player";
import { pointing } from "studio/lib/pointed";
import { colours, numbered } from "studio/lib/theme";
import { timeWindow } from "studio/lib/window";
import { answerFigure } from "studio/views/tokens_answer";
import { drawHolds, holdsHeight } from "studio/views/tokens_holds";
import { metricSummary, metricTable } from "studio/views/tokens_metrics";
import { productFigure } from "studio/views/tokens_product";
import { sharesFigure, trainingFigure } from "studio/views/tokens_training";
import { drawLayer, layerHeight, layerKeys } from "studio/views/tokens_layer";

export const lead = "A large model does not fit one device, so its weights lie on several. What must happen for one token then? Two ways beside each other.";
export const forgets = (changes) => [...forgetsSizes(changes), ...("output" in changes || "batch" in changes || "prompt" in changes ? ["_token", "_window", "_train"] : "cluster" in changes || "model" in changes ? ["_token", "_step", "_layer", "_window", "_train", "a", "b", ...("cluster" in changes ? ["link"] : [])] : ["_token", "_window"])];

const BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256];

export function mount(root, page) {
  const controls = [
    panel("What is generated", text(page, "model", "Model", { size: 14 }), text(page, "cluster", "Cluster", { size: 10 }), slider(page, "cluster", "Devices", { values: [], from: "devices" }), slider(page, "link", "Link in a node, GB/s", { values: [0], typed: true, help: "what a device sends, one direction" }), slider(page, "prompt", "Prompt", { values: [], words: (n) => `${n} tokens` }),
      slider(page, "output", "Answer", { values: [], words: (n) => `${n} tokens` }), slider(page, "batch", "Batch size", { values: BATCHES })),
    sizes(page),
    panel("Two strategies", text(page, "a", "A", { size: 12, help: "tp=8, dp=8,zero=3 or pp=8" }), text(page, "b", "B", { size: 12 }), select(page, "precision", "Precision")),
  ];
  const ranks = pointing();
  let data = null, step = 0, moves = false;
  const layerPlay = player(page, { name: "_step", label: "Step of the layer", seconds: 2.6, onFrame: (at) => { step = at; showLinks(); layer.redraw(); } });
  const links = h("p", { class: "lead" });
  const layer = figure(page, { name: "layer", title: "One layer on every device", extras: [h("ul", { class: "legend" }, layerKeys()), layerPlay.node, links], height: (width) => layerHeight(width, data),
    draw: (context, width) => data && drawLayer(context, width, data, moves ? step : 0, ranks.now()), ranks });
  const through = throughFigure(page), metrics = h("div", {}), opened = h("div", { class: "opens" });
  const compared = figure(page, { name: "compared", title: "The two strategies in numbers", above: [metrics, opened] });
  const spent = answerFigure(page);
  const holds = figure(page, { name: "holds", title: "Who holds what of a layer", lead: "The matrices of one layer with every rank's part; the numbers are ranks. Flat shards cut a layer like a tape; tensor slices cut every matrix along heads or columns. Small matrices are drawn larger than to scale.",
    height: (width) => holdsHeight(width, data), draw: (context, width) => data && drawHolds(context, width, data, ranks.now()), ranks });
  const product = productFigure(page, ranks);
  const partKeys = h("ul", { class: "legend" });
  const where = figure(page, { name: "where", title: "Where a token's time goes", extras: [partKeys], height: () => barsHeight(data ? data.tables.where.columns.strategy.length : 2), draw: (context, width) => data && drawWhere(context, width, data) });
  const trained = trainingFigure(page), shares = sharesFigure(page);
  const claims = h("div", { class: "claims" });
  const wrong = h("section", { class: "figure" }, h("div", { class: "head" }, h("h2", {}, "Often quoted, and wrong")), claims);
  const drawer = controlDrawer(page, controls), own = h("div", { class: "own" });
  const brief = h("div", { class: "brief" });
  const story = chapterStage(page, [
    { nodes: [layer.node, holds.node] }, { nodes: [layer.node, product.node], play: layerPlay, name: "_step" },
    { nodes: [through.node, where.node], play: through.play, name: "_layer" },
    { nodes: [spent.node], play: spent.play, name: "_token" }, { nodes: [trained.node, shares.node], play: trained.play, name: "_train" }, { nodes: [own, wrong] },
  ], brief, (chapter) => {
    moves = chapter > 1;
    layerPlay.node.hidden = links.hidden = !moves;
    layer.redraw();
  });
  drawer.settle(own, () => story.chapter === 6);
  const headline = h("p", { class: "headline" });
  root.append(h("div", { class: "opening" }, headline, drawer.button), drawer.node, story.node, compared.node);

  function show(given, part) {
    if (part !== "tokens") {
      metrics.replaceChildren(metricTable(data, given.more.metrics));
      spent.set(given, data);
      return;
    }
    data = given;
    controls.forEach((each) => each.show(given));
    layerPlay.show(given.more.sentences, Number(page.local("_step", 0)));
    layer.show(given);
    layer.describe(given.more.sides.map((side, i) => `${"AB"[i]}, ${side.layout}: ${side.words.join(" ")}`).join(" "));
    through.set(given);
    product.set(given);
    metrics.replaceChildren(metricTable(given, []));
    brief.replaceChildren(metricSummary(given));
    opened.replaceChildren(...given.more.sides.map((side, i) => opensIn(`${"AB"[i]}, ${side.layout},`, given.more.opens[i])).filter(Boolean));
    headline.textContent = given.more.headline;
    compared.note.textContent = crossover(given);
    for (const each of [compared, holds, where, shares]) each.show(given);
    holds.describe(given.more.sides.map((side, i) => `${"AB"[i]}, ${side.layout}: ${side.words[0]}`).join(" "));
    where.describe(given.tables.where.columns.strategy.join(" and "));
    trained.set(given);
    partKeys.replaceChildren(...partNames(given).map((name, n) => h("li", {}, h("span", { class: "swatch", style: `background:${numbered(n)};color:#fff`, "aria-hidden": "true" }, h("span", { class: "plate" }, String.fromCharCode(97 + n))), name)));
    story.show(given.more.chapters);
    claims.replaceChildren(...given.more.claims.map((each) => h("details", {}, h("summary", {}, `“${each.says}”`), h("p", {}, `No: ${each.why}.`))));
  }

  /** What moves at this step of the layer, as the view of collectives shows it. */
  function showLinks() {
    const now = data && !inside ? data.more.sides.map((side, i) => [`${"AB"[i]}: ${side.layout}`, side.links[Math.ceil(step)]]).filter(([, link]) => link) : [];
    links.hidden = !now.length || !moves;
    links.replaceChildren(...now.map(([name, link]) => h("a", { href: `#${link}` }, `${name}, ${link.includes("all-gather") ? "all-gather" : "all-reduce"} chunk by chunk`)).flatMap((node, i) => (i ? [" · ", node] : [node])));
  }

  return { show };
}

/** The figure of one token through all layers; `set` shows another answer's. */
function throughFigure(page) {
  let data = null, events = null, passed = 0;
  const throughPlay = player(page, { name: "_layer", label: "Layer", seconds: 0.15, onFrame: (at) => { passed = at; through.redraw(); } });
  const shown = timeWindow(page, { name: "_window", extent: () => events?.latest || 1, onChange: () => through.redraw() });
  const throughKeys = h("ul", { class: "legend" });
  const through = figure(page, { name: "through", title: "One token through all layers", lead: "Both on one scale of time. The mark stands where each one has done the layer; drag to move, + and − to zoom into single layers and their collectives.", above: [throughPlay.node, shown.node], extras: [throughKeys],
    height: () => (events ? ganttHeight(events.rows) : 60), draw: (context, width) => events && drawThrough(context, width, data, events, shown.current(), Math.round(passed)),
    hover: (x, y) => {
      const i = events ? eventAt(events, shown.current(), through.canvas.clientWidth, x, y) : -1;
      return i < 0 ? "" : `${events.name(i)}\n${seconds(data.more.through.columns.start[i])}, takes ${seconds(data.more.through.columns.seconds[i])}`;
    } });
  shown.listen(through.canvas);

  function set(given) {
    const { rows, kinds, names, columns } = given.more.through;
    data = given;
    events = prepare(columns, rows.length, kinds);
    events.name = (i) => names[columns.name[i]];
    events.left = 120;
    shown.renew();
    const lines = layersDone(given);
    throughPlay.show(lines, Number(page.local("_layer", 0)));
    throughKeys.replaceChildren(...swatches([...new Set(columns.kind)].sort().map((k) => kinds[k])).map((item, i) => {
      item.lastChild.textContent = LANES[kinds[[...new Set(columns.kind)].sort()[i]]] ?? item.lastChild.textContent;
      return item;
    }));
    through.show(given);
    through.describe(`Timeline of one token: ${lines[lines.length - 1]}`);
  }

  return { ...through, set, play: throughPlay };
}

/** From where on gathering pays. */
function crossover({ more }) {
  const ratio = more.ratios[0];
  if (!ratio) return "";
  const faster = ratio.faster_from_tokens ? `, and is faster from about ${ratio.faster_from_tokens.toLocaleString("en-US")}` : "";
  return `Gathering sends less from ${Math.ceil(ratio.fewer_bytes_from_tokens).toLocaleString("en-US")} tokens in one pass on${faster}.`;
}

const LANES = { forward: "a layer's arithmetic", update: "output head", rest: "the host", communication: "gathers, sums and messages", waited: "waits for other sequences" };

/** A sentence for each layer that is done. */
function layersDone({ tables, more }) {
  const { columns } = tables.through, n = columns.layer.length;
  const told = (i) => more.sides.map((side, k) => `${"AB"[k]} after ${seconds(columns[`${"AB"[k]} is done after`][i])}`).join(", ");
  return [`The token's vector stands before the first of ${n} layers.`, ...columns.layer.map((layer, i) => `Layer ${layer} of ${n} is done: ${told(i)}.`)];
}

function drawThrough(context, width, data, events, window, passed) {
  const { rows, sides } = data.more.through, theme = colours();
  const x = drawGantt(context, width, events, window, { labels: (row) => rows[row] });
  if (!passed) return;
  sides.forEach((side, row) => {
    const at = x(data.tables.through.columns[`${"AB"[side]} is done after`][passed - 1]), top = GANTT_TOP + row * rowHeight(events.rows);
    if (at < x(window[0]) || at > x(window[1])) return;
    context.fillStyle = theme.surface;
    context.fillRect(at - 2.5, top - 2, 5, rowHeight(events.rows) + 2);
    context.fillStyle = theme.ink;
    context.fillRect(at - 1, top - 2, 2, rowHeight(events.rows) + 2);
  });
}

function partNames(data) {
  return Object.keys(data.tables.where.columns).filter((name) => name !== "strategy");
}

function drawWhere(context, width, data) {
  const { columns } = data.tables.where, names = partNames(data);
  return bars(context, width, columns.strategy.map((name, i) => {
    const parts = names.map((part, n) => [n, columns[part][i]]);
    return { label: `${"AB"[i]}: ${name}`, parts, total: parts.reduce((all, [, v]) => all + v, 0) };
  }), { unit: "seconds", left: 170, names });
}

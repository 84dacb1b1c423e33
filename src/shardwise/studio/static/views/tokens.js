// Tokens: one prompt under two strategies, as one scroll: the race, who holds what, a product, a layer, an answer, training.

import { bars, barsHeight } from "studio/lib/bars";
import { chapterScroll } from "studio/lib/chapters";
import { forgetsSizes, panel, select, sizes, slider, text } from "studio/lib/controls";
import { inside } from "studio/lib/data";
import { h } from "studio/lib/dom";
import { controlDrawer } from "studio/lib/drawer";
import { figure } from "studio/lib/figure";
import { seconds } from "studio/lib/format";
import { drawGantt, eventAt, ganttHeight, prepare, rowHeight, TOP as GANTT_TOP } from "studio/lib/gantt";
import { swatches } from "studio/lib/legend";
import { drawLinear, linearHeight } from "studio/lib/linear";
import { opensIn } from "studio/lib/opens";
import { player } from "studio/lib/player";
import { pointing } from "studio/lib/pointed";
import { sweepFigure } from "studio/lib/sweep";
import { colours, numbered } from "studio/lib/theme";
import { timeWindow } from "studio/lib/window";
import { answerFigure } from "studio/views/tokens_answer";
import { drawHolds, holdsHeight } from "studio/views/tokens_holds";
import { metricSummary, metricTable } from "studio/views/tokens_metrics";
import { productFigure } from "studio/views/tokens_product";
import { raceFigure } from "studio/views/tokens_race";
import { flipFigure, sharesFigure, zeroFigure } from "studio/views/tokens_training";

export const lead = "";
const OF_A_TOKEN = ["_token", "_window", "_clock", "_train"];
export const forgets = (changes) => [...forgetsSizes(changes), ...("cluster" in changes || "model" in changes ? [...OF_A_TOKEN, "_layer", "a", "b", "gpus", ...("cluster" in changes ? ["link"] : [])] : "gpus" in changes ? ["_train"] : OF_A_TOKEN)];


export function mount(root, page) {
  const controls = [
    panel("What is generated", text(page, "model", "Model", { size: 14 }), text(page, "cluster", "Cluster", { size: 10 }), slider(page, "cluster", "Devices", { from: "devices" }), slider(page, "link", "Link in a node, GB/s", { typed: true, help: "what a device sends, one direction" }), slider(page, "prompt", "Prompt", { words: (n) => `${n} tokens` }),
      slider(page, "output", "Answer", { words: (n) => `${n} tokens` }), slider(page, "batch", "Batch size")),
    sizes(page),
    panel("Two strategies", text(page, "a", "A", { size: 12, help: "tp=8, dp=8,zero=3 or pp=8" }), text(page, "b", "B", { size: 12 }), select(page, "precision", "Precision")),
  ];
  const ranks = pointing(), race = raceFigure(page), answer = answerFigure(page), product = productFigure(page), through = throughFigure(page);
  const flip = flipFigure(page), shares = sharesFigure(page), zero = zeroFigure(page);
  const clock = sweepFigure(page, { name: "clock", word: "_clock", title: "One layer, on one clock", pace: 0.14, each: 2 });
  const trained = sweepFigure(page, { name: "trained", word: "_train", title: "The same layers for one token and in training", pace: 0.25, each: 6 });
  let data = null;
  const links = h("p", { class: "lead" });
  const layer = figure(page, { name: "layer", title: "The steps inside a layer, in numbers", above: [links] });
  const holds = figure(page, { name: "holds", title: "Who holds what of a layer", lead: "The matrices of one layer with every rank's part; the numbers are ranks, columns are outputs. ZeRO-3 cuts a layer like a tape, one matrix after the other; tensor parallelism cuts every matrix, by column or by row. Small matrices are drawn larger than to scale.",
    height: (width) => holdsHeight(width, data), draw: (context, width) => data && drawHolds(context, width, data, ranks.now()), ranks });
  const partKeys = h("ul", { class: "legend" });
  const where = figure(page, { name: "where", title: "Where a token's time goes", extras: [partKeys], height: () => barsHeight(data ? data.tables.where.columns.strategy.length : 2), draw: (context, width) => data && drawWhere(context, width, data) });
  const used = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Who uses which strategy" }), uses = figure(page, { name: "uses", title: "Software and its usual strategies", above: [used] });
  const metrics = h("div", {}), opened = h("div", { class: "opens" });
  const compared = figure(page, { name: "compared", title: "The two strategies in numbers", extras: [metrics, opened], height: (width) => (data ? linearHeight(width, data.more.sides) : 60),
    draw: (context, width) => data && drawLinear(context, width, data.more.sides, 0) });
  const claims = h("div", { class: "claims" });
  const wrong = h("section", { class: "figure" }, h("div", { class: "head" }, h("h2", {}, "Often quoted, and wrong")), claims);
  const brief = h("div", { class: "brief" }), drawer = controlDrawer(page, [{ node: brief }, ...controls]);
  const story = chapterScroll(page, [
    { nodes: [race.node], wide: true, play: race, name: "_race" }, { nodes: [holds.node] }, { nodes: [product.node], play: product.play, name: "_product" },
    { nodes: [clock.node, layer.node], play: clock.play, name: "_clock" }, { nodes: [through.node, where.node], play: through.play, name: "_layer" },
    { nodes: [answer.node], play: answer.play, name: "_token" }, { nodes: [flip.node, trained.node, shares.node], play: flip.play, name: "_tokens" },
    { nodes: [zero.node] }, { nodes: [uses.node] }, { nodes: [compared.node, wrong] },
  ]);
  const headline = h("p", { class: "headline" });
  root.append(h("div", { class: "opening" }, headline, drawer.button), drawer.node, story.nav, ...story.nodes);

  function show(given, part) {
    if (part !== "tokens") {
      metrics.replaceChildren(metricTable(data, given.more.metrics));
      answer.set(given, data);
      race.run("AB".slice(0, data.more.sides.length).split("").map((side) => given.tables.spent.columns[`${side} time so far`]), given.state.output);
      story.settle();
      return;
    }
    data = given;
    const { sides } = given.more, told = (f) => sides.map((side, i) => `${"AB"[i]}, ${side.layout}: ${f(side)}`).join(" ");
    controls.forEach((each) => each.show(given));
    headline.textContent = given.more.headline;
    story.show(given.more.chapters);
    for (const each of [race, through, product, flip, zero]) each.set(given);
    clock.set(given, given.more.clock);
    trained.set(given, given.more.trained);
    trained.note.textContent = told((side) => `the training step ${side.trains || "may or may not fit"}.`);
    metrics.replaceChildren(metricTable(given, []));
    brief.replaceChildren(metricSummary(given));
    opened.replaceChildren(...sides.map((side, i) => opensIn(`${"AB"[i]}, ${side.layout},`, given.more.opens[i])).filter(Boolean));
    compared.note.textContent = crossover(given);
    for (const each of [layer, compared, holds, where, shares, uses]) each.show(given);
    holds.describe(told((side) => `${side.devices[0].can}; ${side.fits}.`));
    where.describe(given.tables.where.columns.strategy.join(" and "));
    compared.describe(`Areas: ${told((side) => `${side.sends} bytes for one step.`)}`);
    links.replaceChildren(...(inside ? [] : sides.flatMap((side, i) => (side.link ? [i ? " · " : "", h("a", { href: `#${side.link}` }, `${"AB"[i]}: its ${side.gathers ? "all-gather" : "all-reduce"} chunk by chunk`)] : []))));
    used.replaceChildren(usesTable(given.more));
    partKeys.replaceChildren(...partNames(given).map((name, n) => h("li", {}, h("span", { class: "swatch", style: `background:${numbered(n)}`, "aria-hidden": "true" }), name)));
    claims.replaceChildren(...given.more.claims.map((each) => h("details", {}, h("summary", {}, `“${each.says}”`), h("p", {}, `No: ${each.why}.`))));
  }

  drawer.settle(story.nodes.at(-1).querySelector(".tale"));
  return { show };
}

/** Who uses which: a row for each software, filled where a strategy is one of its usual ones. */
function usesTable({ uses, strategies }) {
  const head = ["software", "", ...strategies, "setting"].map((name) => h("th", { scope: "col" }, name));
  return h("table", { class: "uses" }, h("thead", {}, h("tr", {}, head)), h("tbody", {}, uses.map((use) => h("tr", {}, h("th", { scope: "row" }, use.software), h("td", {}, use.does),
    strategies.map((name, i) => h("td", {}, use.strategies.includes(name) && h("span", { class: "swatch", style: `background:var(--k-${["a", "b", "rest"][i]})`, role: "img", "aria-label": "yes" }))), h("td", {}, use.how)))));
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
    throughKeys.replaceChildren(...swatches([...new Set(columns.kind)].sort().map((k) => kinds[k])));
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

// Plan: the ranked layouts, what the best one spends its time on, what another choice costs, and how far to trust it.

import { axes, line, scale } from "studio/lib/axes";
import { bars, barsHeight, clip } from "studio/lib/bars";
import { beside, forgetsSizes, panel, select, sizes, slider, text } from "studio/lib/controls";
import { h } from "studio/lib/dom";
import { figure } from "studio/lib/figure";
import { bytes, count, seconds, share } from "studio/lib/format";
import { legend, lines, style } from "studio/lib/lines";
import { opensIn } from "studio/lib/opens";
import { colours, numbered } from "studio/lib/theme";
import { fact } from "studio/views/collectives";

export const lead = "Every legal way to split a model over a cluster is compared with its memory and priced. This is the best one, and why not another.";

export const forgets = forgetsSizes;

const BY = { throughput: "the fastest step, common layouts first", fastest: "the fastest step, whatever the layout", memory: "the fewest bytes", cost: "the fewest device-seconds", pareto: "time against memory" };

export function mount(root, page) {
  const first = panel("What is asked", text(page, "model", "Model", { size: 16 }), text(page, "cluster", "Cluster"),
    slider(page, "seq", "Tokens a sequence", { words: (n) => Number(n).toLocaleString("en-US") }),
    slider(page, "batch", "Sequences a step"),
    select(page, "by", "Best is", { labels: BY }), text(page, "fix", "The layout must have", { help: "such as tp=8,zero=1", size: 14 }));
  const more = [sizes(page)];
  let data = null, scored = null;
  const facts = h("dl", { class: "facts" }), opened = h("div", { class: "opens" }), error = h("p", { class: "muted" }), binds = h("p", { class: "muted" }), refused = h("p", { class: "muted" });
  const ranked = figure(page, { name: "ranked", title: "The best layouts", above: [facts, opened], extras: [error, binds, refused], height: () => barsHeight(data ? data.tables.ranked.columns.place.length : 1),
    draw: (context, width) => data && drawRanked(context, width, data) });
  const keys = h("ul", { class: "legend" });
  const parts = figure(page, { name: "parts", title: "Where a step's time goes", extras: [keys], height: () => barsHeight(data ? data.tables.parts.columns.layout.length : 1),
    draw: (context, width) => data && drawParts(context, width, data) });
  const others = h("div", { class: "others" });
  const alternatives = figure(page, { name: "alternatives", title: "Change one thing", lead: "What each other choice costs a step, everything else chosen anew. Take one to plan with it." });
  alternatives.holder.before(others);
  const grown = h("ul", { class: "legend" });
  const growth = figure(page, { name: "growth", title: "Computing and communication as devices grow", extras: [grown], height: 290,
    draw: (context, width, height) => data && lines(context, width, height, growing(data), { logX: true, logY: true, xUnit: "", yUnit: "seconds", xName: "devices", yName: "time of a step", marks: data.more.meets ? [[data.more.meets, `equal at ${Math.round(data.more.meets).toLocaleString("en-US")} devices`]] : [] }) });
  const dots = h("ul", { class: "legend" });
  const scoreboard = figure(page, { name: "scoreboard", title: "How far to trust it", extras: [dots], height: (width) => Math.min(460, Math.max(300, width * 0.6)),
    lead: "Published runs that others measured, against what shardwise predicts for them. Nothing is left out.",
    draw: (context, width, height) => scored && drawScores(context, width, height, scored),
    hover: (x, y) => (scored ? nearest(scored, scoreboard.canvas, x, y) : "") });
  const sources = figure(page, { name: "sources", title: "By source" });
  root.append(beside(page, first, more, ranked.node, parts.node, growth.node, alternatives.node, h("div", { class: "columns" }, scoreboard.node, sources.node)));

  function show(answer, part) {
    if (part !== "plan") {
      scored = answer;
      scoreboard.show(answer);
      sources.show(answer);
      showSources(answer);
      scoreboard.describe(`Scatter plot of ${answer.tables.scoreboard.columns.run.length} published runs: predicted against measured time.`);
      return;
    }
    data = answer;
    [first, ...more].forEach((each) => each.show(answer));
    facts.replaceChildren(
      fact("Best", answer.more.best, `${answer.more.considered.toLocaleString("en-US")} legal layouts, up to ${answer.more.fitting.toLocaleString("en-US")} fit${answer.more.fastest ? `; ${answer.more.as_fast} are as fast within the error, this is the most common one, the fastest is ${answer.more.fastest}` : ""}`),
      fact("Step", seconds(answer.more.seconds), `80% range ${seconds(answer.more.range[0])} to ${seconds(answer.more.range[1])}`),
      fact("Tokens a second", count(answer.more.tokens), "all devices together"),
      fact("MFU", share(answer.more.mfu), "of the devices' peak arithmetic"),
      fact("Memory", bytes(answer.more.nbytes), `${answer.more.memory === "fits" ? "✓" : `! ${answer.more.memory}`} of ${bytes(answer.more.usable)} usable a device`));
    opened.replaceChildren(...[opensIn("the best layout", answer.more.opens)].filter(Boolean));
    error.textContent = `From the second row on: what differs from the first. Filled: as fast as the fastest within the error of ${share(answer.more.error)}.`;
    binds.textContent = answer.more.memory_binds;
    refused.textContent = answer.more.none_runs;
    ranked.show(answer);
    ranked.describe(`The best: ${answer.more.best}, ${seconds(answer.more.seconds)} a step.`);
    parts.show(answer);
    parts.describe(`Stacked bars of the parts of a step for the ${answer.tables.parts.columns.layout.length} best layouts.`);
    keys.replaceChildren(...partNames(answer).map((name, n) => h("li", {}, h("span", { class: "swatch", style: `background:${numbered(n)}`, "aria-hidden": "true" }), name)));
    growth.show(answer);
    growth.note.textContent = growthWords(answer);
    growth.describe(growthWords(answer));
    grown.replaceChildren(...legend(growing(answer)));
    alternatives.show(answer);
    others.replaceChildren(...answer.tables.alternatives.columns.instead.map((fix, i) => other(answer, fix, i)));
  }

  function other(answer, fix, i) {
    const { columns } = answer.tables.alternatives, costs = columns.costs[i];
    const key = fix.split("=")[0], kept = String(answer.state.fix).split(",").filter((word) => word && word.split("=")[0] !== key);
    return h("div", { class: "other" }, h("button", { type: "button", "aria-label": `Plan with ${fix}`, onclick: () => page.set({ fix: [...kept, fix].join(",") }) }, fix),
      h("span", { class: costs === null ? "bad" : "" }, costs === null ? "does not fit" : costs <= 0 ? "as fast" : `+${seconds(costs)} (+${share(columns["slower by"][i])})`),
      h("span", { class: "muted" }, columns.because[i]));
  }

  function showSources(answer) {
    const names = answer.tables.sources.columns.source;
    dots.replaceChildren(...names.map((name, n) => h("li", {}, h("span", { class: "key", style: `border-color:${style(n).colour}`, "aria-hidden": "true" }, style(n).letter), name)));
    if (page.local("_tables", null) === null) page.setLocal({ _tables: "sources" });
  }

  return { show };
}

function growing({ tables }) {
  const { columns } = tables.growth;
  return ["computing", "communication", "step"].map((name, n) => ({ name, n, strong: n < 2, dots: true, points: columns.devices.map((devices, i) => [devices, columns[name][i]]) }));
}

function growthWords({ tables, more }) {
  const { devices, communication, computing } = tables.growth.columns, last = devices.length - 1;
  if (last < 0) return "This layout has no time with another dp.";
  const always = communication[last] > computing[last] ? "Communication takes longer than computing on any of these." : `Up to ${devices[last].toLocaleString("en-US")} devices computing takes longer than communication.`;
  return `The same batch on more replicas of the best layout. ${more.meets ? `From about ${Math.round(more.meets).toLocaleString("en-US")} devices on, communication takes longer than computing.` : always}`;
}

function partNames(data) {
  return Object.keys(data.tables.parts.columns).filter((name) => name !== "layout");
}

function drawRanked(context, width, data) {
  const { columns } = data.tables.ranked, theme = colours();
  const start = Math.min(450, width * 0.4), end = width - 92, top = 20, row = 34, bottom = top + columns.place.length * row;
  const x = scale(Math.min(...columns["80% from"]) * 0.97, Math.max(...columns.to) * 1.02, start, end);
  axes(context, theme, { left: start, right: end, top, bottom }, x, scale(0, 1, bottom, bottom), { xUnit: "seconds", yMarks: [] });
  columns.layout.forEach((_, i) => {
    const y = top + i * row + 15;
    context.fillStyle = theme.ink;
    context.textAlign = "right";
    context.fillText(clip(context, `${columns.place[i]}. ${rowName(columns, i)}`, start - 14), start - 10, y);
    context.strokeStyle = theme.muted;
    context.lineWidth = 2;
    line(context, x(columns["80% from"][i]), y, x(columns.to[i]), y);
    for (const at of [columns["80% from"][i], columns.to[i]]) line(context, x(at), y - 5, x(at), y + 5);
    context.lineWidth = 1;
    context.fillStyle = columns["as fast"][i] ? theme.good : theme.surface;
    context.strokeStyle = columns["as fast"][i] ? theme.good : numbered(0);
    context.lineWidth = 2;
    context.beginPath();
    context.arc(x(columns.step[i]), y, i ? 5 : 7, 0, 7);
    context.fill();
    context.stroke();
    context.lineWidth = 1;
    context.fillStyle = theme.ink;
    context.textAlign = "left";
    context.fillText(seconds(columns.step[i]), end + 10, y);
  });
  return (_, py) => {
    const i = Math.floor((py - top) / row), c = columns;
    return py >= top && i < c.place.length ? `${c.place[i]}. ${c.layout[i]}\nstep ${seconds(c.step[i])}, 80% range ${seconds(c["80% from"][i])} to ${seconds(c.to[i])}; MFU ${share(c.MFU[i])}; ${bytes(c.memory[i])} a device` : "";
  };
}

/** The first layout, and how the others differ from it. */
function rowName(columns, i) {
  return i ? columns["differs by"][i] : columns.layout[0];
}

function drawParts(context, width, data) {
  const { columns } = data.tables.parts, names = partNames(data);
  const rows = columns.layout.map((_, i) => {
    const pieces = names.map((name, n) => [n, columns[name][i]]);
    return { label: `${i + 1}. ${rowName(data.tables.ranked.columns, i)}`, total: pieces.reduce((all, [, value]) => all + value, 0), parts: pieces };
  });
  return bars(context, width, rows, { unit: "seconds", left: 450, names });
}

function places(data, width, height) {
  const { columns } = data.tables.scoreboard, all = [...columns.measured, ...columns.predicted];
  const low = Math.min(...all) * 0.8, high = Math.max(...all) * 1.25;
  const box = { left: 64, right: width - 16, top: 24, bottom: height - 44 };
  return { box, x: scale(low, high, box.left, box.right, true), y: scale(low, high, box.bottom, box.top, true) };
}

function drawScores(context, width, height, data) {
  const theme = colours(), { columns } = data.tables.scoreboard, { box, x, y } = places(data, width, height);
  axes(context, theme, box, x, y, { xUnit: "seconds", yUnit: "seconds", xName: "measured", yName: "predicted" });
  context.save();
  context.beginPath();
  context.rect(box.left, box.top, box.right - box.left, box.bottom - box.top);
  context.clip();
  context.globalAlpha = 0.1;
  context.fillStyle = theme.good;
  context.beginPath();
  context.moveTo(x(x.low), y(x.low * 1.25));
  context.lineTo(x(x.high), y(x.high * 1.25));
  context.lineTo(x(x.high), y(x.high * 0.75));
  context.lineTo(x(x.low), y(x.low * 0.75));
  context.fill();
  context.globalAlpha = 1;
  context.strokeStyle = theme.muted;
  context.beginPath();
  context.moveTo(x(x.low), y(x.low));
  context.lineTo(x(x.high), y(x.high));
  context.stroke();
  const sources = data.tables.sources.columns.source;
  columns.source.forEach((source, i) => {
    const look = style(sources.indexOf(source));
    context.strokeStyle = look.colour;
    context.fillStyle = theme.surface;
    context.lineWidth = 1.6;
    context.beginPath();
    context.arc(x(columns.measured[i]), y(columns.predicted[i]), 7, 0, 7);
    context.fill();
    context.stroke();
    context.fillStyle = theme.ink;
    context.textAlign = "center";
    context.font = context.font.replace(/^\d+px/, "9px");
    context.fillText(look.letter, x(columns.measured[i]), y(columns.predicted[i]) + 0.5);
    context.font = context.font.replace(/^\d+px/, "12px");
  });
  context.restore();
  context.lineWidth = 1;
}

function nearest(data, canvas, px, py) {
  const { columns } = data.tables.scoreboard, { x, y } = places(data, canvas.clientWidth, canvas.clientHeight);
  let best = -1, least = 144;
  columns.measured.forEach((value, i) => {
    const far = (x(value) - px) ** 2 + (y(columns.predicted[i]) - py) ** 2;
    if (far < least) [best, least] = [i, far];
  });
  return best < 0 ? "" : `${columns.source[best]}: ${columns.run[best]}\nmeasured ${seconds(columns.measured[best])}, predicted ${seconds(columns.predicted[best])} (${columns.error[best] > 0 ? "+" : ""}${share(columns.error[best])})`;
}

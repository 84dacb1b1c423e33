// Collectives: an algorithm chunk by chunk with contribution sets, and what every algorithm costs.

import { line } from "studio/lib/axes";
import { panel, select, slider, text } from "studio/lib/controls";
import { h } from "studio/lib/dom";
import { figure } from "studio/lib/figure";
import { bytes, seconds } from "studio/lib/format";
import { legend, lines } from "studio/lib/lines";
import { player } from "studio/lib/player";
import { colourOf, colours, hatched, inkOn } from "studio/lib/theme";

export const lead = "How ranks exchange data together: who sends which chunk to whom, round by round, and what that costs on a cluster.";
/** What a change makes senseless. */
export const forgets = (changes) => ("bytes" in changes || "cluster" in changes ? [] : ["_round"]);

const GAP = 3, LABEL = 58, HEAD = 42, LINE = 16;

export function mount(root, page) {
  const options = ["root", "segments", "node"].map((name) => slider(page, name, WORDS[name]));
  const controls = [
    panel("Algorithm", select(page, "collective", "Collective"), select(page, "algorithm", "Algorithm"),
      slider(page, "ranks", "Ranks"), ...options),
    panel("Cost", text(page, "cluster", "Cluster", { help: "[NODESx]GPUSxDEVICE" }),
      slider(page, "bytes", "Size of the tensor", { words: bytes })),
  ];
  let data = null, position = 0;
  const steps = player(page, { name: "_round", label: "Round", onFrame: (at) => { position = at; rounds.redraw(); } });
  const note = h("p", { class: "muted" }), keys = h("ul", { class: "legend" }, roundKeys());
  const rounds = figure(page, { name: "rounds", title: "Round by round", above: [steps.node], extras: [keys, note],
    height: () => (data ? HEAD + data.state.ranks * rowHeight(data) + 10 : 100), draw: (context, width) => drawRounds(context, width, data, position) });
  const sizeKeys = h("ul", { class: "legend" }), rankKeys = h("ul", { class: "legend" });
  let cost = null;
  const sizes = figure(page, { name: "sizes", title: "Time against size", height: 330, extras: [sizeKeys],
    draw: (context, width, height) => drawSizes(context, width, height, cost) });
  const scaling = figure(page, { name: "scaling", title: "Time against the number of ranks", height: 330, extras: [rankKeys],
    draw: (context, width, height) => drawScaling(context, width, height, cost) });
  const facts = h("dl", { class: "facts" });
  const costs = figure(page, { name: "costs", title: "At this size", above: [facts] });
  root.append(h("div", { class: "panels" }, controls.map((each) => each.node)), rounds.node, costs.node,
    h("div", { class: "columns" }, sizes.node, scaling.node));
  let first = true;

  function show(answer, part) {
    if (part === "collectives") {
      data = answer;
      controls.forEach((each) => each.show(answer));
      options.forEach((each, i) => { each.node.hidden = !answer.more.algorithm.options.includes(["root", "segments", "node"][i]); });
      rounds.note.textContent = `${answer.more.algorithm.summary[0].toUpperCase()}${answer.more.algorithm.summary.slice(1)}. ${answer.more.algorithm.source}.`;
      rounds.show(answer);
      const kept = page.local("_round", null);
      steps.show(answer.more.sentences, Number(kept ?? 0));
      rounds.describe(`${answer.state.ranks} ranks by ${answer.more.chunks} chunks, and whose data each chunk holds. ${answer.more.sentences[0]}`);
      if (first && kept === null && !matchMedia("(prefers-reduced-motion: reduce)").matches) steps.start();
      first = false;
      note.textContent = answer.state.ranks > answer.more.per_node ? `The thick line parts nodes of ${answer.more.per_node} devices: what crosses it takes the slow link.` : "";
    } else {
      cost = answer;
      showCosts(answer);
    }
  }

  function showCosts(answer) {
    const { columns } = answer.tables.costs, { library_seconds: library, reading_peers_seconds: reading } = answer.more.priced;
    facts.replaceChildren(
      ...(library ? [fact("Price in all views and commands", seconds(reading ?? library), reading ? `by a kernel that reads peers' memory; ${seconds(library)} by the library` : "by the library, its latency and protocols included")] : []),
      fact("On the wire alone, cheapest", columns.algorithm[0], `of ${columns.algorithm.length} algorithms`),
      fact("Its time", seconds(columns.time[0]), `lower bound ${seconds(columns["lower bound"][0])}`),
      fact("Latency + bandwidth + adding", `${seconds(columns.latency[0])} + ${seconds(columns.bandwidth[0])} + ${seconds(columns.adding[0])}`),
      fact("The busiest rank sends", bytes(columns.sent[0]), `in ${columns.steps[0]} steps`),
      fact("Chosen here", seconds(columns.time[columns.algorithm.indexOf(answer.state.algorithm)] ?? NaN), answer.state.algorithm));
    const changes = answer.more.crossovers;
    sizes.note.textContent = `Cheapest: ${changes.map((c, i) => (i ? `${c.algorithm} from ${bytes(c.bytes)}` : c.algorithm)).join(", ")}.`;
    scaling.note.textContent = `A tensor of ${bytes(answer.state.bytes)} on more and more ranks.`;
    costs.show(answer);
    sizes.show(answer);
    scaling.show(answer);
    sizeKeys.replaceChildren(...legend(series(answer.tables.sizes, "bytes", answer)));
    rankKeys.replaceChildren(...legend(series(answer.tables.scaling, "ranks", answer)));
    sizes.describe(`Lines: time of each algorithm from 256 B to 17 GB. ${sizes.note.textContent}`);
    scaling.describe(`Lines: time of each algorithm from 2 to ${Math.max(...answer.tables.scaling.columns.ranks)} ranks.`);
  }

  return { show };
}

const WORDS = { root: "Root rank", segments: "Segments", node: "Ranks a node" };

export function fact(name, value, detail) {
  return h("div", {}, h("dt", {}, name), h("dd", {}, value, detail && h("small", {}, detail)));
}

function rowHeight(data) {
  return Math.max(24, Math.min(58, 420 / data.state.ranks));
}

function roundKeys() {
  const item = (svgStyle, words) => h("li", {}, h("span", { class: "swatch", style: svgStyle, "aria-hidden": "true" }), words);
  return [
    item("background:var(--k-forward)", "this rank's data are in the chunk (one slot a rank, from left to right)"),
    item("background:none;border:1.5px solid var(--line)", "not yet"),
    item("background:none;border:2.5px solid var(--good)", "✓ as it must be in the end"),
    item("background:var(--k-comm)", "on its way"),
  ];
}

function drawRounds(context, width, data, at) {
  if (!data) return;
  const theme = colours(), { ranks } = data.state, { chunks, regions, masks, pieces, per_node } = data.more;
  const cells = chunks * regions.length, tall = rowHeight(data);
  const between = (regions.length - 1) * 14, wide = (width - LABEL - between) / cells;
  const before = Math.floor(at), share = at - before, wanted = new Set(data.more.wanted);
  const x = (chunk) => LABEL + chunk * wide + Math.floor(chunk / chunks) * 14, y = (rank) => HEAD + rank * tall;
  heading(context, theme, data, x, wide);
  const last = masks.length - 1, now = share > 0.85 ? before + 1 : before;
  for (let rank = 0; rank < ranks; rank++) {
    context.fillStyle = theme.ink;
    context.textAlign = "right";
    context.fillText(`rank ${rank}`, LABEL - 10, y(rank) + tall / 2);
    for (let chunk = 0; chunk < cells; chunk++) {
      const i = rank * cells + chunk, done = wanted.has(i) && masks[now][i] === masks[last][i] && pieces[now][i] === pieces[last][i];
      cell(context, theme, { x: x(chunk), y: y(rank), w: wide - GAP, h: tall - GAP }, masks[now][i], pieces[now][i], ranks, done, data);
    }
    if (rank && rank % per_node === 0) {
      context.strokeStyle = theme.ink;
      context.lineWidth = 2;
      line(context, 0, y(rank) - 2, width, y(rank) - 2);
      context.lineWidth = 1;
    }
  }
  if (before < last) transfers(context, theme, data, before + 1, share, { x, y, wide, tall });
  return (px, py) => {
    const rank = Math.floor((py - HEAD) / tall), chunk = Array.from({ length: cells }, (_, c) => c).find((c) => px >= x(c) && px < x(c) + wide);
    if (rank < 0 || rank >= ranks || chunk === undefined) return "";
    const i = rank * cells + chunk, mask = masks[now][i];
    return `rank ${rank}, ${regions.length > 1 ? `${regions[Math.floor(chunk / chunks)]}, ` : ""}chunk ${chunk % chunks}\n${mask ? `data of rank${mask & (mask - 1) ? "s" : ""} ${spans(mask)}` : "nothing yet"}`;
  };
}

function heading(context, theme, data, x, wide) {
  const { chunks, regions } = data.more;
  context.fillStyle = theme.muted;
  regions.forEach((region, r) => {
    context.textAlign = "left";
    context.fillText(regions.length > 1 ? `${region}: chunks` : "chunks", x(r * chunks), 10);
    context.textAlign = "center";
    for (let c = 0; c < chunks; c++) if (wide > 15 || c % 4 === 0) context.fillText(String(c), x(r * chunks + c) + (wide - GAP) / 2, 29);
  });
}

/** One chunk of one rank: a slot for each rank whose data may be in it, and below them the set in words where there is room. */
function cell(context, theme, box, mask, piece, ranks, done, data) {
  context.fillStyle = theme.raised;
  context.fillRect(box.x, box.y, box.w, box.h);
  const moves = data.state.collective === "all-to-all", words = `${done ? "✓ " : ""}${spans(mask)}${moves ? `:${piece}` : ""}`;
  const slot = box.w / ranks, told = mask && box.h >= 2 * LINE && context.measureText(words).width < box.w - 4;
  context.fillStyle = colourOf("forward");
  for (let r = 0; r < ranks; r++) if (mask >> r & 1) context.fillRect(box.x + r * slot, box.y, slot - (slot > 3 ? 1 : 0), box.h - (told ? LINE : 0));
  context.lineWidth = done ? 2.5 : 1;
  context.strokeStyle = done ? theme.good : theme.line;
  const inset = done ? 1 : 0.5;
  context.strokeRect(box.x + inset, box.y + inset, box.w - 2 * inset, box.h - 2 * inset);
  context.lineWidth = 1;
  if (!told) return;
  context.fillStyle = theme.ink;
  context.textAlign = "center";
  context.fillText(words, box.x + box.w / 2, box.y + box.h - LINE / 2);
}

/** The chunks of a round on their way: small tiles that travel, with a letter A for those that will be added. */
function transfers(context, theme, data, round, share, { x, y, wide, tall }) {
  if (share === 0) return;
  const t = data.tables.rounds.columns, ease = share < 0.85 ? (1 - Math.cos(Math.PI * share / 0.85)) / 2 : 1;
  const size = Math.max(7, Math.min(22, wide - 8, tall - 6));
  for (let i = 0; i < t.round.length; i++) {
    if (t.round[i] !== round) continue;
    for (let k = 0; k < t.chunks[i]; k++) {
      const x1 = x(t.chunk[i] + k) + (wide - GAP) / 2, y1 = y(t.from[i]) + tall / 2;
      const x2 = x(t.into[i] + k) + (wide - GAP) / 2, y2 = y(t.to[i]) + tall / 2;
      const bend = t.link[i] === "itself" ? 0 : Math.sin(Math.PI * ease) * Math.min(wide / 3, 14) * Math.sign(y2 - y1 || 1);
      const px = x1 + (x2 - x1) * ease + bend, py = y1 + (y2 - y1) * ease;
      const slow = t.link[i] === "between nodes";
      context.strokeStyle = slow ? theme.bad : colourOf("comm");
      context.globalAlpha = 0.6;
      context.setLineDash(slow ? [4, 3] : []);
      context.beginPath();
      context.moveTo(x1, y1);
      context.quadraticCurveTo((x1 + x2) / 2 + bend * 1.4, (y1 + y2) / 2, px, py);
      context.stroke();
      context.setLineDash([]);
      context.globalAlpha = 1;
      context.fillStyle = hatched(context, "comm");
      context.strokeStyle = theme.surface;
      context.beginPath();
      context.roundRect(px - size / 2, py - size / 2, size, size, 4);
      context.fill();
      context.stroke();
      if (size < 14) continue;
      context.fillStyle = inkOn("comm");
      context.textAlign = "center";
      context.fillText(t.op[i] === "add" ? "+" : "→", px, py + 0.5);
    }
  }
}

/** 0-3,5 of a set of bits. */
function spans(mask) {
  const found = [];
  for (let rank = 0; mask >> rank; rank++) {
    if (!(mask >> rank & 1)) continue;
    const last = found[found.length - 1];
    if (last && last[1] === rank - 1) last[1] = rank;
    else found.push([rank, rank]);
  }
  return found.map(([a, b]) => (a === b ? a : `${a}-${b}`)).join(",");
}

function series(table, key, answer) {
  const cheapest = answer.tables.costs.columns.algorithm[0];
  // Both charts give an algorithm the same letter.
  const all = [...new Set([...Object.keys(answer.tables.sizes.columns), ...Object.keys(answer.tables.scaling.columns)])]
    .filter((name) => !["bytes", "ranks", "lower bound"].includes(name));
  return Object.keys(table.columns).filter((name) => name !== key).map((name) => ({
    name, n: all.indexOf(name), bound: name === "lower bound", strong: name === cheapest, dots: key === "ranks" && name !== "lower bound",
    points: table.columns[key].map((x, i) => [x, table.columns[name][i]]),
  }));
}

function drawSizes(context, width, height, answer) {
  if (!answer) return;
  return lines(context, width, height, series(answer.tables.sizes, "bytes", answer), { logX: true, logY: true, xUnit: "bytes", yUnit: "seconds",
    xName: "size of the whole tensor", yName: "time", marks: [...answer.more.crossovers.slice(1).map((c) => [c.bytes, ""]), [answer.state.bytes, bytes(answer.state.bytes)]] });
}

function drawScaling(context, width, height, answer) {
  if (!answer) return;
  return lines(context, width, height, series(answer.tables.scaling, "ranks", answer), { logY: true, yUnit: "seconds", xName: "ranks", yName: "time",
    marks: [[answer.state.ranks, `${answer.state.ranks}`]] });
}

// Runs: the load of a model's experts, over steps and, for one step, by layer and expert.

import { h } from "studio/lib/dom";
import { figure } from "studio/lib/figure";
import { plain } from "studio/lib/format";
import { legend, lines } from "studio/lib/lines";
import { player } from "studio/lib/player";
import { colourOf, colours, inkOn } from "studio/lib/theme";

const TOP = 22, LABEL = 74, RIGHT = 58;

/** Figures that are there for a run of a model with experts. show(answer); grow(answer, loads): of steps that have come since. */
export function expertFigures(page) {
  let data = null, loads = null, at = 0, drawn = null;
  const keys = h("ul", { class: "legend" });
  const imbalance = figure(page, { name: "experts", title: "Imbalance of the experts", height: 220, extras: [keys],
    draw: (context, width, height) => data && lines(context, width, height, curves(data), { xName: "step", yName: "tokens of the busiest expert over the mean" }) });
  const dropped = figure(page, { name: "dropped", title: "Dropped tokens", height: 180,
    draw: (context, width, height) => data && lines(context, width, height, [{ name: "dropped", n: 3, strong: true, points: points(data, "dropped") }], { xName: "step", yName: "choices that no expert took" }) });
  const play = player(page, { name: "_load", label: "Step of the run", seconds: 0.12, onFrame: (position) => move(Math.round(position)) });
  const heat = figure(page, { name: "loads", title: "Tokens of each expert", above: [play.node], extras: [h("p", { class: "lead" }, "The stronger the color, the more tokens. At the right: the layer's busiest expert over the mean.")],
    height: () => (loads ? TOP + loads.layers.length * rowHeight(loads) + 4 : 60), draw: (context, width) => loads && drawHeat(context, width, loads, at) });

  function show(answer) {
    [data, loads] = [answer, answer.more.loads ?? null];
    for (const each of [imbalance, heat, dropped]) each.node.hidden = !loads;
    if (loads) tell();
  }

  function grow(answer, fresh) {
    if (!loads || !fresh) return;
    data = answer;
    loads = { ...loads, steps: [...loads.steps, ...fresh.steps], counts: [...loads.counts, ...fresh.counts] };
    answer.more.loads = loads;
    tell();
  }

  function tell() {
    const { columns } = data.tables.experts, last = columns.step.length - 1, lost = columns.dropped.reduce((all, each) => all + (each ?? 0), 0);
    imbalance.note.textContent = `At step ${columns.step[last]} the busiest expert of a layer has ${plain(columns.imbalance[last])} times the mean.${columns.balance_loss[last] ? ` The balance loss is ${plain(columns.balance_loss[last])}.` : ""}${lost ? "" : " No token was dropped."}`;
    imbalance.show(data);
    imbalance.describe(`Line: imbalance over ${last + 1} steps. ${imbalance.note.textContent}`);
    keys.replaceChildren(...legend(curves(data)));
    dropped.node.hidden = !lost;
    dropped.note.textContent = `${lost.toLocaleString("en-US")} choices in all were beyond the capacity of their expert.`;
    // Its values are in the table of the figure above.
    dropped.show({ ...data, tables: { dropped: data.tables.experts }, how: { dropped: data.how.experts } });
    dropped.describe(`Line: dropped tokens over ${last + 1} steps. ${dropped.note.textContent}`);
    const kept = page.local("_load", null);
    drawn = null;
    play.show(loads.steps.map((step, i) => sentence(loads, step, i)), play.running ? at : kept === null ? loads.steps.length - 1 : Number(kept));
  }

  /** Another step: its table and its drawing. */
  function move(position) {
    at = position;
    if (!loads || drawn === at) return;
    drawn = at;
    heat.show({ tables: { loads: stepTable(loads, at) }, how: data.how });
    heat.describe(sentence(loads, loads.steps[at], at));
  }

  return { nodes: [imbalance.node, heat.node, dropped.node], show, grow };
}

const points = ({ tables }, name) => tables.experts.columns.step.map((step, i) => [step, tables.experts.columns[name][i]]);

function curves(data) {
  const { step } = data.tables.experts.columns;
  return [{ name: "imbalance", n: 0, strong: true, points: points(data, "imbalance") },
    { name: "all experts equal", bound: true, points: [[step[0], 1], [step[step.length - 1], 1]] }];
}

/** Tokens of a layer's experts at one of the steps. */
function counts(loads, at, layer) {
  const from = (at * loads.layers.length + layer) * loads.experts;
  return Array.from(loads.counts.slice(from, from + loads.experts));
}

const sum = (values) => values.reduce((all, each) => all + each, 0);
const over = (values) => (Math.max(...values) * values.length) / (sum(values) || 1);

function sentence(loads, step, at) {
  const each = loads.layers.map((_, i) => counts(loads, at, i)), most = each.map(over), worst = most.indexOf(Math.max(...most));
  const expert = each[worst].indexOf(Math.max(...each[worst]));
  return `Step ${step}: expert ${expert} of ${loads.layers[worst]} has ${most[worst].toFixed(2)} times the mean of its layer.`;
}

function stepTable(loads, at) {
  const columns = { expert: Array.from({ length: loads.experts }, (_, e) => e) };
  loads.layers.forEach((layer, i) => { columns[layer] = counts(loads, at, i); });
  return { title: `Tokens of each expert, by layer, at step ${loads.steps[at]}`, columns, units: {} };
}

const rowHeight = ({ layers }) => Math.max(12, Math.min(30, 420 / layers.length));

/** A row per layer, a cell per expert. Returns what is at a place, in words. */
function drawHeat(context, width, loads, at) {
  const theme = colours(), high = rowHeight(loads), wide = (width - LABEL - RIGHT) / loads.experts;
  const rows = loads.layers.map((_, i) => counts(loads, at, i)), most = Math.max(1, ...rows.flat());
  const every = wide > 22 ? 1 : 2 ** Math.ceil(Math.log2(28 / wide)), gap = wide > 6 ? 1 : 0;
  context.fillStyle = theme.muted;
  context.textAlign = "right";
  context.fillText("expert", LABEL - 10, 9);
  context.textAlign = "center";
  for (let e = 0; e < loads.experts; e += every) context.fillText(String(e), LABEL + (e + 0.5) * wide, 9);
  const told = high >= 15 && context.measureText(most.toLocaleString("en-US")).width + 6 <= wide - gap;
  rows.forEach((row, i) => {
    const y = TOP + i * high;
    context.textAlign = "right";
    context.fillStyle = theme.ink;
    context.fillText(loads.layers[i], LABEL - 10, y + high / 2);
    context.textAlign = "left";
    context.fillText(`${over(row).toFixed(2)} ×`, width - RIGHT + 10, y + high / 2);
    row.forEach((n, e) => cell(context, theme, n, n / most, LABEL + e * wide, y, wide - gap, high - 1, told));
  });
  return (px, py) => {
    const e = Math.floor((px - LABEL) / wide), row = rows[Math.floor((py - TOP) / high)];
    if (!row || py < TOP || row[e] === undefined) return "";
    return `${loads.layers[rows.indexOf(row)]}, expert ${e}: ${row[e].toLocaleString("en-US")} tokens\n${(row[e] * row.length / (sum(row) || 1)).toFixed(2)} times the mean of its layer`;
  };
}

/** told: its number is written in it. */
function cell(context, theme, n, share, x, y, wide, high, told) {
  context.fillStyle = theme.raised;
  context.fillRect(x, y, wide, high);
  context.globalAlpha = share;
  context.fillStyle = colourOf("forward");
  context.fillRect(x, y, wide, high);
  context.globalAlpha = 1;
  if (!told) return;
  context.fillStyle = share > 0.55 ? inkOn("forward") : theme.ink;
  context.textAlign = "center";
  context.fillText(n.toLocaleString("en-US"), x + wide / 2, y + high / 2 + 0.5);
}

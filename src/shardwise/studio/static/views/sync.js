// Workers and servers: which version each gradient read, and who waits for whom; of a run, or in virtual time.

import { bars, barsHeight } from "studio/lib/bars";
import { number, panel, select, slider } from "studio/lib/controls";
import { inside } from "studio/lib/data";
import { h } from "studio/lib/dom";
import { figure } from "studio/lib/figure";
import { plain, seconds, share, shown } from "studio/lib/format";
import { swatches } from "studio/lib/legend";
import { legend, lines } from "studio/lib/lines";
import { fact } from "studio/views/collectives";
import { lanes } from "studio/views/sync_lanes";

export const lead = "Workers compute gradients, and a server's policy decides when they become an update and who may continue. The number in a bar is the version that the gradient read.";
/** A window is for the times that it was chosen for. */
export const forgets = () => ["_window"];

const SYNCS = { ps: "Parameter servers, in lockstep", ssp: "Stale-synchronous (ssp)", async: "Asynchronous", local: "Local steps (local SGD, DiLoCo)", allreduce: "All-reduce" };
const OWN = { staleness: "ssp", backup: "ps", every: "local" };
const FOLLOWED = 3000;

export function mount(root, page) {
  const { nodes: panels, show: showControls } = controls(page);
  const sentence = h("p", { class: "sentence", "aria-live": "polite" }), facts = h("dl", { class: "facts" });
  let data = null, timer = 0;
  const main = lanes(page, { above: [sentence, facts] });
  const made = {
    gradients: main,
    workers: barFigure(page, "workers", "Computing and waiting", "seconds", () => data?.more.bars?.map((row) => ({ ...row, words: share(row.total ? row.parts[1][1] / row.total : 0) })), "Beside each bar: the share of waiting."),
    waits: barFigure(page, "waits", "Who waits for whom", "seconds", () => waitRows(data)),
    staleness: barFigure(page, "staleness", "Staleness", "count", () => staleRows(data), "Updates between the weights that a gradient read and its own update."),
    compared: barFigure(page, "compared", "Ways to agree", "seconds", () => comparedRows(data), "As many workers with the same slow steps, until as many steps of text are done: the time, and the share of it in which workers wait."),
    rounds: curves(page, "rounds", "Loss after each outer step", { xName: "step", yName: "loss", tight: true }, () => roundLines(data)),
    incast: curves(page, "incast", "Incast: one server's port against a ring", { xName: "workers", yName: "time of a step", xUnit: "count", yUnit: "seconds" }, () => incastLines(data),
      "Measured, whatever is chosen above: the port of a server carries the gradients of all workers, so a step takes longer with each of them."),
    traffic: figure(page, { name: "traffic", title: "Messages of the run", lead: "The ledger of a step, once for each gradient of the run's record." }),
  };
  const pair = h("div", { class: "columns" }, made.workers.node, made.staleness.node);
  const empty = h("p", { class: "sentence" });
  root.append(h("div", { class: "panels" }, panels), empty, main.node, pair, made.waits.node, made.compared.node, made.rounds.node, made.incast.node, made.traffic.node);
  page.cleanup(() => clearTimeout(timer));

  function show(answer) {
    data = answer;
    showControls(answer);
    const { summary, names } = answer.more;
    empty.hidden = Boolean(summary);
    empty.textContent = summary ? "" : answer.more.sentence;
    sentence.textContent = answer.more.sentence;
    for (const [name, each] of Object.entries(made)) {
      each.node.hidden = !answer.tables[name];
      if (answer.tables[name]) each.show(answer);
    }
    if (summary) facts.replaceChildren(...countFacts(summary, names));
    clearTimeout(timer);
    if (!inside && answer.more.status === "running") timer = setTimeout(page.fetch, FOLLOWED);
  }

  return { show };
}

/** The panels; a run shows the first one only. */
function controls(page) {
  const server = slider(page, "server", "Server");
  const own = {
    staleness: slider(page, "staleness", "Staleness bound", { help: "steps that a worker may be ahead of the last update" }),
    backup: slider(page, "backup", "Backup workers", { help: "last gradients of a step that are not waited for" }),
    every: slider(page, "every", "Steps of a round"),
  };
  const chosen = panel("Shown", select(page, "run", "Run", { labels: { none: "a simulation" } }), server);
  const simulated = [
    panel("Workers", select(page, "sync", "They agree by", { labels: SYNCS }), slider(page, "workers", "Workers"), ...Object.values(own), slider(page, "steps", "Steps")),
    panel("Slow ones", select(page, "slow", "Slow worker", { labels: { none: "none", all: "every one" } }), slider(page, "factor", "Times slower", { words: (value) => `${plain(Number(value))} ×` }),
      slider(page, "probability", "Slow steps", { words: (value) => share(Number(value)) }), number(page, "seed", "Seed", { most: 2 ** 31 }),
      slider(page, "gradient", "A gradient takes", { words: (value) => `${plain(Number(value))} ms` })),
  ];
  const all = [chosen, ...simulated];

  function show(data) {
    all.forEach((each) => each.show(data));
    for (const each of simulated) each.node.hidden = data.state.run !== "none";
    for (const [name, sync] of Object.entries(OWN)) own[name].node.hidden = data.state.sync !== sync;
    server.node.hidden = data.more.servers < 2;
  }

  return { nodes: all.map((each) => each.node), show };
}

function countFacts(summary, [worker]) {
  const waiting = summary.waiting_share === undefined ? [] : [fact("Waiting", share(summary.waiting_share), `of all ${worker}s' time`)];
  const takes = `in ${seconds(summary.seconds)}`;
  if (worker === "replica") return [fact("Outer steps", plain(summary.updates), takes), ...waiting];
  return [fact("Updates", plain(summary.updates), takes),
    fact("Gradients", plain(summary.gradients), summary.dropped ? `${plain(summary.dropped)} dropped` : "none dropped"),
    fact("Staleness", plain(Number(summary.mean_staleness.toFixed(2))), `on average, ${summary.max_staleness} at most`), ...waiting];
}

/** A figure of bars; `rows()` of the answer that is shown. */
function barFigure(page, name, title, unit, rows, lead = "") {
  const keys = h("ul", { class: "legend" });
  const made = figure(page, { name, title, lead, extras: [keys], height: () => barsHeight(rows()?.length || 1),
    draw: (context, width) => rows()?.length && bars(context, width, rows(), { unit, left: 160 }) });
  const show = (data) => {
    made.show(data);
    keys.replaceChildren(...swatches([...new Set(rows().flatMap((row) => row.parts.map(([kind]) => kind)))]));
    made.describe(rows().map((row) => `${row.label} ${row.detail}: ${unit === "seconds" ? seconds(row.total) : plain(row.total)}${row.words ? `, ${row.words}` : ""}`).join("; "));
  };
  return { ...made, show };
}

function staleRows(data) {
  if (!data?.tables.staleness) return [];
  const { "updates behind": behind, gradients } = data.tables.staleness.columns;
  return Array.from(behind, (versions, i) => ({ label: `${versions} behind`, detail: "", total: gradients[i], parts: [[versions ? "stale" : "fresh", gradients[i]]] }));
}

function waitRows(data) {
  if (!data?.tables.waits) return [];
  const { columns } = data.tables.waits, worker = data.more.names[0];
  return columns.time.slice(0, data.more.drawn_waits).map((time, i) => ({ label: `${worker} ${columns[worker][i]}`, detail: `for ${worker} ${columns["waited for"][i]}`, total: time, parts: [["idle", time]] }));
}

function comparedRows(data) {
  if (!data?.tables.compared) return [];
  const { columns } = data.tables.compared;
  return columns.layout.map((layout, i) => {
    const time = columns.takes[i], waiting = columns.waiting[i] * time, lost = columns["gradients dropped"][i], behind = columns["updates behind, mean"][i];
    const detail = [behind ? `${plain(Number(behind.toFixed(2)))} behind` : "", lost ? `${plain(lost)} dropped` : ""].filter(Boolean).join(", ");
    return { label: layout.replace(/^dp=\d+,?/, "") || "all-reduce", detail, total: time, parts: [["computing", time - waiting], ["idle", waiting]] };
  });
}

/** Lines over whole numbers; `series()` of the answer that is shown. */
function curves(page, name, title, axes, series, lead = "") {
  const keys = h("ul", { class: "legend" });
  const made = figure(page, { name, title, lead, height: 260, extras: [keys], draw: (context, width, height) => lines(context, width, height, series(), axes) });
  const show = (data) => {
    made.show(data);
    keys.replaceChildren(...(series().length > 1 ? legend(series()) : []));
    made.describe(series().map((line) => `${line.name} over ${axes.xName}s 1 to ${line.points.at(-1)[0]}: ${shown(line.points.at(-1)[1], axes.yUnit)} at the end`).join("; "));
  };
  return { ...made, show };
}

/** The loss over outer steps. */
function roundLines(data) {
  const columns = data?.tables.rounds?.columns;
  return columns ? [{ name: "loss of all replicas", n: 0, strong: true, dots: true, points: columns["last step"].map((step, i) => [step, columns["loss of all replicas"][i]]) }] : [];
}

/** A measured and a predicted line of each. */
function incastLines(data) {
  const columns = data?.tables.incast?.columns;
  if (!columns) return [];
  return ["server", "ring"].flatMap((over, n) => ["measured step", "predicted"].map((what, i) => ({ name: `${over}, ${what.split(" ")[0]}`, n: 2 * n + i, strong: !i, dots: !i,
    points: columns.workers.map((workers, row) => [workers, columns[what][row]]).filter((_, row) => columns.over[row] === over) })));
}

// Runs: a run beside its prediction, followed while it trains; and any report or trace that is dropped here.

import { panel, select } from "studio/lib/controls";
import { inside, load, send } from "studio/lib/data";
import { h } from "studio/lib/dom";
import { figure } from "studio/lib/figure";
import { bytes, count, plain, seconds, share } from "studio/lib/format";
import { bars, barsHeight } from "studio/lib/bars";
import { swatches } from "studio/lib/legend";
import { legend, lines } from "studio/lib/lines";
import { opensIn } from "studio/lib/opens";
import { fact } from "studio/views/collectives";
import { expertFigures } from "studio/views/runs_experts";
import { barFigure, stepFigures } from "studio/views/runs_step";
import { TIMELINE, timelineFigure } from "studio/views/runs_timeline";

export const lead = "A training run on disk beside what was predicted for it. A run that is still going is followed live.";
const EVERY = 1000, EVERY_ENDED = 3000;
/** Another run has recorded other steps. */
export const forgets = (changes) => ("run" in changes ? ["step", "_window"] : []);

export function mount(root, page) {
  const controls = [panel("Run", select(page, "run", "Run"), select(page, "step", "Recorded step"), select(page, "against", "Compare with"))];
  const verdict = h("p", { class: "verdict", "aria-live": "polite", hidden: true });
  const status = h("p", { class: "sentence", "aria-live": "polite" }), facts = h("dl", { class: "facts" }), links = h("div", {});
  let data = null, timer = 0, waiting = false, closed = false, opened = false, lost = false;
  const name = h("span", { class: "strong" });
  const bar = h("p", { class: "opened", hidden: true }, h("button", { type: "button", onclick: back }, "Back to the runs"), name);
  const keys = h("ul", { class: "legend" });
  const steps = figure(page, { name: "steps", title: "Loss", above: [status, facts, links], extras: [keys], height: 290,
    draw: (context, width, height) => data && lines(context, width, height, curves(data), { xName: "step", yName: lossless(data) ? "seconds" : "loss", tight: true }) });
  const validation = figure(page, { name: "validation", title: "Validation" });
  const experts = expertFigures(page), timeline = timelineFigure(page), classKeys = h("ul", { class: "legend" });
  const memory = figure(page, { name: "memory", title: "Memory", extras: [classKeys], height: () => barsHeight(memoryRows(data).length || 1), draw: (context, width) => data?.tables.memory && bars(context, width, memoryRows(data), { unit: "bytes", left: 190 }) });
  const ledger = figure(page, { name: "ledger", title: "Ledger" });
  const timed = { transport: barFigure(page, "transport", "Communication time", () => data), traffic: figure(page, { name: "traffic", title: "Collectives by operation" }) };
  const { ranks, waterfall, arrivals, over, peak } = stepFigures(page, () => data);
  const cells = figure(page, { name: "cells", title: "Certificate" }), findings = figure(page, { name: "findings", title: "What is wrong" });
  const ofStep = { cells, findings, ranks, timeline, waterfall, arrivals, ...timed, memory, over, peak, ledger };
  root.append(h("div", { class: "panels" }, controls.map((each) => each.node)), bar, verdict, steps.node, ...experts.nodes, ...Object.values(ofStep).map((each) => each.node), validation.node);
  if (!inside) root.append(dropArea(open));
  page.openFile = open;
  page.cleanup(() => { closed = true; clearTimeout(timer); });

  function show(answer) {
    data = answer;
    opened = false;
    bar.hidden = true;
    controls.forEach((each) => each.show(answer));
    tell();
    for (const [name, each] of Object.entries({ steps, validation, ...ofStep })) {
      each.node.hidden = !answer.tables[name] || (name === "validation" && !answer.tables.validation.columns.step.length);
      if (answer.tables[name]) each.show(answer);
    }
    steps.node.hidden = false;
    steps.node.querySelector("h2").textContent = lossless(answer) ? "Seconds per step" : "Loss";
    experts.show(answer);
    timeline.set(answer.more.timeline, TIMELINE, answer.more.timeline_of ?? "");
    showReports(answer);
    keys.replaceChildren(...legend(curves(answer)));
    again();
    const file = page.dropped();
    if (file) open(file);
  }

  /** Reports are written after a run has ended, and another run may begin: the folder is watched as long as it is shown. */
  function again() {
    clearTimeout(timer);
    if (!inside && !closed && !opened) timer = setTimeout(follow, data.more.status === "running" ? EVERY : EVERY_ENDED);
  }

  function back() {
    page.refuse("");
    page.fetch();
  }

  function tell() {
    status.textContent = sentence(data);
    const judged = data.more.verdict;
    verdict.hidden = !judged;
    verdict.textContent = judged ? `Step ${judged.step}: ${judged.line}` : "";
    facts.replaceChildren(...(data.state.run ? runFacts(data) : []));
    links.replaceChildren(opensIn("this run", data.more.opens ?? []) ?? "");
    if (data.state.run) steps.describe(`Line: ${lossless(data) ? "seconds" : "loss"} over ${data.tables.steps.columns.step.length} steps.`);
  }

  function showReports({ tables, more }) {
    if (!tables.ledger) return;
    ledger.note.textContent = more.has?.length === 2 ? (more.equal_ledger ? "✓ Every collective that was predicted was observed, and no other." : "✗ What was observed differs from what was predicted.") : "The collectives of one step.";
    memory.note.textContent = more.has?.length === 2 ? `The predicted peak is off by ${share(more.peak_error)}.` : "";
    classKeys.replaceChildren(...swatches(more.classes));
    memory.describe(memoryRows({ tables, more }).map((row) => `${row.label}: ${bytes(row.total)}`).join("; "));
  }

  /** What is new since the cursor; when reports have come or the run has ended, everything once more. */
  async function follow() {
    if (waiting || closed || opened) return;
    waiting = true;
    try {
      const of = data, fresh = await load("runs/events", data.state.run ? { run: data.state.run, after: data.more.cursor } : {});
      if (closed || opened || data !== of) return;
      if (lost) page.refuse("");
      lost = false;
      const begun = fresh.runs.some((run) => !data.choices.run.includes(run));
      if (begun) controls.forEach((each) => each.show({ ...data, choices: { ...data.choices, run: fresh.runs } }));
      data.choices.run = fresh.runs;
      // Without a run in the address, the page shows the latest one, but does not leave a running one for it.
      if (begun && !page.local("run", "") && data.more.status !== "running") return void page.fetch();
      if (!data.state.run) return;
      for (const table of ["steps", "validation", "experts"]) for (const [name, values] of Object.entries(fresh[table])) data.tables[table].columns[name] = [...data.tables[table].columns[name], ...values];
      const routes = fresh.loads && !data.more.loads;
      const changed = routes || fresh.reports.join() !== data.more.reports.join() || fresh.status !== data.more.status;
      Object.assign(data.more, { cursor: fresh.cursor, status: fresh.status, reports: fresh.reports, writing: fresh.writing });
      if (changed) return void page.fetch();
      if (fresh.steps.step.length) {
        tell();
        data = { ...data };
        steps.show(data);
        experts.grow(data, fresh.loads);
      }
    } catch (error) {
      lost = true;
      if (!closed) page.refuse(error.message);
    } finally {
      waiting = false;
      again();
    }
  }

  async function open(file) {
    delete document.body.dataset.ready;
    try {
      const answer = await send(file);
      if (closed) return;
      opened = true;
      clearTimeout(timer);
      page.refuse("");
      bar.hidden = verdict.hidden = false;
      if (answer.more.kind === "certificate") page.setLocal({ _tables: "cells,findings" });
      verdict.textContent = answer.more.verdict?.line ?? "";
      name.textContent = file.name;
      data = { ...answer, tables: { ...answer.tables }, state: {}, more: { ...answer.more, status: "" } };
      steps.node.hidden = validation.node.hidden = true;
      experts.show(data);
      for (const [name, each] of Object.entries(ofStep)) {
        each.node.hidden = !answer.tables[name];
        if (answer.tables[name]) each.show(answer);
      }
      timeline.set(answer.more.timeline.rows.length ? answer.more.timeline : null, `${file.name}: ${answer.more.title}`, "");
      showReports(answer);
      timeline.node.scrollIntoView({ block: "nearest" });
    } catch (error) {
      page.refuse(`${file.name}: ${error.message}`);
    }
    requestAnimationFrame(() => requestAnimationFrame(() => { document.body.dataset.ready = location.hash || "#"; }));
  }

  return { show };
}

/** How far a run is, or where there would be one. */
function sentence({ more, state, tables }) {
  if (!state.run && inside) return "Runs are on your machine: shardwise studio --runs DIR shows those of a folder.";
  if (!state.run) return `There is no run in ${more.folder} yet: shardwise demo makes one, or drop a report below.`;
  if (more.status === "running") return `Training: step ${tables.steps.columns.step.at(-1) ?? 0} of ${more.steps_wanted}.`;
  const writing = more.writing?.writing_share;
  return `This run is ${more.status || "of unknown state"}.${writing ? ` What it wrote for this page took ${share(writing)} of a step's CPU time.` : ""}`;
}

function runFacts({ more, tables }) {
  const { columns } = tables.steps, last = columns.step.length - 1;
  const { seq, batch } = more.workload, validated = tables.validation.columns, end = validated.step.length - 1;
  const loss = validated.validation_loss[end], entropy = validated.unigram_entropy[end];
  const compared = more.has?.length === 2 ? agreement(more) : [];
  return [fact("Model", more.model, more.layout || "one device"),
    fact("Step", `${columns.step[last] ?? 0}`, `of ${more.steps_wanted}, ${more.ranks} rank${more.ranks === 1 ? "" : "s"}`),
    ...(lossless({ tables }) ? [fact("Speed", seconds(median(columns.seconds)), "per step, the median")] :
      [fact("Loss", last < 0 ? "–" : plain(columns.loss[last]), "of the last step"),
        fact("Speed", last < 0 ? "–" : `${count(median(columns.tokens_per_s))} tokens/s`, "median of its steps")]),
    ...(seq ? [fact("Workload", `${count(batch)} sequences`, `of ${count(seq)} tokens a step`)] : []),
    ...(Number.isFinite(loss) ? [fact("Validation loss", plain(loss), `${loss < entropy ? "✓ below" : "✗ not below"} the unigram entropy, ${plain(entropy)}`)] : []), ...compared];
}

/** Whether prediction and measurement agree. */
function agreement(more) {
  const sign = (good) => (good ? "✓" : "✗");
  return [fact("Ledger", `${sign(more.equal_ledger)} ${more.equal_rows} of ${more.rows}`, "rows predicted as measured"),
    fact("Bytes by class", `${sign(more.equal_classes)} ${more.equal_classes ? "equal" : "not equal"}`, "parameters, gradients, optimizer, saved, communication"),
    fact("Peak", `${sign(more.peak_error <= more.peak_tolerance)} ${share(more.peak_error)}`, `largest error; ${share(more.peak_tolerance)} is allowed`),
    ...(more.differences.length ? [fact("Settings that differ", String(more.differences.length), more.differences.join("; "))] : [])];
}

/** Where a file is dropped, or chosen, which `open` then gets. */
function dropArea(open) {
  const input = h("input", { type: "file", accept: ".json,application/json", id: "opened", class: "unseen", onchange: () => input.files[0] && open(input.files[0]) });
  return h("div", { class: "drop" }, h("button", { type: "button", onclick: () => input.click() }, "Open a file"), input,
    h("label", { for: "opened" }, "or drop a step report (reports/*.json), a certificate or a Chrome trace anywhere on the page: it stays on this machine."));
}

/** Of an audit, which knows when steps ended and no loss. */
function lossless({ tables }) {
  const { columns } = tables.steps;
  return columns.step.length > 0 && [columns.loss, columns.tokens_per_s].every((values) => values.every((value) => value === null));
}

function curves(data) {
  if (lossless(data)) return [{ name: "seconds per step", n: 0, strong: true, points: points(data.tables.steps.columns.step, data.tables.steps.columns.seconds) }];
  const { steps, validation } = data.tables, found = [{ name: "training loss", n: 0, strong: true, points: points(steps.columns.step, steps.columns.loss) }];
  if (validation?.columns.step.length) {
    found.push({ name: "validation loss", n: 1, strong: true, points: points(validation.columns.step, validation.columns.validation_loss) });
    found.push({ name: "entropy of single tokens", n: 2, points: points(validation.columns.step, validation.columns.unigram_entropy) });
  }
  return found;
}

function points(xs, ys) {
  return xs.map((x, i) => [x, ys[i]]).filter((p) => Number.isFinite(p[1]));
}

function memoryRows(data) {
  if (!data?.tables.memory) return [];
  const { columns } = data.tables.memory, sides = Object.keys(columns).filter((name) => !["ranks", "class", "difference", "as it should be"].includes(name));
  return [...new Set(columns.ranks)].flatMap((ranks) => sides.map((side) => {
    const of = (name) => columns[side][columns.class.findIndex((each, i) => each === name && columns.ranks[i] === ranks)] ?? 0;
    return { label: ranks, detail: side, total: of("peak"), parts: data.more.classes.map((name) => [name, of(name)]) };
  }));
}

function median(values) {
  const sorted = values.filter((v) => v !== null).sort((a, b) => a - b);
  return sorted[Math.floor(sorted.length / 2)] ?? 0;
}

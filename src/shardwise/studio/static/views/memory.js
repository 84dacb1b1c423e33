// Memory: what lies on each device and whether it fits; what else would fit; a step's moments.

import { axes, halo, line, scale } from "studio/lib/axes";
import { bars, barsHeight } from "studio/lib/bars";
import { beside, check, forgetsSizes, number, panel, select, sizes, slider, text } from "studio/lib/controls";
import { h } from "studio/lib/dom";
import { figure } from "studio/lib/figure";
import { bytes, count, mark, share } from "studio/lib/format";
import { swatches } from "studio/lib/legend";
import { opensIn } from "studio/lib/opens";
import { colours, hatched, kinds } from "studio/lib/theme";
import { fact } from "studio/views/collectives";
import { balanceWords, drawSequence, sequenceHeight } from "studio/views/memory_sequence";

export const lead = "What a training step keeps on every device, by class, against what the device has.";

/** Unless it is set itself, dp fills the devices again. */
export const forgets = (changes) => [...forgetsSizes(changes), ...(["tp", "pp", "cp", "cluster"].some((name) => name in changes) ? ["dp", "place"] : [])];

const ZERO = { 0: "0: everything whole", 1: "1: optimizer state split", 2: "2: gradients, too", 3: "3: weights, too" };
const MOMENT_KINDS = { "parameters": "parameters", "optimizer state": "optimizer", "gradients": "gradients", "communication buffers": "comm", "activations and the rest": "saved" };

export function mount(root, page) {
  const first = panel("Model, devices and split", text(page, "model", "Model", { size: 16 }), text(page, "cluster", "Cluster"),
    slider(page, "batch", "Sequences a step"),
    slider(page, "tp", "Tensor (tp)"), slider(page, "pp", "Pipeline (pp)"), select(page, "zero", "ZeRO stage", { labels: ZERO }));
  const more = [
    panel("How it is split", slider(page, "seq", "Tokens a sequence", { words: (n) => Number(n).toLocaleString("en-US") }),
      slider(page, "dp", "Data (dp)"), slider(page, "cp", "Context (cp)"), check(page, "sp", "Sequence parallel (sp)")),
    sizes(page),
    panel("What is kept", number(page, "micro", "Sequences a micro-batch", { least: 1, most: 1024 }), select(page, "recompute", "Recompute"),
      select(page, "offload", "Offload optimizer"), select(page, "offload_params", "Offload parameters"), select(page, "offload_activations", "Offload activations"), select(page, "precision", "Precision"), select(page, "grads", "Gradients"), select(page, "attention", "Attention"),
      select(page, "schedule", "Pipeline schedule"), number(page, "virtual", "Chunks a rank", { least: 1, most: 16 }), number(page, "place", "Stage shown below", { least: 0, most: 63 })),
  ];
  let data = null;
  const rows = () => (data ? data.tables.devices.columns.devices.length : 1);
  const facts = h("dl", { class: "facts" }), opened = h("div", { class: "opens" }), keys = h("ul", { class: "legend" }), notes = h("ul", { class: "notes" });
  const devices = figure(page, { name: "devices", title: "On each device", above: [facts, opened], extras: [keys, notes], height: () => barsHeight(rows()),
    draw: (context, width) => data && drawDevices(context, width, data) });
  const homes = figure(page, { name: "homes", title: "Off the devices", height: () => barsHeight(data?.tables.homes?.columns.home.length ?? 1),
    draw: (context, width) => data?.tables.homes && drawHomes(context, width, data) });
  const fits = figure(page, { name: "fits", title: "What would fit", height: 190, lead: "The fullest device, with other ZeRO stages and ways to recompute. Choose one to take it.", above: [],
    draw: null });
  const grid = h("div", { class: "grid" });
  fits.holder.before(grid);
  const momentKeys = h("ul", { class: "legend" }, swatches(Object.values(MOMENT_KINDS)));
  const moments = figure(page, { name: "moments", title: "Through a step", height: 310, extras: [momentKeys],
    draw: (context, width, height) => data && drawMoments(context, width, height, data) });
  const sequence = figure(page, { name: "sequence", title: "A sequence over context-parallel ranks", height: () => sequenceHeight(Number(data?.state.cp ?? 1)),
    draw: (context, width) => data?.tables.sequence && drawSequence(context, width, data) });
  root.append(beside(page, first, more, devices.node, homes.node, sequence.node, fits.node, moments.node));

  function show(answer) {
    data = answer;
    [first, ...more].forEach((each) => each.show(answer));
    const { columns } = answer.tables.devices, peak = Math.max(...columns.peak);
    facts.replaceChildren(
      fact("The fullest device", bytes(peak), roomWords(answer.more, peak)),
      fact("Layout", answer.more.layout, `${answer.more.ranks} devices, ${answer.more.micro_batches} micro-batch${answer.more.micro_batches === 1 ? "" : "es"} each`),
      fact("Parameters", count(answer.more.parameters), "16 or 18 bytes each with gradients and optimizer, before anything is split"));
    opened.replaceChildren(...[opensIn("this layout", answer.more.opens)].filter(Boolean));
    keys.replaceChildren(...swatches(answer.more.classes));
    notes.replaceChildren(...answer.more.notes.map((line) => h("li", {}, line)));
    devices.show(answer);
    devices.describe(columns.devices.map((name, i) => `${name}: ${bytes(columns.peak[i])}`).join("; "));
    homes.node.hidden = !answer.tables.homes;
    if (answer.tables.homes) {
      const { columns: kept } = answer.tables.homes;
      homes.show(answer);
      homes.describe(kept.home.map((home, i) => `${kept.devices[i]}, ${home}: ${bytes(kept.together[i])}`).join("; "));
    }
    sequence.node.hidden = !answer.tables.sequence;
    if (answer.tables.sequence) {
      sequence.note.textContent = balanceWords(answer);
      sequence.show(answer);
      sequence.describe(balanceWords(answer));
    }
    showGrid(answer);
    fits.show(answer);
    moments.note.textContent = answer.state.place || answer.more.places > 1 ? `Rank ${answer.state.place} of the ${answer.more.places} of a pipeline, over time: what its computations hold while they run, and what stays while it waits.` : "One micro-batch's forward and backward, then the next one's, and the optimizer.";
    moments.show(answer);
    moments.describe(`Bytes held at ${answer.tables.moments.columns.moment.length} moments of a step; the most is ${bytes(Math.max(...answer.tables.moments.columns.together))}.`);
  }

  /** Whether the highest peak fits one device, with the margin that a real one may need. */
  function roomWords({ capacity, room }, peak) {
    if (!capacity) return "capacity not known";
    if (peak > capacity) return `✗ ${bytes(peak - capacity)} too much for ${bytes(capacity)}`;
    return room?.state === "at risk" ? `! at risk in ${bytes(capacity)}: less than ${share(room.margin)} left for ${room.why}` : `✓ fits in ${bytes(capacity)}`;
  }

  function showGrid(answer) {
    const { columns } = answer.tables.fits, focused = document.activeElement?.dataset?.fit;
    grid.replaceChildren(h("span", {}), ...[0, 1, 2, 3].map((zero) => h("span", { class: "muted" }, `ZeRO ${zero}`)),
      ...["none", "selective", "full"].flatMap((recompute) => [h("span", { class: "muted" }, `recompute ${recompute}`),
        ...columns.zero.map((zero, i) => [zero, i]).filter(([, i]) => columns.recompute[i] === recompute).map(([zero, i]) => {
          const ok = columns.fits[i], now = Number(answer.state.zero) === zero && answer.state.recompute === recompute;
          return h("button", { type: "button", class: now ? "cell now" : "cell", title: columns["why not"][i] || null, disabled: columns.peak[i] === null,
            "aria-pressed": String(now), dataset: { fit: `${zero} ${recompute}` }, onclick: () => page.set({ zero, recompute }) },
          columns.peak[i] === null ? "not legal" : [h("span", { class: ok ? "good" : "bad" }, ok ? "✓ " : "✗ "), bytes(columns.peak[i])]);
        })]));
    if (focused) grid.querySelector(`[data-fit="${focused}"]`)?.focus();
  }

  return { show };
}

function drawDevices(context, width, data) {
  const { columns } = data.tables.devices;
  const rows = columns.devices.map((name, i) => ({
    label: name, detail: columns.role[i] === name || columns.role[i] === "all" ? "" : columns.role[i], total: columns.peak[i], bad: columns.fits[i] === false, good: columns.fits[i] === true,
    parts: data.more.classes.map((each) => [each, columns[kinds[each].label][i]]),
  }));
  return bars(context, width, rows, { unit: "bytes", limit: data.more.capacity, limitName: "device", left: 130 });
}

function drawHomes(context, width, data) {
  const { columns } = data.tables.homes;
  const rows = columns.home.map((home, i) => ({
    label: columns.devices[i], detail: home, total: columns.together[i], parts: data.more.classes.map((each) => [each, columns[kinds[each].label][i]]),
  }));
  return bars(context, width, rows, { unit: "bytes", left: 130 });
}

/** From when to when each moment lasts: in a pipeline by the simulation, else one after the other. */
function spansOf(columns) {
  const n = columns.moment.length;
  if (!columns.from) return { from: columns.moment.map((_, i) => i), to: columns.moment.map((_, i) => i + 1), end: n, timed: false };
  return { from: columns.from, to: columns.to, end: Math.max(...columns.to), timed: true };
}

function drawMoments(context, width, height, data) {
  const theme = colours(), { columns } = data.tables.moments, n = columns.moment.length, { capacity } = data.more;
  const box = { left: 64, right: width - 16, top: 44, bottom: height - 40 }, spans = spansOf(columns);
  const most = Math.max(...columns.together), high = capacity && capacity < 3 * most ? Math.max(most, capacity) * 1.08 : most * 1.08;
  const x = scale(0, spans.end, box.left, box.right), y = scale(0, high, box.bottom, box.top);
  axes(context, theme, box, x, y, { yUnit: "bytes", xMarks: spans.timed ? undefined : [], xName: spans.timed ? "time, in forwards of one micro-batch on a rank" : "moments of a step" });
  const base = new Float64Array(n);
  for (const [name, kind] of Object.entries(MOMENT_KINDS)) {
    context.fillStyle = hatched(context, kind);
    context.beginPath();
    for (let i = 0; i < n; i++) {
      const value = columns[name][i], top = y(base[i] + value), left = x(spans.from[i]);
      context.rect(left, top, Math.max(x(spans.to[i]) - left, 0) + 0.35, y(base[i]) - top);
      base[i] += value;
    }
    context.fill();
  }
  if (capacity && capacity < high) {
    context.strokeStyle = theme.bad;
    context.lineWidth = 1.8;
    context.setLineDash([5, 3]);
    line(context, box.left, y(capacity), box.right, y(capacity));
    context.setLineDash([]);
    context.lineWidth = 1;
    context.fillStyle = theme.bad;
    context.textAlign = "right";
    halo(context, theme, `device ${mark(capacity, "bytes")}`, box.right, y(capacity) - 10);
  }
  phases(context, theme, columns, spans, x, box);
  peak(context, theme, columns, spans, x, y, box);
  return (px, py) => momentAt(columns, spans, x, y, box, px, py);
}

/** The phases of the step over the drawing: a name for each, where it has room. */
function phases(context, theme, columns, spans, x, box) {
  const names = columns.phase, y = box.top - 14;
  for (let i = 0, from = 0; i < names.length; i++) {
    if (names[i + 1] === names[i]) continue;
    const [left, right] = [x(spans.from[from]), x(spans.to[i])], name = names[i];
    from = i + 1;
    if (name === "waits" || !name || right - left < context.measureText(name).width + 8) continue;
    context.strokeStyle = theme.muted;
    line(context, left + 1, y + 9, right - 1, y + 9);
    context.fillStyle = theme.muted;
    context.textAlign = "center";
    context.fillText(name, (left + right) / 2, y);
  }
}

/** Where the most is held. */
function peak(context, theme, columns, spans, x, y, box) {
  const i = columns.together.reduce((best, value, k) => (value > columns.together[best] ? k : best), 0);
  const at = (x(spans.from[i]) + x(spans.to[i])) / 2, right = at > (box.left + box.right) / 2, top = y(columns.together[i]);
  context.fillStyle = theme.ink;
  context.beginPath();
  context.moveTo(at, top);
  context.lineTo(at - 5, top - 7);
  context.lineTo(at + 5, top - 7);
  context.fill();
  context.textAlign = right ? "right" : "left";
  halo(context, theme, `peak ${bytes(columns.together[i])}${box.right < 480 ? "" : `, ${columns.moment[i]}`}`, at + (right ? -9 : 9), Math.max(top - 4, box.top + 7));
}

/** The moment under the pointer, and the class. */
function momentAt(columns, spans, x, y, box, px, py) {
  const at = x.back(px), i = spans.from.findLastIndex((from, k) => from <= at && at < spans.to[k]);
  if (i < 0 || px < box.left || py < box.top || py > box.bottom) return "";
  const all = `${columns.moment[i]}\n${bytes(columns.together[i])} together`;
  let base = 0;
  for (const name of Object.keys(MOMENT_KINDS)) {
    base += columns[name][i];
    if (y.back(py) <= base) return `${all}\n${name}: ${bytes(columns[name][i])}, ${share(columns[name][i] / columns.together[i])}`;
  }
  return all;
}

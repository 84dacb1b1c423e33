// Pipelines: one schedule above another one on the same scale of time; bubbles, and what each rank holds.

import { axes, scale } from "studio/lib/axes";
import { panel, select, slider } from "studio/lib/controls";
import { h } from "studio/lib/dom";
import { figure } from "studio/lib/figure";
import { plain, seconds, share } from "studio/lib/format";
import { drawGantt, eventAt, ganttHeight, LEFT, prepare } from "studio/lib/gantt";
import { swatches } from "studio/lib/legend";
import { style } from "studio/lib/lines";
import { colours } from "studio/lib/theme";
import { timeWindow } from "studio/lib/window";
import { fact } from "studio/views/collectives";

/** A window is for the times that it was chosen for. */
export const forgets = () => ["_window"];
export const lead = "The layers are split over ranks, and micro-batches flow through them. What is blank is a bubble: a device that waits. Drag to move, + and − to zoom.";

const MICRO = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024];
const TIMES = [0, 0.5, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 75, 100];
const WORDS = { none: "nothing" };

export function mount(root, page) {
  const time = (value) => `${plain(Number(value))} ms`;
  const controls = [
    panel("Schedules", select(page, "a", "Schedule A"), select(page, "b", "beside it", { labels: WORDS }),
      slider(page, "ranks", "Ranks", { least: 1, most: 16 }), slider(page, "micro", "Micro-batches", { values: MICRO }),
      slider(page, "virtual", "Chunks a rank", { least: 1, most: 8, help: "for schedules that cut the model into several chunks a rank" })),
    panel("One micro-batch on a rank takes", slider(page, "F", "Forward (F)", { values: TIMES, words: time }),
      slider(page, "I", "Input gradient (I)", { values: TIMES, words: time }), slider(page, "W", "Weight gradient (W)", { values: TIMES, words: time }),
      slider(page, "hop", "A message", { values: TIMES, words: time })),
  ];
  let data = null;
  const sides = {};
  const shown = timeWindow(page, { name: "_window", extent: () => Math.max(...Object.keys(sides).filter((s) => data?.more[s]).map((s) => data.more[s].makespan)),
    onChange: () => Object.values(sides).forEach((side) => side.gantt.redraw()) });
  for (const name of ["a", "b"]) sides[name] = side(page, name, () => data, shown);
  const compared = figure(page, { name: "compared", title: "Side by side", above: [] });
  const facts = h("dl", { class: "facts" });
  compared.note.after(facts);
  const held = figure(page, { name: "events", title: "Activations held over time", height: 250, lead: "What each rank keeps for its backward passes; 1 is what a rank saves for one micro-batch.",
    draw: (context, width, height) => drawHeld(context, width, height, data, shown.current()) });
  sides.held = { gantt: held };
  shown.listen(held.canvas);
  const keys = h("ul", { class: "legend" });
  root.append(h("div", { class: "panels" }, controls.map((each) => each.node)), compared.node, sides.a.gantt.node, sides.b.gantt.node, held.node);
  compared.node.querySelector(".behind").before(h("div", { class: "row" }, shown.node), keys);

  function show(answer) {
    data = answer;
    shown.renew();
    controls.forEach((each) => each.show(answer));
    for (const name of ["a", "b"]) sides[name].show(answer);
    const used = new Set(["a", "b"].flatMap((name) => (answer.more[name] ? [...answer.more[name].events.kind] : [])));
    keys.replaceChildren(...swatches([...used].sort().map((k) => answer.more.kinds[k])), h("li", {}, "the number is the micro-batch; blank is bubble"));
    facts.replaceChildren(...["a", "b"].filter((name) => answer.more[name]).map((name) => {
      const one = answer.more[name];
      return fact(`${one.name}${one.virtual > 1 ? `, ${one.virtual} chunks a rank` : ""}`, seconds(one.makespan), `bubble ${share(one.bubble)} over ideal, ${share(one.bubble_of_total)} of the total; holds ${plain(one.peak)} micro-batches at most`);
    }));
    const [a, b] = [answer.more.a, answer.more.b];
    compared.note.textContent = !b || a.name === b.name ? "" : a.makespan === b.makespan ? "Both take the same time."
      : `${a.makespan < b.makespan ? a.name : b.name} takes ${share(1 - Math.min(a.makespan, b.makespan) / Math.max(a.makespan, b.makespan))} less time.`;
    compared.show(answer);
    held.show(answer);
    held.describe(`Activations held over time, rank by rank, for ${a.name}: at most ${plain(a.peak)} micro-batches.`);
  }

  return { show };
}

function side(page, name, answer, shown) {
  let events = null;
  const gantt = figure(page, { name, title: "", height: () => (events ? ganttHeight(events.rows) : 80),
    draw: (context, width) => events && drawGantt(context, width, events, shown.current(), { labels: (row) => `rank ${row}` }),
    hover: (x, y) => {
      const i = events ? eventAt(events, shown.current(), gantt.canvas.clientWidth, x, y) : -1;
      if (i < 0) return "";
      const e = answer().more[name].events, kind = answer().more.kinds[e.kind[i]];
      return `${kind}, micro-batch ${e.micro[i]}, stage ${e.stage[i]}\n${seconds(e.start[i])} to ${seconds(e.start[i] + e.seconds[i])}`;
    } });
  shown.listen(gantt.canvas);
  function show(data) {
    const one = data.more[name];
    gantt.node.hidden = !one;
    events = one ? prepare(one.events, one.ranks, data.more.kinds) : null;
    if (!one) return;
    events.chunked = one.virtual > 1;
    gantt.node.querySelector("h2").textContent = `${name.toUpperCase()} · ${one.name}`;
    gantt.note.textContent = `${one.summary[0].toUpperCase()}${one.summary.slice(1)}. Bubble in theory: ${one.formula}.`;
    gantt.show(data);
    gantt.describe(`Gantt chart of ${one.name}: ${one.ranks} ranks, step ${seconds(one.makespan)}, bubble ${share(one.bubble_of_total)} of the total.`);
  }
  return { gantt, show };
}

function drawHeld(context, width, height, data, window) {
  if (!data) return;
  const theme = colours(), box = { left: LEFT, right: width - 12, top: 24, bottom: height - 40 };
  const sides = ["a", "b"].filter((name) => data.more[name]);
  const top = Math.max(...sides.map((name) => data.more[name].peak)) || 1;
  const x = scale(window[0], window[1], box.left, box.right), y = scale(0, top * 1.12, box.bottom, box.top);
  axes(context, theme, box, x, y, { xUnit: "seconds", xName: "time", yName: width > 520 ? "micro-batches; coloured: the fullest rank (A solid, B dashed)" : "micro-batches (A solid, B dashed)" });
  context.save();
  context.beginPath();
  context.rect(box.left, box.top - 2, box.right - box.left, box.bottom - box.top + 4);
  context.clip();
  sides.forEach((name, n) => {
    const one = data.more[name], fullest = one.held.reduce((best, each, r) => (Math.max(...each.held) > Math.max(...one.held[best].held) ? r : best), 0);
    one.held.forEach((each, rank) => {
      context.strokeStyle = rank === fullest ? style(n).colour : theme.line;
      context.lineWidth = rank === fullest ? 2.2 : 1;
      context.setLineDash(n ? [6, 4] : []);
      steps(context, each, x, y);
      context.setLineDash([]);
    });
    steps(context, one.held[fullest], x, y, style(n).colour, n);
  });
  context.restore();
  context.lineWidth = 1;
  return (px, py) => (px < box.left || px > box.right || py < box.top || py > box.bottom ? "" : sides.map((name) => heldAt(data.more[name], name.toUpperCase(), x.back(px))).join("\n"));
}

/** What each rank holds at a time. */
function heldAt(one, letter, time) {
  const held = one.held.map((each) => each.held[Math.max(0, each.at.findLastIndex((at) => at <= time))]);
  return `${letter}, ${one.name} at ${seconds(time)}: ${held.map((value, rank) => `rank ${rank} ${plain(value)}`).join(", ")}`;
}

function steps(context, { at, held }, x, y, colour, n) {
  if (colour) {
    context.strokeStyle = colour;
    context.lineWidth = 2.2;
    context.setLineDash(n ? [6, 4] : []);
  }
  context.beginPath();
  for (let i = 0; i < at.length; i++) {
    if (i) context.lineTo(x(at[i]), y(held[i - 1]));
    context.lineTo(x(at[i]), y(held[i]));
  }
  context.stroke();
  context.setLineDash([]);
}

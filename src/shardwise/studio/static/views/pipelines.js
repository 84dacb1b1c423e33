// Pipelines: one schedule above another one on the same scale of time; bubbles, and what each rank holds.

import { axes, halo, scale } from "studio/lib/axes";
import { panel, select, slider } from "studio/lib/controls";
import { h } from "studio/lib/dom";
import { figure } from "studio/lib/figure";
import { plain, seconds, share } from "studio/lib/format";
import { drawGantt, eventAt, ganttHeight, LEFT, prepare, RIGHT, rowHeight, TOP } from "studio/lib/gantt";
import { swatches } from "studio/lib/legend";
import { legend, lines, style } from "studio/lib/lines";
import { player } from "studio/lib/player";
import { pointing } from "studio/lib/pointed";
import { colours } from "studio/lib/theme";
import { timeWindow } from "studio/lib/window";
import { fact } from "studio/views/collectives";

/** A window is for the times that it was chosen for. */
export const forgets = () => ["_window", "_time"];
export const lead = "The layers are split over ranks, and micro-batches flow through them. What is blank is a bubble: a device that waits. Play sweeps over both; drag to move, + and − to zoom.";

const POWERS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192];
const WORDS = { none: "nothing" };

export function mount(root, page) {
  const time = (value) => `${plain(Number(value))} ms`;
  const controls = [
    panel("Schedules", select(page, "a", "Schedule A"), select(page, "b", "beside it", { labels: WORDS }),
      slider(page, "ranks", "Ranks"),
      slider(page, "virtual", "Chunks a rank", { help: "for schedules that cut the model into several chunks a rank" })),
    panel("One micro-batch on a rank takes", slider(page, "F", "Forward (F)", { words: time }),
      slider(page, "I", "Input gradient (I)", { words: time }), slider(page, "W", "Weight gradient (W)", { words: time }),
      slider(page, "hop", "A message", { words: time })),
  ];
  const ranks = pointing(), micro = slider(page, "micro", "Micro-batches");
  let data = null, at = 0;
  const timeAt = () => (at / (data.more.moments.length - 1)) * Math.max(...["a", "b"].filter((name) => data?.more[name]).map((name) => data.more[name].makespan));
  const sides = {}, redraw = () => Object.values(sides).forEach((side) => side.gantt.redraw());
  const play = player(page, { name: "_time", label: "Time of the step", seconds: 0.12, onFrame: (position) => { at = position; redraw(); } });
  const shown = timeWindow(page, { name: "_window", extent: () => Math.max(...["a", "b"].filter((name) => data?.more[name]).map((name) => data.more[name].makespan)), onChange: redraw });
  const state = { answer: () => data, shown, ranks, cursor: () => (at ? timeAt() : null) };
  for (const name of ["a", "b"]) sides[name] = side(page, name, state);
  const compared = figure(page, { name: "compared", title: "Side by side", above: [] });
  const facts = h("dl", { class: "facts" });
  compared.note.after(facts);
  const bubble = curveFigure(page, micro);
  const held = figure(page, { name: "events", title: "Activations held over time", ranks, height: () => (data ? TOP + data.more.a.ranks * heldRow(data) + 40 : 100), lead: "What each rank keeps for its backward passes, the fullest drawn as high as its row. A is filled, B is the dashed line; the numbers are the most of each in micro-batches.",
    draw: (context, width) => data && drawHeld(context, width, data, state) });
  sides.held = { gantt: held };
  shown.listen(held.canvas);
  const keys = h("ul", { class: "legend" });
  root.append(h("div", { class: "panels" }, controls.map((each) => each.node)), h("div", { class: "columns" }, compared.node, bubble.node), sides.a.gantt.node, sides.b.gantt.node, held.node);
  compared.node.querySelector(".behind").before(play.node, h("div", { class: "row" }, shown.node), keys);

  function show(answer, part) {
    if (part === "pipelines/curve") {
      bubble.set(answer);
      return;
    }
    data = answer;
    micro.show(answer);
    shown.renew();
    controls.forEach((each) => each.show(answer));
    for (const name of ["a", "b"]) sides[name].show(answer);
    const used = new Set(["a", "b"].flatMap((name) => (answer.more[name] ? [...answer.more[name].events.kind] : [])));
    keys.replaceChildren(...swatches([...used].sort().map((k) => answer.more.kinds[k]), true), h("li", {}, "the number is the micro-batch; blank is bubble"));
    facts.replaceChildren(...["a", "b"].filter((name) => answer.more[name]).map((name) => {
      const one = answer.more[name];
      return fact(`${one.name}${one.virtual > 1 ? `, ${one.virtual} chunks a rank` : ""}`, seconds(one.makespan), `bubble ${share(one.bubble)} over ideal, ${share(one.bubble_of_total)} of the total; holds ${plain(one.peak)} micro-batches at most`);
    }));
    const [a, b] = [answer.more.a, answer.more.b];
    compared.note.textContent = !b || a.name === b.name ? "" : a.makespan === b.makespan ? "Both take the same time."
      : `${a.makespan < b.makespan ? a.name : b.name} takes ${share(1 - Math.min(a.makespan, b.makespan) / Math.max(a.makespan, b.makespan))} less time.`;
    compared.show(answer);
    play.show(answer.more.moments, Number(page.local("_time", 0)));
    held.show(answer);
    held.describe(`Activations held over time, rank by rank, for ${a.name}: at most ${plain(a.peak)} micro-batches.`);
  }

  return { show };
}

/** The bubble against the number of micro-batches, and the slider that changes it. */
function curveFigure(page, micro) {
  let answer = null, curves = [];
  const keys = h("ul", { class: "legend" });
  const self = figure(page, { name: "curve", title: "Bubble against micro-batches", above: [micro.node], extras: [keys], height: 260,
    draw: (context, width, height) => answer && lines(context, width, height, curves, { logX: true, yUnit: "share", xName: "micro-batches", yName: "bubble of the total", xMarks: POWERS.filter((n) => n <= curves[0].points.at(-1)[0]), marks: [[answer.state.micro, `${answer.state.micro}`]] }) });

  function set(given) {
    answer = given;
    const { columns } = given.tables.curve, [micros, ...sides] = Object.keys(columns);
    curves = sides.map((name, n) => ({ name, n, strong: true, dots: true, points: columns[micros].map((m, i) => [m, columns[name][i]]) }));
    keys.replaceChildren(...legend(curves));
    self.show(given);
    self.describe(`Lines: ${sides.map((name) => `${name}, ${share(columns[name].find((v) => v !== null) ?? 0)} with few micro-batches`).join("; ")}, falling as they become more.`);
  }

  return { ...self, set };
}

function side(page, name, { answer, shown, ranks, cursor }) {
  let events = null;
  const gantt = figure(page, { name, title: "", ranks, height: () => (events ? ganttHeight(events.rows) : 80),
    draw: (context, width) => {
      if (!events) return;
      const x = drawGantt(context, width, events, shown.current(), { labels: (row) => `rank ${row}`, marked: ranks.now() });
      sweep(context, x, cursor(), TOP, TOP + events.rows * rowHeight(events.rows));
    },
    hover: (x, y) => {
      const i = events ? eventAt(events, shown.current(), gantt.canvas.clientWidth, x, y) : -1, rank = events && y >= TOP ? Math.floor((y - TOP) / rowHeight(events.rows)) : null;
      if (i < 0) return rank === null || rank >= events.rows ? "" : { rank, words: "" };
      const e = answer().more[name].events, kind = answer().more.kinds[e.kind[i]];
      return { rank, words: `${kind}, micro-batch ${e.micro[i]}, stage ${e.stage[i]}\n${seconds(e.start[i])} to ${seconds(e.start[i] + e.seconds[i])}` };
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

/** The moment that is played. */
function sweep(context, x, time, top, bottom) {
  if (time === null || time < x.low || time > x.high) return;
  const theme = colours();
  context.fillStyle = theme.surface;
  context.fillRect(x(time) - 2.5, top - 4, 5, bottom - top + 8);
  context.fillStyle = theme.ink;
  context.fillRect(x(time) - 1, top - 4, 2, bottom - top + 8);
}

function heldRow(data) {
  return Math.max(14, rowHeight(data.more.a.ranks));
}

/** A row for each rank: what A holds as an area, what B holds as a dashed line, all on one scale. */
function drawHeld(context, width, data, { shown, ranks, cursor }) {
  const theme = colours(), tall = heldRow(data), n = data.more.a.ranks, bottom = TOP + n * tall, window = shown.current();
  const box = { left: LEFT, right: width - RIGHT, top: TOP, bottom }, x = scale(window[0], window[1], box.left, box.right);
  const sides = ["a", "b"].filter((name) => data.more[name]), top = Math.max(...sides.map((name) => data.more[name].peak)) || 1;
  for (let rank = 0; rank < n; rank++) {
    const y = scale(0, top, TOP + (rank + 1) * tall - 3, TOP + rank * tall + 3), mine = sides.map((name) => data.more[name].held[rank]);
    context.fillStyle = rank === ranks.now() ? theme.grid : theme.raised;
    context.fillRect(box.left, TOP + rank * tall, box.right - box.left, tall - 2);
    context.fillStyle = theme.ink;
    context.textAlign = "right";
    if (rank % Math.ceil(14 / tall) === 0) context.fillText(`rank ${rank}`, box.left - 10, TOP + rank * tall + tall / 2);
    context.save();
    context.beginPath();
    context.rect(box.left, TOP + rank * tall, box.right - box.left, tall);
    context.clip();
    mine.forEach((each, i) => heldLine(context, each, x, y, i));
    context.restore();
    context.textAlign = "right";
    context.fillStyle = theme.ink;
    if (width > 520) halo(context, theme, mine.map((each, i) => `${"AB"[i]} ${plain(each.held.reduce((most, value) => Math.max(most, value), 0))}`).join("  "), box.right - 8, TOP + rank * tall + tall / 2);
  }
  axes(context, theme, { ...box, top: bottom }, x, scale(0, 1, bottom, bottom), { xUnit: "seconds", xName: "time", yMarks: [] });
  sweep(context, x, cursor(), TOP, bottom);
  return (px, py) => {
    const rank = Math.floor((py - TOP) / tall);
    if (px < box.left || px > box.right || rank < 0 || rank >= n) return "";
    return { rank, words: `rank ${rank} at ${seconds(x.back(px))}\n${sides.map((name) => `${name.toUpperCase()}, ${data.more[name].name}: holds ${plain(heldAt(data.more[name].held[rank], x.back(px)))}`).join("\n")}` };
  };
}

function heldAt({ at, held }, time) {
  return held[Math.max(0, at.findLastIndex((each) => each <= time))];
}

/** What one rank holds: an area, or for the second schedule a dashed line. */
function heldLine(context, { at, held }, x, y, side) {
  const { colour } = style(side);
  context.beginPath();
  context.moveTo(x(at[0]), y(held[0]));
  for (let i = 1; i < at.length; i++) {
    context.lineTo(x(at[i]), y(held[i - 1]));
    context.lineTo(x(at[i]), y(held[i]));
  }
  context.strokeStyle = colour;
  context.lineWidth = side ? 1.8 : 1.2;
  context.setLineDash(side ? [5, 3] : []);
  context.stroke();
  context.setLineDash([]);
  context.lineWidth = 1;
  if (side) return;
  context.lineTo(x(at[at.length - 1]), y(0));
  context.globalAlpha = 0.3;
  context.fillStyle = colour;
  context.fill();
  context.globalAlpha = 1;
}

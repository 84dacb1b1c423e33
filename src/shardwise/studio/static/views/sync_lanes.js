// Workers and servers: a lane for each worker with its gradients and waits, and below them the updates.

import { h } from "studio/lib/dom";
import { figure } from "studio/lib/figure";
import { plain, seconds } from "studio/lib/format";
import { drawGantt, eventAt, ganttHeight, prepare, rowHeight, TOP } from "studio/lib/gantt";
import { swatches } from "studio/lib/legend";
import { colourOf, colours } from "studio/lib/theme";
import { timeWindow } from "studio/lib/window";

const UPDATE = 4, IDLE = 3;
/** Arrows, and marks of updates, up to which they are drawn: more would hide the lanes. */
const MOST_ARROWS = 150, MOST_MARKS = 600;
/** Pixels of a wait from which it has an arrow. */
const SEEN = 5;

/** The figure "gradients". above: nodes over it. */
export function lanes(page, { above }) {
  let events = null, data = null;
  const keys = h("ul", { class: "legend" });
  const shown = timeWindow(page, { name: "_window", extent: () => events?.latest || 1, onChange: () => made.redraw() });
  const made = figure(page, { name: "gradients", title: "Gradients over time", above: [...above, shown.node], extras: [keys],
    height: () => (events ? ganttHeight(events.rows) : 80),
    draw: (context, width) => {
      if (!events) return;
      const x = drawGantt(context, width, events, shown.current(), { labels: (row) => events.labels[row] });
      drawArrows(context, x, events, data);
      drawUpdates(context, x, events, data);
    },
    hover: (x, y) => (events ? words(x, y) : "") });
  shown.listen(made.canvas);

  function words(px, py) {
    const i = eventAt(events, shown.current(), made.canvas.clientWidth, px, py);
    if (i >= 0 && data.more.events.kind[i] !== UPDATE) return gradientWords(data, i);
    const row = Math.floor((py - TOP) / rowHeight(events.rows));
    return row === events.rows - 1 ? updateWords(data, nearestUpdate(px)) : "";
  }

  function nearestUpdate(px) {
    const [low, high] = shown.current(), width = made.canvas.clientWidth, left = Math.min(events.left, width * 0.35);
    const time = low + ((px - left) / (width - 12 - left)) * (high - low), reach = (8 / (width - 12 - left)) * (high - low);
    let best = -1, least = reach;
    for (const i of events.updates) {
      const far = Math.abs(endOf(data.more.events, i) - time);
      if (far <= least) [best, least] = [i, far];
    }
    return best;
  }

  function show(answer) {
    data = answer;
    const { more } = answer, [worker, meeting] = more.names;
    events = prepare({ ...more.events, micro: more.events.label, stage: [] }, more.count + 1, more.kinds);
    events.labels = [...Array.from({ length: more.count }, (_, row) => `${worker} ${row}`), meeting];
    events.name = (i) => (more.events.kind[i] === IDLE || more.events.kind[i] === UPDATE ? "" : String(more.events.label[i]));
    events.left = 86;
    events.updates = Array.from(more.events.kind.keys()).filter((i) => more.events.kind[i] === UPDATE);
    shown.renew();
    const used = [...new Set(more.events.kind)].sort();
    keys.replaceChildren(...swatches(used.map((kind) => more.kinds[kind]), true), h("li", {}, "▲ an update, with its version · an arrow: whose gradient ends a wait"));
    made.node.querySelector("h2").textContent = worker === "replica" ? "Rounds over time" : "Gradients over time";
    made.show(answer);
    made.describe(`Timeline of ${more.count} ${worker}s: ${plain(more.summary.updates)} updates, ${plain(more.summary.gradients)} gradients. ${more.sentence}`);
  }

  return { ...made, show };
}

function endOf({ start, seconds: takes }, i) {
  return start[i] + takes[i];
}

function gradientWords({ more, tables }, i) {
  const { columns } = tables.gradients, [worker] = more.names, row = more.events.gradient[i], name = `${worker} ${columns[worker][row]}`;
  if (more.events.kind[i] === IDLE) return `${name} waits ${seconds(more.events.seconds[i])} for ${worker} ${columns["waited for"][row]}`;
  const after = columns["in update"][row] === "dropped" ? "dropped" : `in update ${columns["in update"][row]}, ${columns["updates behind"][row]} behind`;
  return `${name}, step ${columns.step[row]}: read version ${columns["version read"][row]}, ${after}\n${seconds(columns.began[row])} to ${seconds(columns.pushed[row])}`;
}

function updateWords({ more, tables }, i) {
  if (i < 0) return "";
  const { columns } = tables.gradients, [worker] = more.names, version = more.events.label[i];
  const own = Array.from(columns[worker]).filter((_, row) => columns["in update"][row] === version);
  return `version ${version} at ${seconds(endOf(more.events, i))}\nof ${worker}${own.length === 1 ? "" : "s"} ${own.join(", ")}`;
}

/** From the lane of the gradient that ends a wait to the lane that waits. */
function drawArrows(context, x, events, { more, tables }) {
  const waits = [];
  for (let i = 0; i < more.events.kind.length; i++) {
    const end = endOf(more.events, i);
    if (more.events.kind[i] === IDLE && end >= x.low && end <= x.high && x(end) - x(more.events.start[i]) >= SEEN) waits.push(i);
    if (waits.length > MOST_ARROWS) return;
  }
  const tall = rowHeight(events.rows), middle = (row) => TOP + row * tall + tall / 2, theme = colours();
  context.strokeStyle = context.fillStyle = theme.ink;
  for (const i of waits) {
    const at = x(endOf(more.events, i)), from = middle(tables.gradients.columns["waited for"][more.events.gradient[i]]), to = middle(more.events.rank[i]);
    const down = to > from ? 1 : -1;
    context.beginPath();
    context.moveTo(at, from);
    context.lineTo(at, to);
    context.stroke();
    triangle(context, at, to, down * 5);
  }
}

function triangle(context, x, y, size) {
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(x - Math.abs(size) * 0.8, y - size);
  context.lineTo(x + Math.abs(size) * 0.8, y - size);
  context.fill();
}

/** Marks in the last lane; the version where there is room for it. */
function drawUpdates(context, x, events, { more }) {
  const theme = colours(), tall = rowHeight(events.rows), top = TOP + (events.rows - 1) * tall;
  const there = events.updates.filter((i) => endOf(more.events, i) >= x.low && endOf(more.events, i) <= x.high);
  if (there.length > MOST_MARKS) return;
  context.textAlign = "left";
  there.forEach((i, n) => {
    const at = x(endOf(more.events, i)), word = String(more.events.label[i]);
    const room = n + 1 < there.length ? x(endOf(more.events, there[n + 1])) - at : Infinity;
    context.fillStyle = colourOf("update");
    triangle(context, at, top + 1, -Math.min(8, tall - 3));
    if (tall < 14 || room < context.measureText(word).width + 14 || at + context.measureText(word).width + 8 > x(x.high)) return;
    context.fillStyle = theme.ink;
    context.fillText(word, at + 7, top + tall / 2);
  });
}

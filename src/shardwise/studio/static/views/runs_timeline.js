// Events of a step over time: zoomed, searched, and added up over what is selected.

import { h, unique } from "studio/lib/dom";
import { figure } from "studio/lib/figure";
import { count, seconds } from "studio/lib/format";
import { drawGantt, eventAt, ganttHeight, leftOf, outlined, prepare, shaded } from "studio/lib/gantt";
import { swatches } from "studio/lib/legend";
import { table } from "studio/lib/table";
import { kinds } from "studio/lib/theme";
import { timeWindow } from "studio/lib/window";

export const TIMELINE = "One step on every rank";
const NAMES = 12;

/** The figure of a step's events; `set` shows others, or hides it where there are none. */
export function timelineFigure(page) {
  let events = null, matches = [], at = -1, chosen = null;
  const keys = h("ul", { class: "legend" }), id = unique("search");
  const found = h("output", { for: id }), totals = h("div", { class: "totals", "aria-live": "polite" });
  const input = h("input", { id, type: "search", autocomplete: "off", spellcheck: "false", size: 22, oninput: () => search(), onkeydown: (event) => event.key === "Enter" && step(event.shiftKey ? -1 : 1) });
  const finder = h("div", { class: "find" }, h("label", { for: id }, "Find events"), input,
    h("button", { type: "button", "aria-label": "Previous match", onclick: () => step(-1) }, "◂"), h("button", { type: "button", "aria-label": "Next match", onclick: () => step(1) }, "▸"), found);
  const shown = timeWindow(page, { name: "_window", extent: () => events?.latest || 1, onChange: () => { timeline.redraw(); tell(); },
    left: () => leftOf(events ?? {}, timeline.canvas.clientWidth), onSelect: (span) => { chosen = span; timeline.redraw(); tell(); } });
  const timeline = figure(page, { name: "timeline", title: TIMELINE, above: [shown.node, finder], extras: [keys, totals],
    height: () => (events ? ganttHeight(events.rows) : 60),
    draw: (context, width) => {
      if (!events) return;
      drawGantt(context, width, events, shown.current(), { labels: (row) => events.labels[row], left: events.left });
      if (matches.length) outlined(context, width, events, shown.current(), events.matched, matches[at]);
      if (chosen) shaded(context, width, events, shown.current(), chosen);
    },
    hover: (x, y) => {
      const i = events ? eventAt(events, shown.current(), timeline.canvas.clientWidth, x, y) : -1;
      return i < 0 ? "" : `${events.name(i)}\n${seconds(events.startOf(i))}, takes ${seconds(events.secondsOf(i))}`;
    } });
  shown.listen(timeline.canvas);

  function search() {
    const words = input.value.trim().toLowerCase();
    at = -1;
    events.matched = Uint8Array.from(events.order, (_, i) => (words && events.name(i).toLowerCase().includes(words) ? 1 : 0));
    matches = [...events.matched.keys()].filter((i) => events.matched[i]).sort((a, b) => events.startOf(a) - events.startOf(b));
    const total = matches.reduce((sum, i) => sum + events.secondsOf(i), 0);
    found.textContent = !words ? "" : matches.length ? `${count(matches.length)} of ${count(events.order.length)} events, ${seconds(total)}` : "no event has it in its name";
    timeline.redraw();
  }

  /** Go to the next match, or the one before, and have it in the middle of the window. */
  function step(by) {
    if (!matches.length) return;
    at = (at + by + matches.length) % matches.length;
    const i = matches[at], [a, b] = shown.current(), middle = events.startOf(i) + events.secondsOf(i) / 2;
    const wide = Math.min(b - a, Math.max(events.secondsOf(i) * 8, events.latest / 50));
    shown.move(middle - wide / 2, middle + wide / 2);
    found.textContent = `${at + 1} of ${matches.length}: ${events.name(i)} in ${events.labels[events.rowOf[i]]}, ${seconds(events.secondsOf(i))}`;
  }

  /** Time of the events in the selection, else in the window, by kind and by name. */
  function tell() {
    if (!events) return;
    const [from, to] = chosen ?? shown.current(), sums = sumsOf(events, from, to);
    const words = [...sums.kinds].map(([kind, time]) => `${kinds[events.names[kind]].label} ${seconds(time)}`).join(", ");
    const rows = [...sums.names].sort((a, b) => b[1].time - a[1].time).slice(0, NAMES);
    const columns = { event: rows.map(([name]) => name), count: rows.map(([, one]) => one.count), time: rows.map(([, one]) => one.time) };
    const open = totals.querySelector("details")?.open ?? false;
    totals.replaceChildren(h("p", {}, h("span", { class: "strong" }, `${chosen ? "Selected" : "Shown"}: ${seconds(from)} to ${seconds(to)}. `), `All rows together: ${words || "nothing"}. `,
      chosen ? h("button", { type: "button", class: "quiet", onclick: () => { chosen = null; timeline.redraw(); tell(); } }, "Select nothing") : "Shift and drag selects; w, s zoom, a, d move."),
    h("details", open ? { open: true } : {}, h("summary", {}, "Totals by name"), table({ title: "The longest, by name", columns, units: { count: "count", time: "seconds" } })));
  }

  function set(given, title, note) {
    timeline.node.querySelector("h2").textContent = title;
    timeline.note.textContent = note;
    timeline.node.hidden = !given;
    if (!given) return;
    events = prepare(given.columns, given.rows.length, given.kinds);
    events.labels = given.rows;
    events.rowOf = given.columns.rank;
    events.name = (i) => given.names[given.columns.name[i]];
    events.startOf = (i) => given.columns.start[i];
    events.secondsOf = (i) => given.columns.seconds[i];
    events.left = 150;
    chosen = null;
    shown.renew();
    search();
    tell();
    keys.replaceChildren(...swatches([...new Set(given.columns.kind)].sort((a, b) => a - b).map((k) => given.kinds[k]), true));
    timeline.describe(`Timeline of ${given.rows.length} rows and ${given.columns.start.length} events over ${seconds(events.latest)}.`);
    timeline.redraw();
  }

  return { ...timeline, set };
}

/** Seconds of the events between two moments, cut to them: by kind, and with their number by name. */
export function sumsOf(events, from, to) {
  const kindSums = new Map(), names = new Map();
  for (let j = 0; j < events.order.length; j++) {
    const time = Math.min(events.ends[j], to) - Math.max(events.starts[j], from);
    if (time <= 0) continue;
    const name = events.name(events.order[j]), one = names.get(name) ?? { count: 0, time: 0 };
    kindSums.set(events.kindOf[j], (kindSums.get(events.kindOf[j]) ?? 0) + time);
    names.set(name, { count: one.count + 1, time: one.time + time });
  }
  return { kinds: kindSums, names };
}

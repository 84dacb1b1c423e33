// A recorded step of a run: what the verdict says, its time by rank, who came last, the plan beside it, and its memory.

import { bars, barsHeight } from "studio/lib/bars";
import { h } from "studio/lib/dom";
import { figure } from "studio/lib/figure";
import { bytes, seconds, shown } from "studio/lib/format";
import { swatches } from "studio/lib/legend";
import { legend, lines } from "studio/lib/lines";
import { waterfall, waterfallHeight } from "studio/lib/waterfall";

/** answer(): the one that is shown. Figures by their names. */
export function stepFigures(page, answer) {
  const rows = () => fallRows(answer()?.tables.waterfall), keys = h("ul", { class: "legend" });
  const fall = figure(page, { name: "waterfall", title: "Planned and recorded", height: () => waterfallHeight(rows().length || 1),
    draw: (context, width) => rows().length && waterfall(context, width, rows(), { unit: "seconds" }) });
  const curve = () => memoryCurve(answer());
  const over = figure(page, { name: "over", title: "Memory over one step", extras: [keys], height: 290,
    draw: (context, width, height) => curve().series.length && lines(context, width, height, curve().series, { xName: "time", xUnit: "seconds", yUnit: "bytes", yName: "bytes", marks: curve().marks }) });
  const arrivals = barFigure(page, "arrivals", "Who came last", answer), peak = barFigure(page, "peak", "Tensors at the peak", answer, "", "bytes");
  return {
    ranks: barFigure(page, "ranks", "Time by rank", answer, "What each rank did with the step: every bar adds up to it."),
    waterfall: withShow(fall, ({ more, tables }) => {
      fall.note.textContent = `${tables.waterfall.title}: differences add up.${more.has?.includes("predicted") && !tables.waterfall.columns.planned && answer().state.against === "its plan" ? " The plan has no time: no cluster with measured speeds was given." : ""}`;
      fall.describe(rows().map((row) => `${row.label}: ${seconds(row.from)} to ${seconds(row.to)}`).join("; "));
    }),
    arrivals: withShow(arrivals, ({ tables }) => { arrivals.note.textContent = `${lastWords(tables.arrivals.columns)} A bar: what the others lost at one collective.`; }),
    over: withShow(over, ({ more }) => {
      over.note.textContent = `Peak: ${more.peaks.join("; ")}, since every storage was followed.`;
      over.describe(more.peaks.join("; "));
      keys.replaceChildren(...legend(curve().series));
    }),
    peak,
  };
}

function withShow(made, then) {
  return { ...made, show: (data) => { made.show(data); then(data); } };
}

/** A figure of bars, which an answer's more.bars has by its name; `answer()` is the one that is shown. */
export function barFigure(page, name, title, answer, lead = "", unit = "seconds") {
  const rows = () => answer()?.more.bars?.[name] ?? [], keys = h("ul", { class: "legend" });
  const made = figure(page, { name, title, lead, extras: [keys], height: () => barsHeight(rows().length || 1),
    draw: (context, width) => rows().length && bars(context, width, rows().map((row) => ({ ...row, words: row.words || undefined })), { unit, left: 190 }) });
  return withShow(made, () => {
    made.node.hidden = !rows().length;
    keys.replaceChildren(...swatches([...new Set(rows().flatMap((row) => row.parts.filter(([, value]) => value > 0).map(([kind]) => kind)))]));
    made.describe(rows().map((row) => `${row.label} ${row.detail}: ${shown(row.total, unit)}${row.words && `, ${row.words}`}`).join("; "));
  });
}

function fallRows(table) {
  if (!table) return [];
  const { part, from, to } = table.columns, before = Object.keys(table.columns)[1], plain = !part[0].startsWith("step, ");
  return part.map((label, i) => ({ label, from: from[i], to: to[i], sum: label.startsWith("step, "), plain, words: `${before} ${seconds(table.columns[before][i])}, recorded ${seconds(table.columns.recorded[i])}` }));
}

function lastWords({ last, lost }) {
  const sums = new Map();
  last.forEach((rank, i) => sums.set(rank, (sums.get(rank) ?? 0) + lost[i]));
  const [rank, most] = [...sums].sort((a, b) => b[1] - a[1])[0];
  return most > 0 ? `The others stood still longest for rank ${rank}: ${seconds(most)}, all together.` : "Nobody waited for anybody.";
}

/** Bytes of the first rank over its step: all of them, and by class. */
function memoryCurve(data) {
  const table = data?.tables.over;
  if (!table) return { series: [], marks: [] };
  const { rank, at, ...classes } = table.columns, mine = [...at.keys()].filter((i) => rank[i] === rank[0]);
  const named = Object.entries(classes).filter(([, values]) => mine.some((i) => values[i] > 0));
  const totals = mine.map((i) => [at[i], named.reduce((sum, [, values]) => sum + values[i], 0)]);
  const top = totals.reduce((best, point) => (point[1] > best[1] ? point : best), [0, 0]);
  const series = [{ name: "all", n: 0, strong: true, points: totals }, ...named.map(([name, values], n) => ({ name, n: n + 1, points: mine.map((i) => [at[i], values[i]]) }))];
  return { series, marks: [[top[0], `peak: ${bytes(top[1])}`]] };
}

// The two strategies in numbers: a row for each metric, B over A, and both as bars on a log scale.

import { h } from "studio/lib/dom";
import { shown } from "studio/lib/format";

/** data: the answer of tokens; more: rows of the whole answer, which come later. */
export function metricTable(data, more) {
  const rows = [...data.more.metrics, ...more], names = data.more.sides.map((side) => side.layout);
  const head = names.map((name, i) => h("th", { scope: "col", class: "n" }, `${"AB"[i]}: ${name}`));
  if (names.length > 1) head.push(h("th", { scope: "col", class: "n" }, "B over A"), h("th", { scope: "col", class: "log" }, "A and B, log scale"));
  const body = rows.map((row) => h("tr", { class: row.part ? "part" : null }, h("th", { scope: "row" }, row.name),
    row.values.map((value) => cell(value, row.unit)),
    names.length > 1 && [h("td", { class: "n", "data-v": JSON.stringify(row.ratio) }, ratio(row.ratio)), h("td", { class: "log" }, bars(row))]));
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "The two strategies in numbers" },
    h("table", { class: "metrics" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Metric"), head)), h("tbody", {}, body)));
}

/** The rows that stay in sight, under their short names. */
export function metricSummary(data) {
  const rows = data.more.metrics.filter((row) => row.short), sides = data.more.sides;
  const head = [h("th", { scope: "col" }, "in short"), ...sides.map((side, i) => h("th", { scope: "col", class: "n", title: side.layout }, "AB"[i])), sides.length > 1 && h("th", { scope: "col", class: "n" }, "B over A")];
  return h("table", { class: "summary", "aria-label": "The two strategies in short" }, h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows.map((row) => h("tr", { title: row.name }, h("th", { scope: "row" }, row.short),
    row.values.map((value) => cell(value, row.unit, true)),
    sides.length > 1 && h("td", { class: "n" }, ratio(row.ratio))))));
}

/** short: a verdict without its numbers. */
function cell(value, unit, short = false) {
  const words = value ? shown(value, unit) : "–";
  return h("td", { class: words.startsWith("does not") ? "n bad" : "n", "data-v": JSON.stringify(value) }, short ? words.split(":")[0] : words);
}

function ratio(value) {
  if (value === null) return "";
  const [n, sign] = value < 1 ? [1 / value, "1/"] : [value, ""];
  return `${sign}${Number(n.toPrecision(3)).toLocaleString("en-US")} ×`;
}

/** The smaller value is one unit long, and each factor of ten another one. */
function bars({ values }) {
  const there = values.filter((value) => typeof value === "number" && value > 0);
  if (!there.length) return "";
  const least = Math.min(...there), most = Math.log10(Math.max(...there) / least) + 1;
  return values.map((value, i) => h("div", { class: "bar-log", "aria-hidden": "true", style: `width:${value > 0 ? (100 * (Math.log10(value / least) + 1)) / Math.max(most, 2) : 0}%;background:var(--k-${"ab"[i]})` }));
}

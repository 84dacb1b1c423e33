// A table from columns; every cell keeps its exact value in data-v. Long tables come by pages.

import { h } from "studio/lib/dom";
import { shown } from "studio/lib/format";

const PAGE = 100;

export function table({ title, columns, units }) {
  const names = Object.keys(columns), rows = names.length ? columns[names[0]].length : 0;
  const right = names.map((name) => Array.prototype.some.call(columns[name], (v) => typeof v === "number"));
  const head = names.map((name, i) => h("th", { scope: "col", class: right[i] && "n" }, name));
  const body = h("tbody");
  const add = () => {
    const first = body.rows.length, last = Math.min(rows, first + PAGE);
    for (let row = first; row < last; row++) body.append(line(row));
    more.hidden = last >= rows;
    more.textContent = `Show ${Math.min(PAGE, rows - last)} more of ${rows.toLocaleString("en-US")} rows`;
  };
  const line = (row) => h("tr", {}, names.map((name, i) => {
    const value = columns[name][row];
    return h("td", { class: right[i] && "n", "data-v": JSON.stringify(value ?? null) }, shown(value, units[name]));
  }));
  const more = h("button", { type: "button", class: "quiet", onclick: add });
  const whole = h("table", {}, h("caption", {}, title), h("thead", {}, h("tr", {}, head)), body);
  add();
  return h("div", {}, h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title }, whole), more);
}

// Inputs of a view. Each shows the state's value, and sets it; the words are those of the URL.

import { inside } from "studio/lib/data";
import { h, unique } from "studio/lib/dom";

/** A list to choose from; `labels` gives words for values. */
export function select(page, name, label, { labels = {}, help = "" } = {}) {
  const id = unique(name), input = h("select", { id, onchange: () => page.set({ [name]: input.value }) });
  let listed = "";
  return control(id, label, help, input, (data) => {
    const values = data.choices[name] ?? [], value = String(data.state[name]);
    const all = values.map(String).includes(value) ? values : [value, ...values];
    if (listed !== all.join("\n")) {
      input.replaceChildren(...all.map((each) => h("option", { value: each }, labels[each] ?? String(each))));
      listed = all.join("\n");
    }
    input.value = value;
  });
}

/** Text with suggestions, and why others of the catalog are none: data.more.left_out of a model. A site has a list. */
export function text(page, name, label, { help = "", size = 14 } = {}) {
  if (inside?.presets) return select(page, name, label, { help });
  const id = unique(name), list = h("datalist", { id: `${id}-list` });
  const input = h("input", { id, type: "text", size, list: `${id}-list`, autocomplete: "off", spellcheck: "false",
    onchange: () => page.set({ [name]: input.value }) });
  const why = h("ul", {}), count = h("summary", {}), others = h("details", { class: "left-out", hidden: true }, count, why);
  return control(id, label, help, h("span", { class: "field" }, input, list, others), (data) => {
    const left = name === "model" ? Object.entries(data.more?.left_out ?? {}) : [];
    others.hidden = !left.length;
    count.textContent = `${left.length} not offered`;
    why.replaceChildren(...left.map(([other, reason]) => h("li", {}, `${other}: ${reason}`)));
    const values = data.choices[name] ?? [];
    list.replaceChildren(...values.map((each) => h("option", { value: each })));
    if (document.activeElement !== input || !page.pending || input.value === "") input.value = String(data.state[name]);
  });
}

/** A slider over an answer's choices, those of `from`; `words(value)` is next to it, or, with `typed`, a box for any number. */
export function slider(page, name, label, { words = String, help = "", from = name, typed = false } = {}) {
  const id = unique(from), output = typed && !inside?.presets ? h("input", { type: "number", min: 0, step: "any", inputmode: "numeric", "aria-label": `${label}, exactly`, onchange: () => page.set({ [name]: output.value }) }) : h("output", { for: id });
  let values = [];
  const input = h("input", { id, type: "range", min: 0, max: 0, step: 1, oninput: () => {
    tell(values[input.value]);
    page.set({ [name]: values[input.value] }, true);
  } });
  const tell = (value) => {
    if (output.matches("input")) output.value = value;
    else output.textContent = words(value);
    input.setAttribute("aria-valuetext", words(value));
  };
  return control(id, label, help, h("span", { class: "slide" }, input, output), (data) => {
    values = data.choices[from] ?? [data.state[name]];
    input.max = values.length - 1;
    if (document.activeElement !== input || !page.pending) input.value = nearest(values, data.state[name]);
    tell(data.state[name]);
  });
}

/** A whole or broken number; a site has a list. */
export function number(page, name, label, { least = 0, most = 1e9, step = 1, help = "" } = {}) {
  if (inside?.presets) return select(page, name, label, { help });
  const id = unique(name);
  const input = h("input", { id, type: "number", min: least, max: most, step, inputmode: "numeric",
    onchange: () => page.set({ [name]: input.value }) });
  return control(id, label, help, input, (data) => {
    if (document.activeElement !== input || !page.pending) input.value = data.state[name];
  });
}

/** A switch. */
export function check(page, name, label, { help = "" } = {}) {
  const id = unique(name), input = h("input", { id, type: "checkbox", onchange: () => page.set({ [name]: input.checked ? 1 : 0 }) });
  const made = control(id, label, help, input, (data) => {
    input.checked = Boolean(data.state[name]);
    input.disabled = data.choices[name].length < 2;
  });
  made.node.classList.add("check");
  return made;
}

/** A switch between a few values, a button for each; `labels` gives words for values. */
export function choice(page, name, label, labels) {
  const id = unique(name);
  const buttons = Object.entries(labels).map(([value, words]) => h("button", { type: "button", dataset: { value }, onclick: () => page.set({ [name]: value }) }, words));
  const node = h("div", { class: "choice", role: "group", "aria-labelledby": id, dataset: { control: name } }, h("span", { id, class: "muted" }, label), buttons);
  const show = (data) => buttons.forEach((each) => {
    each.setAttribute("aria-pressed", String(each.dataset.value === String(data.state[name])));
    each.disabled = !data.choices[name].includes(each.dataset.value);
  });
  return { node, show };
}

/** Controls in a row; `show` passes an answer on to all of them. */
export function panel(title, ...controls) {
  const node = h("fieldset", { class: "panel" }, h("legend", {}, title), controls.map((each) => each.node));
  return { node, show: (data) => controls.forEach((each) => each.show(data)) };
}

/** The few controls that a result is asked with beside it, the rest under "More", and the result; the address has whether
 * that is open. first, more: panels. */
export function beside(page, first, more, ...nodes) {
  const rest = h("details", { class: "more", ontoggle: () => { if (rest.open !== (page.local("_more", "") === "1")) page.setLocal({ _more: rest.open ? 1 : null }); } },
    h("summary", {}, "More"), more.map((each) => each.node));
  const follow = () => { rest.open = page.local("_more", "") === "1"; };
  page.onLocal(follow);
  follow();
  return h("div", { class: "beside" }, h("div", { class: "asked" }, first.node, rest), h("div", { class: "scene" }, nodes));
}

/** Sliders for the sizes of the model; another model has its own again. */
export function sizes(page) {
  const one = (name, label) => slider(page, name, label, { typed: true });
  return panel("The model's sizes", one("layers", "Layers"), one("hidden", "Hidden"), one("ffn", "Feed-forward (ffn)"), one("heads", "Heads"));
}

export const forgetsSizes = (changes) => ("model" in changes ? ["layers", "hidden", "ffn", "heads"] : []);

function control(id, label, help, input, show) {
  const node = h("div", { class: "control", dataset: { control: id.replace(/-\d+$/, "") } },
    h("label", { for: id, title: help || null }, label), input);
  return { node, show };
}

function nearest(values, wanted) {
  let best = Math.max(0, values.map(String).indexOf(String(wanted)));
  values.forEach((value, i) => { if (Math.abs(value - wanted) < Math.abs(values[best] - wanted)) best = i; });
  return best;
}

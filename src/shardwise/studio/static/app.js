// The page: views, the address, light and dark, words explained. Everything shown is what the server computed.

import { h, unique } from "studio/lib/dom";
import { changed, inside, load } from "studio/lib/data";
import { glossary, linked } from "studio/lib/glossary";
import { asked, parse, text } from "studio/lib/state";
import { choose, chosen, restore } from "studio/lib/theme";

const MODULES = {};
const VIEWS = JSON.parse(document.getElementById("views").textContent);

const SITE = "Answers here were computed beforehand: a control without one for a combination takes the others back to their first values. "
  + "To compute any state: pip install . in a checkout of shardwise, then shardwise studio.";

restore();
const main = h("main", { id: "main", tabindex: -1 });
const message = h("p", { class: "error", role: "alert", hidden: true }), waiting = h("p", { class: "waiting", hidden: true });
const links = Object.fromEntries(VIEWS.map(({ name, title }) => [name, h("a", { href: `#${name}` }, title)]));
document.body.append(h("a", { class: "skip", href: "#main", onclick: (event) => { event.preventDefault(); main.focus(); } }, "Skip to the view"),
  header(), message, waiting, main, footer());

for (const { view, given } of inside?.views ?? []) links[view].href = text(view, given);
let page = null, dropped = null, slow = 0;
const travelling = {};
addEventListener("hashchange", open);
takeFiles();
open();

function open() {
  const { view, given } = inside && !location.hash ? inside.views[0] : parse(location.hash || `#${VIEWS[0].name}`);
  if (!VIEWS.some((each) => each.name === view)) {
    fail(`There is no view ${view}; choose one above.`);
    ready();
    return;
  }
  if (page?.view === view) page.follow(given);
  else {
    page?.close();
    page = makePage(view, given);
    page.fetch();
  }
}

function about(view) {
  return VIEWS.find((each) => each.name === view);
}

/** A file that is dropped anywhere is opened, not shown in place of the page; Runs opens files. */
function takeFiles() {
  const files = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  const over = (event, on) => {
    if (!files(event)) return;
    event.preventDefault();
    document.body.classList.toggle("dropping", on && !inside);
  };
  addEventListener("dragover", (event) => over(event, true));
  addEventListener("dragleave", (event) => { if (!event.relatedTarget) over(event, false); });
  addEventListener("drop", (event) => {
    over(event, false);
    const file = files(event) && event.dataTransfer.files[0];
    if (!file || inside) return;
    if (page?.openFile) page.openFile(file);
    else {
      dropped = file;
      location.hash = "#runs";
    }
  });
}

/** What a view is given to work with: its state, what changes it, and what must be tidied up when it closes. */
function makePage(view, given) {
  const { title, parts } = about(view), tidy = [], onLocal = [], answers = {};
  const self = { view, answers, set, setLocal, local, follow, close, fetch: fetchAll, cleanup: (f) => tidy.push(f),
    onLocal: (f) => onLocal.push(f), refuse: fail, pending: false, openFile: null, dropped: () => { const file = dropped; dropped = null; return file; } };
  let mounted = null, timer = 0, abort = null, closed = false, moved = { control: "", at: 0 };

  announce(view, title);
  travel();

  /** Model, its sizes and cluster come along to other views, as far as they were chosen here. */
  function travel() {
    for (const name of about(view).travels) if (given[name]) travelling[name] = given[name]; else delete travelling[name];
    for (const other of inside ? [] : VIEWS) links[other.name].href = text(other.name, Object.fromEntries(other.travels.filter((name) => travelling[name]).map((name) => [name, travelling[name]])));
  }

  function set(changes, soon = false) {
    given = { ...given };
    for (const [name, value] of Object.entries(changes)) given[name] = String(value);
    for (const name of MODULES[view]?.forgets?.(changes) ?? []) if (!(name in changes)) delete given[name];
    given = changed(view, given, changes);
    remember(Object.keys(changes).join());
    self.pending = true;
    clearTimeout(timer);
    busy();
    timer = setTimeout(fetchAll, soon ? 90 : 0);
  }

  /** The page's own words. control: what changes them, where Back shall undo it. */
  function setLocal(changes, control = "") {
    given = { ...given };
    for (const [name, value] of Object.entries(changes)) {
      if (value === "" || value === null) delete given[name];
      else given[name] = String(value);
    }
    remember(control);
    onLocal.forEach((f) => f());
  }

  function local(name, otherwise) {
    return given[name] ?? otherwise;
  }

  /** Into the address. A change of a control, by its name, is an entry of its own, which Back undoes; a slider's way
   * from where it was is one. */
  function remember(control = "") {
    const now = performance.now(), same = !control || (control === moved.control && now - moved.at < 1000);
    if (control) moved = { control, at: now };
    history[same ? "replaceState" : "pushState"](null, "", text(view, given));
    travel();
  }

  function follow(wanted) {
    const same = JSON.stringify(asked(wanted)) === JSON.stringify(asked(given));
    given = wanted;
    moved = { control: "", at: 0 };
    travel();
    onLocal.forEach((f) => f());
    if (!same) fetchAll();
  }

  async function fetchAll() {
    abort?.abort();
    abort = new AbortController();
    const signal = abort.signal, words = asked(given), own = abort;
    busy(() => {
      own.abort();
      ready();
    });
    try {
      MODULES[view] ??= await import(`studio/views/${view}`);
      for (const part of parts) {
        const answer = await load(part, words, signal);
        if (closed || signal.aborted) return;
        answers[part] = answer;
        message.hidden = true;
        main.classList.remove("broken", "stale");
        mounted ??= mount(MODULES[view], title, self);
        mounted.show(answer, part);
        alone(given._only);
      }
      self.pending = false;
      ready();
    } catch (error) {
      if (error.name === "AbortError" || closed) return;
      self.pending = false;
      fail(error.message, ...instead(error.message, given, set), h("a", { href: `#${view}`, onclick: anew }, "Start this view anew"));
      // What is drawn still belongs to the state before.
      if (mounted) main.classList.add("stale");
      else await offer(words, signal);
      ready();
    }
  }

  /** The controls of a state that is no good, so that it can be corrected: the view's first state with these words. */
  async function offer(words, signal) {
    try {
      const answer = await load(parts[0], {}, signal);
      if (closed) return;
      main.classList.add("broken");
      answer.state = { ...answer.state, ...words };
      mounted ??= mount(MODULES[view], title, self);
      mounted.show(answer, parts[0]);
    } catch { /* the view cannot be shown in any state: the message says why */ }
  }

  function anew(event) {
    event.preventDefault();
    close();
    page = null;
    history.replaceState(null, "", `#${view}`);
    open();
  }

  function close() {
    closed = true;
    abort?.abort();
    clearTimeout(timer);
    tidy.forEach((f) => f());
  }

  return self;
}

/** The view's name where the browser and the navigation have it, until its answer comes. */
function announce(view, title) {
  main.classList.remove("broken", "stale");
  message.hidden = true;
  document.title = `${title} · shardwise studio`;
  for (const [name, link] of Object.entries(links)) {
    if (name === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  main.replaceChildren(h("p", { class: "loading" }, "Computing…"));
}

/** Put a view's module into the page. A file that was exported has one state, which nothing changes. */
function mount(module, title, given) {
  main.replaceChildren(h("div", { class: "intro" }, h("h1", {}, title), h("p", {}, linked(module.lead)), inside?.presets ? h("p", {}, SITE) : null));
  const mounted = module.mount(main, given);
  if (inside && !inside.presets) main.querySelectorAll("fieldset.panel").forEach((each) => { each.disabled = true; });
  return mounted;
}

/** With `_only=a,b` in the address the page is these figures, or the chapter of a number: what other pages embed. */
function alone(names) {
  if (!names) return;
  for (const name of names.split(",").map((each) => CSS.escape(each))) {
    main.querySelectorAll(`[data-figure=${name}], [data-chapter="${name}"]`).forEach((each) => each.classList.add("shown"));
  }
  document.body.classList.toggle("only", Boolean(main.querySelector(".shown")));
}

/** An answer is being computed: after two seconds the page says for how long, and offers to stop. */
function busy(stop = null) {
  delete document.body.dataset.ready;
  clearInterval(slow);
  if (!stop) return;
  const began = performance.now();
  slow = setInterval(() => {
    const passed = Math.floor((performance.now() - began) / 1000);
    if (passed < 2) return;
    waiting.replaceChildren(`Computing for ${passed} s `, h("button", { type: "button", class: "small", onclick: stop }, "Cancel"));
    waiting.hidden = false;
  }, 1000);
}

/** Two frames later everything is painted: tests wait for it. */
function ready() {
  clearInterval(slow);
  waiting.hidden = true;
  requestAnimationFrame(() => requestAnimationFrame(() => { document.body.dataset.ready = location.hash || "#"; }));
}

/** Buttons that take the names which an error offers, for the word of the address that it is about. */
function instead(line, given, set) {
  const names = /did you mean ([^?;]+)\?/.exec(line)?.[1].split(/, | or /) ?? [];
  const about = Object.entries(given).find(([name, value]) => value && (line.includes(`'${value}'`) || line.includes(`${name}=${value}`)));
  return about ? names.map((each) => h("button", { type: "button", onclick: () => set({ [about[0]]: each }) }, each)) : [];
}

function fail(line, ...more) {
  message.replaceChildren(line, ...more.flatMap((node) => [" · ", node]));
  message.hidden = !line;
}

function header() {
  const id = unique("theme");
  const theme = h("select", { id, onchange: () => choose(theme.value) },
    ["system", "light", "dark"].map((each) => h("option", { value: each }, each)));
  theme.value = chosen();
  return h("header", {},
    h("div", { class: "bar" },
      h("p", { class: "name" }, "shardwise ", h("span", {}, "studio")),
      h("nav", { "aria-label": "Views" }, inside ? inside.views.map(({ view }) => links[view]) : Object.values(links)),
      h("div", { class: "tools" }, glossary(), h("label", { for: id, class: "unseen" }, "Colours"), theme)));
}

function footer() {
  const line = inside?.presets ? "Written by make site: the studio without a server. The address holds the state: copy it to share a view." : inside
    ? "Written by shardwise studio --out: one state, with everything in this file. Run shardwise studio to change it."
    : "Computed on this machine when it is shown. The address holds the state: copy it to share a view.";
  return h("footer", {}, h("p", {}, line));
}

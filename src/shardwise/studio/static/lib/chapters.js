// The chapters of a view on one stage: a few sentences at the left, the chapter's drawings at the right.

import { h, still, unique } from "studio/lib/dom";

const BUSY = "button, input, select, textarea, summary, dialog, .scroll";

/** chapters: [{nodes, play, name}]: what each one shows; the player that it begins with, if any, and its word in the
 * address. below: a node under the sentences of every chapter. entered(number): called when a chapter is come to. Space or
 * Next continues. */
export function chapterStage(page, chapters, below, entered) {
  const title = h("h2", {}), place = h("p", { class: "muted" }), sentences = h("div", { class: "sentences" });
  const previous = h("button", { type: "button", onclick: () => go(now - 1) }, "Previous");
  const next = h("button", { type: "button", class: "primary", onclick: () => go(now + 1) }, "Next");
  const marks = chapters.map((_, i) => h("button", { type: "button", class: "mark", onclick: () => go(i) }, String(i + 1)));
  const heading = unique("chapter"), scene = h("div", { class: "scene" }, [...new Set(chapters.flatMap(({ nodes }) => nodes))]);
  title.id = heading;
  const tale = h("div", { class: "tale" }, h("nav", { "aria-label": "Chapters", class: "marks" }, marks),
    h("div", { class: "row" }, previous, next, h("span", { class: "muted keys" }, "or Space")),
    h("div", { "aria-live": "polite" }, place, title, sentences), below);
  const node = h("section", { class: "stage", "aria-labelledby": heading }, tale, scene);
  let now = -1, told = [];

  function wanted() {
    const n = Math.round(Number(page.local("_chapter", 1)));
    return Math.min(Math.max(1, Number.isFinite(n) ? n : 1), chapters.length) - 1;
  }

  function go(chapter) {
    if (chapter < 0 || chapter >= chapters.length || chapter === now) return;
    page.setLocal({ _chapter: chapter ? chapter + 1 : null }, "_chapter");
  }

  /** Show the chapter of the address; one that is come to begins to play, unless its place is in the address already. */
  function follow() {
    const before = now;
    now = wanted();
    if (now === before) return;
    for (const each of scene.children) each.hidden = !chapters[now].nodes.includes(each);
    chapters.forEach(({ play }, i) => { if (i !== now) play?.pause(); });
    entered(now + 1);
    marks.forEach((mark, i) => {
      if (i === now) mark.setAttribute("aria-current", "step");
      else mark.removeAttribute("aria-current");
    });
    for (const [button, end] of [[previous, 0], [next, chapters.length - 1]]) {
      if (now === end && document.activeElement === button) (end ? previous : next).focus();
      button.disabled = now === end;
    }
    tell();
    begin();
  }

  function begin() {
    const { play, name } = chapters[now];
    if (told.length && play && !still() && page.local(name, null) === null) play.start();
  }

  function tell() {
    if (!told.length) return;
    place.textContent = `Chapter ${now + 1} of ${chapters.length}`;
    title.textContent = told[now].title;
    sentences.replaceChildren(...told[now].sentences.map((each) => h("p", {}, each)));
  }

  function keys(event) {
    if (event.key !== " " || event.ctrlKey || event.altKey || event.metaKey || event.target.closest?.(BUSY) || document.querySelector("dialog[open]")) return;
    const to = now + (event.shiftKey ? -1 : 1);
    if (to < 0 || to >= chapters.length) return;
    event.preventDefault();
    go(to);
  }

  /** lines: [{title, sentences}] of each chapter. */
  function show(lines) {
    const first = !told.length;
    told = lines;
    marks.forEach((mark, i) => {
      mark.title = lines[i].title;
      mark.setAttribute("aria-label", `Chapter ${i + 1}: ${lines[i].title}`);
    });
    tell();
    if (first) begin();
  }

  addEventListener("keydown", keys);
  page.cleanup(() => removeEventListener("keydown", keys));
  page.onLocal(follow);
  follow();
  return { node, show, get chapter() { return now + 1; } };
}

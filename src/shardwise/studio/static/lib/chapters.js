// The chapters of a view as one scroll: each has a few sentences and its drawings, and a word in the address.

import { h, still, unique } from "studio/lib/dom";
import { linked } from "studio/lib/glossary";

/** chapters: [{nodes, play, name, wide}]: what each one shows; the player that begins when it is come to, if any, and its
 * word in the address; wide: its sentences are below its drawings. `show(lines)`: [{title, sentences}] of each. */
export function chapterScroll(page, chapters) {
  const parts = chapters.map(({ nodes, wide }, i) => {
    const title = h("h2", { id: unique("chapter"), tabindex: -1 }), sentences = h("div", { class: "sentences" }), scene = h("div", { class: "scene" }, nodes);
    const node = h("section", { class: wide ? "chapter wide" : "chapter", "aria-labelledby": title.id, dataset: { chapter: i + 1 } },
      h("div", { class: "tale" }, title, sentences), scene);
    return { node, title, sentences, scene };
  });
  const marks = chapters.map((_, i) => h("button", { type: "button", class: "mark", onclick: () => go(i) }, String(i + 1)));
  const place = h("span", { class: "muted place", "aria-hidden": "true" });
  const nav = h("nav", { "aria-label": "Chapters", class: "marks" }, marks, place);
  let now = 0, told = [], settled = false, frame = 0;
  const begun = new Set();

  function wanted() {
    const n = Math.round(Number(page.local("_chapter", 1)));
    return Math.min(Math.max(1, Number.isFinite(n) ? n : 1), chapters.length) - 1;
  }

  function go(chapter) {
    page.setLocal({ _chapter: chapter ? chapter + 1 : null }, "_chapter");
    come(chapter);
    parts[chapter].title.focus({ preventScroll: true });
  }

  /** The chapter of the address, where somebody or Back has changed it. */
  function follow() {
    if (settled && wanted() !== now) come(wanted());
  }

  function come(chapter) {
    enter(chapter);
    // The first one begins with what is above it.
    scrollTo({ top: chapter ? parts[chapter].node.getBoundingClientRect().top + scrollY - nav.offsetHeight - above() : 0, behavior: "instant" });
  }

  function above() {
    const { position } = getComputedStyle(document.querySelector("header"));
    return position === "sticky" ? document.querySelector("header").offsetHeight : 0;
  }

  function enter(chapter) {
    now = chapter;
    marks.forEach((mark, i) => {
      if (i === now) mark.setAttribute("aria-current", "step");
      else mark.removeAttribute("aria-current");
    });
    place.textContent = told.length ? told[now].title : "";
    chapters.forEach(({ play }, i) => { if (i !== now) play?.pause(); });
    const { play, name } = chapters[now];
    if (settled && play && !begun.has(now) && !still() && page.local(name, null) === null) play.start();
    begun.add(now);
  }

  /** The last chapter whose top has passed a third of the window; at the page's end the last one. */
  function scrolled() {
    cancelAnimationFrame(frame);
    frame = requestAnimationFrame(() => {
      if (!settled || !nav.offsetParent) return;
      const line = innerHeight / 3, end = scrollY > 0 && innerHeight + scrollY >= document.documentElement.scrollHeight - 2;
      const passed = parts.filter(({ node }) => node.getBoundingClientRect().top <= line).length - 1;
      const at = end ? chapters.length - 1 : Math.max(0, passed);
      if (at === now) return;
      enter(at);
      page.setLocal({ _chapter: at ? at + 1 : null });
    });
  }

  function show(lines) {
    told = lines;
    const seen = new Set();
    lines.forEach(({ title, sentences }, i) => {
      marks[i].title = title;
      marks[i].setAttribute("aria-label", `Chapter ${i + 1}: ${title}`);
      parts[i].title.textContent = title;
      parts[i].sentences.replaceChildren(...sentences.map((each) => h("p", {}, linked(each, seen))));
    });
    enter(settled ? now : wanted());
  }

  /** Everything is drawn, and has its height: to the chapter of the address. */
  function settle() {
    if (settled) return;
    requestAnimationFrame(() => requestAnimationFrame(() => {
      settled = true;
      begun.delete(wanted());
      if (wanted()) come(wanted());
      else enter(0);
    }));
  }

  addEventListener("scroll", scrolled, { passive: true });
  page.cleanup(() => removeEventListener("scroll", scrolled));
  // On a narrow page the sentences pass below a drawing that leaves them room.
  const sized = new ResizeObserver((entries) => entries.forEach(({ target }) => target.classList.toggle("pinned", target.offsetHeight < innerHeight * 0.6)));
  parts.forEach(({ scene }) => sized.observe(scene));
  page.cleanup(() => sized.disconnect());
  page.onLocal(follow);
  return { nav, nodes: parts.map(({ node }) => node), show, settle };
}

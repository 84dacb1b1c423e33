// Colours for canvases, as the style sheet has them now; light, dark or the system's choice.

const palette = JSON.parse(document.getElementById("palette").textContent);
const listeners = new Set();
const STORED = "shardwise-theme";
const system = matchMedia("(prefers-color-scheme: dark)");

export const kinds = palette.kinds;

export function dark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : system.matches;
}

let read = null, readFor = "";

/** Colours by name: page, surface, ink, muted, line, grid, good, bad, accent; read again when the theme has changed. */
export function colours() {
  const now = String(dark());
  if (readFor !== now) {
    const style = getComputedStyle(document.documentElement);
    const names = ["page", "surface", "raised", "ink", "muted", "line", "grid", "good", "bad", "accent"];
    read = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    readFor = read.page ? now : "";
  }
  return read;
}

export function colourOf(kind) {
  return kinds[kind][dark() ? "dark" : "light"];
}

export function inkOn(kind) {
  return kinds[kind].white && !dark() ? "#ffffff" : "#1c1d20";
}

/** The n-th of things that are counted; the eighth and the first are told apart by what goes along. */
export function numbered(n) {
  const list = palette[dark() ? "dark" : "light"];
  return list[n % list.length];
}

export function onTheme(redraw) {
  listeners.add(redraw);
  return () => listeners.delete(redraw);
}

export function choose(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem(STORED, theme);
  } catch { /* a page from disk may have no storage */ }
  listeners.forEach((redraw) => redraw());
}

export function chosen() {
  return document.documentElement.dataset.theme ?? "system";
}

export function restore() {
  try {
    const theme = localStorage.getItem(STORED);
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch { /* as above */ }
  system.addEventListener("change", () => listeners.forEach((redraw) => redraw()));
}

const tiles = new Map();

/** A fill with the kind's hatch over its colour, for a canvas. */
export function hatched(context, kind) {
  const key = `${kind} ${dark()}`;
  if (!tiles.has(key)) {
    const tile = new OffscreenCanvas(16, 16), pen = tile.getContext("2d");
    pen.fillStyle = colourOf(kind);
    pen.fillRect(0, 0, 16, 16);
    pen.scale(2, 2);
    pen.strokeStyle = "rgba(0,0,0,.17)";
    pen.lineWidth = 1.2;
    if (kinds[kind].hatch) pen.stroke(new Path2D(kinds[kind].hatch));
    tiles.set(key, tile);
  }
  const pattern = context.createPattern(tiles.get(key), "repeat");
  pattern.setTransform(new DOMMatrix().scale(0.5));
  return pattern;
}

"""The style sheet of a report page; its colours are the custom properties of `palette.page_css`."""

PAGE_CSS = """
* { box-sizing: border-box }
html { -webkit-text-size-adjust: 100%; scroll-behavior: smooth }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}
.page { max-width: 1080px; margin: 0 auto; padding: 40px 24px 64px }
.defs { position: absolute }
header h1 {
  font-size: 30px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -.015em;
  text-wrap: balance; overflow-wrap: anywhere;
}
header p { margin: 0; color: var(--muted); max-width: 46em }
nav ol {
  list-style: none; display: flex; flex-wrap: wrap; gap: 6px 18px;
  margin: 18px 0 0; padding: 0; font-size: 14px;
}
a { color: var(--accent); text-underline-offset: 3px }
section:not(.bare) {
  background: var(--surface); border: 1px solid var(--line); border-radius: 12px;
  padding: 24px 26px 26px;
}
section { margin-top: 22px }
h2 { font-size: 20px; line-height: 1.3; margin: 0 0 4px; letter-spacing: -.01em; scroll-margin-top: 16px }
h3 { font-size: 15px; margin: 26px 0 8px }
.lead { margin: 0 0 18px; color: var(--muted); max-width: 62em }
.note { font-size: 14px; color: var(--muted); margin: 10px 0 0 }
.unseen {
  position: absolute; width: 1px; height: 1px; overflow: hidden;
  clip-path: inset(50%); white-space: nowrap;
}
.good { color: var(--good) }
.bad { color: var(--bad); font-weight: 600 }
.strong { font-weight: 650 }

.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: 14px; margin: 0 }
.card { background: var(--surface); border: 1px solid var(--line); border-radius: 12px; padding: 18px 20px }
.card dt { font-size: 13px; color: var(--muted) }
.card dd {
  margin: 2px 0 0; font-size: 24px; line-height: 1.25; font-weight: 650;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere;
}
.card dd.detail { font-size: 13px; font-weight: 400; color: var(--muted); line-height: 1.45; margin-top: 4px }

.facts { display: grid; grid-template-columns: max-content 1fr; gap: 8px 24px; margin: 14px 0 0 }
.facts dt { color: var(--muted) }
.facts dd { margin: 0; overflow-wrap: anywhere }
code, .chip { font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace }
.chip {
  display: inline-block; background: var(--raised); border: 1px solid var(--line); border-radius: 5px;
  padding: 0 7px; margin: 1px 5px 1px 0;
}

figure { margin: 0 0 20px }
.legend {
  list-style: none; display: flex; flex-wrap: wrap; gap: 6px 20px;
  margin: 0 0 12px; padding: 0; font-size: 13px; color: var(--muted);
}
.legend li { display: flex; align-items: center; gap: 7px }
.bars {
  display: grid; column-gap: 14px; align-items: center;
  grid-template-columns: minmax(96px, max-content) minmax(0, 1fr) minmax(72px, max-content);
}
.bars .name { font-size: 14px; line-height: 1.25; text-align: right; overflow-wrap: anywhere; max-width: 230px }
.bars .again { display: none }
.bars small { display: block; color: var(--muted); font-size: 12px }
.bars .total { font-size: 14px; font-variant-numeric: tabular-nums; white-space: nowrap }
.bars svg { display: block; overflow: visible }
.bars .apart { grid-column: 1 / -1; height: 12px }
.lines { display: block; overflow: visible }
.plot { padding: 10px 10px 0 52px }
.dot { stroke: var(--surface); stroke-width: 1.5 }
.target { fill: transparent }
.target:hover { fill: var(--accent); fill-opacity: .35 }

.scroll { overflow-x: auto; margin: 0 -26px; padding: 0 26px; position: relative }
.scroll:focus-visible, summary:focus-visible, a:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px }
table { border-collapse: collapse; width: 100%; font-size: 14px; line-height: 1.4 }
th, td {
  text-align: left; padding: 6px 14px 6px 0; border-bottom: 1px solid var(--line);
  vertical-align: baseline; font-weight: 400; white-space: nowrap;
}
thead th { font-size: 12.5px; color: var(--muted); border-bottom-color: var(--muted) }
tbody tr:last-child > * { border-bottom-color: transparent }
.n { text-align: right; font-variant-numeric: tabular-nums; padding-left: 14px; padding-right: 0 }
.n + td:not(.n), .n + th:not(.n) { padding-left: 22px }
tr.apart > * { border-top: 2px solid var(--line) }
.again { color: transparent }
tr > :last-child { padding-right: 0 }
details { margin-top: 12px }
summary { cursor: pointer; color: var(--accent); font-size: 14px; margin-bottom: 8px }
footer { color: var(--muted); font-size: 13px; margin-top: 22px }

@media (max-width: 680px) {
  .page { padding: 24px 12px 40px }
  section:not(.bare) { padding: 18px 16px 20px }
  .scroll { margin: 0 -16px; padding: 0 16px }
  header h1 { font-size: 25px }
  .facts { grid-template-columns: 1fr; gap: 0 }
  .facts dd { margin-bottom: 9px }
  .bars { grid-template-columns: minmax(0, 1fr) minmax(64px, max-content) }
  .bars .name { grid-column: 1 / -1; text-align: left; max-width: none; margin-top: 4px }
  .bars small { display: inline; margin-left: 7px }
  .bars .again + small { margin-left: 0 }
  .bars .corner, .sparse { display: none }
}
@media (prefers-reduced-motion: reduce) { html { scroll-behavior: auto } }
@media print {
  body { background: none }
  section { break-inside: avoid-page }
}
"""

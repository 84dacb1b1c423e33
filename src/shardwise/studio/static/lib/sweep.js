// A cursor that sweeps over rows of events on one clock: positions are proportional to time.

import { line, scale } from "studio/lib/axes";
import { h } from "studio/lib/dom";
import { figure } from "studio/lib/figure";
import { seconds } from "studio/lib/format";
import { drawGantt, eventAt, ganttHeight, prepare, RIGHT, rowHeight, TOP } from "studio/lib/gantt";
import { swatches } from "studio/lib/legend";
import { player } from "studio/lib/player";
import { colours } from "studio/lib/theme";

const LEFT = 100;

/** name: of the figure; word: in the address; pace: seconds a step; each: rows of a strategy. The last step is shown
 * first. `set(answer, drawn)`: rows, columns, kinds, names, span and sentences. */
export function sweepFigure(page, { name, word, title, pace, each }) {
  let data = null, events = null, at = 0;
  const play = player(page, { name: word, label: "Time", seconds: pace, onFrame: (position) => { at = position; self.redraw(); } });
  const keys = h("ul", { class: "legend" });
  const self = figure(page, { name, title, above: [play.node], extras: [keys], height: () => (events ? ganttHeight(events.rows) : 100),
    draw: (context, width) => events && draw(context, width, data, events, at / (data.sentences.length - 1), each),
    hover: (x, y) => {
      const i = events ? eventAt(events, [0, data.span], self.canvas.clientWidth, x, y) : -1;
      return i < 0 ? "" : `${data.names[data.columns.name[i]]}\nfrom ${seconds(data.columns.start[i])}, takes ${seconds(data.columns.seconds[i])}`;
    } });

  function set(answer, drawn) {
    data = drawn;
    events = prepare(data.columns, data.rows.length, data.kinds);
    events.name = (i) => data.names[data.columns.name[i]].replace("layer ", "");
    events.left = LEFT;
    keys.replaceChildren(...swatches([...new Set(data.columns.kind)].sort().map((kind) => data.kinds[kind])));
    self.show(answer);
    play.show(data.sentences, Number(page.local(word, data.sentences.length - 1)));
    self.describe(data.sentences[data.sentences.length - 1]);
  }

  return { ...self, set, play };
}

function draw(context, width, data, events, share, each) {
  const theme = colours(), bottom = TOP + events.rows * rowHeight(events.rows), left = Math.min(LEFT, width * 0.35);
  drawGantt(context, width, events, [0, data.span], { labels: (row) => data.rows[row] });
  const x = scale(0, 1, left, width - RIGHT)(share);
  context.fillStyle = theme.surface;
  context.globalAlpha = 0.8;
  context.fillRect(x, TOP, width - RIGHT - x, bottom - TOP);
  context.globalAlpha = 1;
  context.strokeStyle = theme.line;
  for (let row = each; row < events.rows; row += each) line(context, 0, TOP + row * rowHeight(events.rows) - 1, width - RIGHT, TOP + row * rowHeight(events.rows) - 1);
  context.strokeStyle = theme.ink;
  context.lineWidth = 2;
  if (share < 1) line(context, x, TOP, x, bottom);
  context.lineWidth = 1;
}

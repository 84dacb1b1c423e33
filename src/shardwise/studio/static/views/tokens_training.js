// Why training is different: the same gather beside a layer's arithmetic for many tokens, and for one.

import { bars, barsHeight } from "studio/lib/bars";
import { line, scale } from "studio/lib/axes";
import { h } from "studio/lib/dom";
import { figure } from "studio/lib/figure";
import { seconds } from "studio/lib/format";
import { drawGantt, eventAt, ganttHeight, prepare, RIGHT, rowHeight, TOP } from "studio/lib/gantt";
import { swatches } from "studio/lib/legend";
import { player } from "studio/lib/player";
import { colours } from "studio/lib/theme";

const LEFT = 100;

/** A token's, a forward and a backward pass of each strategy from the same moment on; a cursor sweeps over all of them. */
export function trainingFigure(page) {
  let data = null, events = null, at = 0;
  const play = player(page, { name: "_train", label: "Time", seconds: 0.25, onFrame: (position) => { at = position; self.redraw(); } });
  const keys = h("ul", { class: "legend" }, swatches(["forward", "backward", "communication"]).map((item, i) => {
    item.lastChild.textContent = ["arithmetic of a token, or forward", "arithmetic backward", "gathers, sums and reduce-scatters"][i];
    return item;
  }));
  const self = figure(page, { name: "trained", title: "The same layers for one token and in training", extras: [keys, play.node], height: () => (events ? ganttHeight(events.rows) : 100),
    draw: (context, width) => events && draw(context, width, data, events, at / data.sentences.slice(1).length),
    hover: (x, y) => {
      const i = events ? eventAt(events, [0, data.span], self.canvas.clientWidth, x, y) : -1;
      return i < 0 ? "" : `${events.name(i)}\nfrom ${seconds(data.columns.start[i])}, takes ${seconds(data.columns.seconds[i])}`;
    } });

  function set(answer) {
    data = answer.more.trained;
    events = prepare(data.columns, data.rows.length, data.kinds);
    events.name = (i) => data.names[data.columns.name[i]].replace("layer ", "");
    events.left = LEFT;
    play.show(data.sentences, Number(page.local("_train", data.sentences.length - 1)));
    self.note.textContent = hidden(answer);
    self.show(answer);
    self.describe(data.sentences[data.sentences.length - 1]);
  }

  return { ...self, set, play };
}

function draw(context, width, data, events, share) {
  const theme = colours(), bottom = TOP + events.rows * rowHeight(events.rows), left = Math.min(LEFT, width * 0.35);
  drawGantt(context, width, events, [0, data.span], { labels: (row) => data.rows[row] });
  const x = scale(0, 1, left, width - RIGHT)(share);
  context.fillStyle = theme.surface;
  context.globalAlpha = 0.8;
  context.fillRect(x, TOP, width - RIGHT - x, bottom - TOP);
  context.globalAlpha = 1;
  context.strokeStyle = theme.line;
  // Between the strategies.
  for (let row = 6; row < events.rows; row += 6) line(context, 0, TOP + row * rowHeight(events.rows) - 1, width - RIGHT, TOP + row * rowHeight(events.rows) - 1);
  context.strokeStyle = theme.ink;
  context.lineWidth = 2;
  if (share < 1) line(context, x, TOP, x, bottom);
  context.lineWidth = 1;
}

/** Whether a gather hides behind the block before it in training. */
function hidden({ tables }) {
  const t = tables.trained.columns, gathering = t["its gather takes"].findIndex((v) => v > 0);
  if (gathering < 0) return "In training 8,192 tokens a device share every matrix.";
  const computes = t["one block computes"][gathering], gather = t["its gather takes"][gathering];
  return `With 8,192 tokens a device the block before computes ${seconds(computes)}: a gather of ${seconds(gather)} ${gather <= computes ? "hides behind it" : "does not hide behind it"}. With one token there is nothing to hide behind.`;
}

/** What a token's and a training step's time goes to under each strategy. */
export function sharesFigure(page) {
  let data = null;
  const self = figure(page, { name: "shares", title: "Shares of the time", height: () => barsHeight(data ? data.tables.shares.columns.of.length : 4),
    extras: [h("ul", { class: "legend" }, swatches(["forward", "communication", "rest"]).map((item, i) => {
      item.lastChild.textContent = ["computes", "moves data that nothing hides", "waits: bubbles, the host"][i];
      return item;
    }))],
    draw: (context, width) => data && bars(context, width, rows(data), { unit: "share", left: 170 }) });
  const show = self.show;

  self.show = (answer) => {
    data = answer;
    show(answer);
    const { columns } = answer.tables.shares;
    self.describe(`Bars: ${columns.of.map((of, i) => `${columns.strategy[i]}, ${of}: moves data for ${Math.round(100 * columns["moves data"][i])}%`).join("; ")}.`);
  };
  return self;
}

function rows({ tables }) {
  const { columns } = tables.shares, half = columns.of.length / 2;
  return columns.of.map((of, i) => ({ label: `${"AB"[i % half]}: ${columns.strategy[i]}`, detail: of, total: 1,
    parts: [["forward", columns.computes[i]], ["communication", columns["moves data"][i]], ["rest", columns.waits[i]]], words: `takes ${seconds(columns.takes[i])}` }));
}

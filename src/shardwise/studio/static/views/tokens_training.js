// Why training is different: one pass of more and more tokens, what a step's time goes to, and what ZeRO is for.

import { bars, barsHeight } from "studio/lib/bars";
import { slider } from "studio/lib/controls";
import { h } from "studio/lib/dom";
import { figure } from "studio/lib/figure";
import { seconds } from "studio/lib/format";
import { legend, lines } from "studio/lib/lines";
import { swatches } from "studio/lib/legend";
import { player } from "studio/lib/player";

/** Seconds of a pass over its tokens, on one slider from 1 to 65,536, with the point where the strategies meet. */
export function flipFigure(page) {
  let data = null, at = 0;
  const play = player(page, { name: "_tokens", label: "Tokens of one pass", seconds: 0.5, onFrame: (position) => { at = Math.round(position); self.redraw(); } });
  const keys = h("ul", { class: "legend" });
  const self = figure(page, { name: "flip", title: "From one token to a training batch", above: [play.node], extras: [keys], height: 290,
    draw: (context, width, height) => data && lines(context, width, height, series(data), { logX: true, logY: true, xUnit: "", yUnit: "seconds", xName: "tokens in one pass, over all devices", yName: "time of a pass", marks: marks(data, at) }) });

  function set(answer) {
    data = answer;
    self.show(answer);
    play.show(answer.more.flip, Number(page.local("_tokens", 0)));
    keys.replaceChildren(...legend(series(answer)));
    self.describe(`Lines: time of a pass of 1 to 65,536 tokens. ${answer.more.flip[answer.more.flip.length - 1]}`);
  }

  return { ...self, set, play };
}

function series({ tables, more }) {
  const { columns } = tables.flip;
  return more.sides.map(({ layout }, n) => ({ name: `${"AB"[n]}: ${layout}`, n, strong: true, points: columns["tokens of a pass"].map((tokens, i) => [tokens, columns[`${"AB"[n]} takes`][i]]) }));
}

function marks({ tables, more }, at) {
  const tokens = tables.flip.columns["tokens of a pass"][at], meets = more.ratios[0]?.faster_from_tokens;
  return [[tokens, ""], ...(meets ? [[meets, `equal at ${meets.toLocaleString("en-US")} tokens`]] : [])];
}

/** What a token's and a training step's time goes to under each strategy. */
export function sharesFigure(page) {
  let data = null;
  const names = { forward: "computes", communication: "moves data that nothing hides", rest: "waits: bubbles, the host" };
  const self = figure(page, { name: "shares", title: "Shares of the time", height: () => barsHeight(data ? data.tables.shares.columns.of.length : 4),
    extras: [h("ul", { class: "legend" }, swatches(Object.keys(names)).map((item, i) => {
      item.lastChild.textContent = Object.values(names)[i];
      return item;
    }))],
    draw: (context, width) => data && bars(context, width, rows(data), { unit: "share", left: 210, names }) });
  const show = self.show;

  self.show = (answer) => {
    data = answer;
    show(answer);
    const { columns } = answer.tables.shares;
    self.describe(`Bars: ${columns.of.map((of, i) => `${columns.strategy[i]}, ${of}: moves data for ${Math.round(100 * columns["moves data"][i])}%`).join("; ")}.`);
  };
  return self;
}

function rows({ tables, more }) {
  const { columns } = tables.shares, half = columns.of.length / 2;
  return columns.of.map((of, i) => {
    const fits = more.sides[i % half][i < half ? "fits" : "trains"], bad = fits.startsWith("does not");
    return { label: `${"AB"[i % half]}: ${columns.strategy[i]}`, detail: bad ? `${of}, does not fit` : of, total: 1, bad,
      parts: [["forward", columns.computes[i]], ["communication", columns["moves data"][i]], ["rest", columns.waits[i]]], words: `takes ${seconds(columns.takes[i])}` };
  });
}

const STATES = [["parameters", "weights"], ["gradients", "gradients"], ["optimizer", "optimizer state"]];

/** Bytes of the training states under each stage of ZeRO, on as many devices as a slider says. */
export function zeroFigure(page) {
  let data = null, stage = 3;
  const play = player(page, { name: "_stage", label: "Stage of ZeRO", seconds: 1.6, onFrame: (at) => { stage = Math.round(at); self.redraw(); } });
  const devices = slider(page, "gpus", "Devices in training");
  const self = figure(page, { name: "zero", title: "16 bytes for each weight, shared out", above: [h("div", { class: "row" }, devices.node), play.node],
    extras: [h("ul", { class: "legend" }, swatches(STATES.map(([kind]) => kind)))], height: barsHeight(4),
    draw: (context, width) => data && bars(context, width, zeroRows(data, stage), { unit: "bytes", left: 150, limit: data.more.capacity, limitName: "a device", cut: 20 }) });

  function set(answer) {
    data = answer;
    devices.show(answer);
    self.show(answer);
    play.show(answer.more.zero, Number(page.local("_stage", 3)));
    self.describe(answer.more.zero.join(" "));
  }

  return { ...self, set, play };
}

function zeroRows({ tables }, stage) {
  const { columns } = tables.zero;
  return columns.stage.map((n, i) => ({ label: `${n === stage ? "▸ " : ""}stage ${n}`, detail: ["nothing shared", "optimizer state", "and gradients", "and weights"][n], total: columns["in all"][i], bad: columns.fits[i] === false, good: columns.fits[i] === true,
    parts: STATES.map(([kind, name]) => [kind, columns[name][i]]) }));
}

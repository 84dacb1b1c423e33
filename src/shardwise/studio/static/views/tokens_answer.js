// Token by token: a slider over the answer, what both strategies have sent and needed up to there, as areas and curves.

import { h } from "studio/lib/dom";
import { figure } from "studio/lib/figure";
import { bytes, count, seconds } from "studio/lib/format";
import { legend, lines } from "studio/lib/lines";
import { player } from "studio/lib/player";
import { colourOf, colours } from "studio/lib/theme";

const AREA = 160, HEAD = 22, CURVES = 230, ROOM = 118;

/** The figure; `set` shows another answer. All tokens' values are there at once: the slider asks the server nothing. */
export function answerFigure(page) {
  let answer = null, data = null, curves = [], token = 0, drawn = "";
  const odometers = h("dl", { class: "facts odometers lanes" });
  const play = player(page, { name: "_token", label: "Tokens of the answer", seconds: 0.04, onFrame: (at) => {
    token = Math.round(at);
    show();
  } });
  const log = h("input", { type: "checkbox", onchange: () => page.setLocal({ _log: log.checked ? 1 : null }) });
  const scale = () => { log.checked = page.local("_log", "") === "1"; self.redraw(); };
  const keys = h("ul", { class: "legend" });
  const self = figure(page, { name: "spent", title: "What the answer costs, token by token", above: [play.node, odometers],
    extras: [keys, h("label", { class: "local" }, log, "Logarithmic scale")], height: HEAD + AREA + 34 + CURVES,
    draw: (context, width) => answer && draw(context, width, answer, data, curves, token, log.checked) });
  page.onLocal(scale);

  function show() {
    if (!answer || drawn === String(token)) return;
    drawn = String(token);
    sides(data).forEach(({ sent, time }, i) => {
      const [big, small] = odometers.children[i].querySelectorAll("dd > span, dd > small");
      big.textContent = seconds(token ? time(answer)[token - 1] : 0);
      small.textContent = `${bytes(token ? sent(answer)[token - 1] : 0)} sent by each device`;
    });
    self.redraw();
  }

  function set(given, first) {
    [answer, data, drawn] = [given, first, ""];
    curves = sides(data).map(({ name, time }, n) => ({ name, n, strong: true, points: time(answer).map((each, i) => [i + 1, each]) }));
    odometers.replaceChildren(...sides(data).map(({ name }, i) => h("div", {}, h("dt", {}, name), h("dd", {}, h("span", {}), h("small", {})))));
    const told = sentences(answer, data);
    play.show(told, Number(page.local("_token", answer.state.output)));
    self.show(given);
    self.describe(`Areas: bytes of every layer and token. Lines: seconds that the answer has taken after each token. ${told[answer.state.output]}`);
    keys.replaceChildren(...legend(curves));
    scale();
  }

  return { ...self, set, play };
}

/** Name and columns of each strategy. */
function sides(data) {
  const column = (i, what) => ({ tables }) => tables.spent.columns[`${"AB"[i]} ${what} so far`];
  return data.more.sides.map(({ layout }, i) => ({ name: `${"AB"[i]}: ${layout}`, sent: column(i, "sent"), time: column(i, "time") }));
}

function sentences(answer, data) {
  const each = sides(data).map(({ sent, time }, k) => [`each device of ${"AB"[k]} has sent `, sent(answer), time(answer)]);
  const many = data.more.batch === 1 ? "" : ` of each of ${count(data.more.batch)} sequences`;
  return ["No token yet: the prompt has been read.", ...answer.tables.spent.columns.token.map((n, i) =>
    `After ${n} token${n === 1 ? "" : "s"}${many}: ${each.map(([words, sent, time]) => `${words}${bytes(sent[i])} and taken ${seconds(time[i])}`).join("; ")}.`)];
}

function draw(context, width, answer, data, curves, token, logY) {
  const under = areas(context, width, answer, data, token);
  context.save();
  context.translate(0, HEAD + AREA + 34);
  const near = drawCurves(context, width, CURVES, answer, data, curves, token, logY);
  context.restore();
  return (x, y) => (y < HEAD + AREA + 20 ? under(x, y) : near?.(x, y - HEAD - AREA - 34) ?? "");
}

/** A column for each token, a row for each layer: the bytes of the strategy that sends more; the other one's beside it, on
 * the same scale. */
function areas(context, width, answer, data, token) {
  const theme = colours(), all = data.more.sides, more = all.length > 1 && all[1].layer_bytes > all[0].layer_bytes ? 1 : 0, less = 1 - more;
  const { layers } = data.more, tokens = Math.max(answer.state.output, token), wide = (width - ROOM) / tokens, high = AREA / layers;
  const side = Math.sqrt((wide * high * layers * token * (all[less]?.layer_bytes ?? 0)) / (all[more].layer_bytes || 1));
  context.textAlign = "left";
  context.fillStyle = theme.ink;
  context.fillText(`${"AB"[more]}: ${layers} layers high, ${tokens.toLocaleString("en-US")} tokens wide; its layers have sent ${bytes(token * layers * all[more].layer_bytes)} from each device`, 0, 8, width);
  context.fillStyle = theme.raised;
  context.fillRect(0, HEAD, width - ROOM, AREA);
  context.fillStyle = colourOf("ab"[more]);
  context.fillRect(0, HEAD, token * wide, AREA);
  context.fillStyle = theme.surface;
  if (wide > 5) for (let i = 1; i < token; i++) context.fillRect(i * wide - 0.5, HEAD, 0.5, AREA);
  context.strokeStyle = theme.line;
  context.strokeRect(0.5, HEAD + 0.5, width - ROOM - 1, AREA - 1);
  if (!all[less]) return () => "";
  context.fillStyle = colourOf("ab"[less]);
  context.fillRect(width - ROOM + 12, HEAD, Math.min(side, ROOM - 12), side > ROOM - 12 ? (side * side) / (ROOM - 12) : side);
  context.fillStyle = theme.ink;
  [`${"AB"[less]}: ${bytes(token * layers * all[less].layer_bytes)}`, "on the same scale"].forEach((words, i) => context.fillText(words, width - ROOM + 12, HEAD + Math.min(side, AREA - 40) + 14 + 16 * i, ROOM - 12));
  return (x, y) => {
    if (y < HEAD) return "";
    if (x < width - ROOM) return `${"AB"[more]}: token ${Math.min(tokens, Math.floor(x / wide) + 1)}, layer ${Math.min(layers, Math.floor((y - HEAD) / high) + 1)}\n${bytes(all[more].layer_bytes)} sent by each device`;
    return `${"AB"[less]}: ${bytes(all[less].layer_bytes)} for a layer and a token\nall of them on the same scale of area`;
  };
}

/** The curves up to each side's token, on axes that hold the longest answer. */
function drawCurves(context, width, height, answer, data, curves, token, logY) {
  const all = curves.flatMap(({ points }) => [points[0], points[points.length - 1]]), times = all.map(([, time]) => time);
  const corners = [[1, Math.min(...times)], [all[1][0], Math.max(...times)]].map((point) => ({ name: "", bound: true, points: [point] }));
  const upTo = curves.map((each) => ({ ...each, points: [...(logY ? [] : [[0, 0]]), ...each.points.slice(0, logY ? Math.max(1, token) : token)] }));
  return lines(context, width, height, [...upTo, ...corners],
    { yUnit: "seconds", logY, xName: data.more.batch === 1 ? "tokens of the answer" : "tokens of each answer", yName: "time so far", marks: [[token, `${token}`]] });
}

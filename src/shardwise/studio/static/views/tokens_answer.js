// Token by token: a slider over the answer, what both strategies have sent and needed up to there, and their curves.

import { h } from "studio/lib/dom";
import { figure } from "studio/lib/figure";
import { bytes, count, seconds } from "studio/lib/format";
import { legend, lines } from "studio/lib/lines";
import { player } from "studio/lib/player";

/** The figure; `set` shows another answer. All tokens' values are there at once: the slider asks the server nothing. */
export function answerFigure(page) {
  let answer = null, data = null, curves = [], token = 0, drawn = -1;
  const odometers = h("dl", { class: "facts odometers" });
  const play = player(page, { name: "_token", label: "Tokens of the answer", seconds: 0.04, onFrame: (at) => { token = Math.round(at); show(); } });
  const log = h("input", { type: "checkbox", onchange: () => page.setLocal({ _log: log.checked ? 1 : null }) });
  const scale = () => { log.checked = page.local("_log", "") === "1"; self.redraw(); };
  const keys = h("ul", { class: "legend" });
  const self = figure(page, { name: "spent", title: "Token by token", above: [play.node, odometers, h("label", { class: "local" }, log, "Logarithmic scale")], extras: [keys], height: 270,
    draw: (context, width, height) => answer && draw(context, width, height, answer, data, curves, token, log.checked) });
  page.onLocal(scale);

  function show() {
    if (!answer || drawn === token) return;
    drawn = token;
    odometers.replaceChildren(...sides(data).map(({ name, sent, time }) => h("div", {}, h("dt", {}, name),
      h("dd", {}, seconds(token ? time(answer)[token - 1] : 0), h("small", {}, `${bytes(token ? sent(answer)[token - 1] : 0)} sent by each device`)))));
    self.redraw();
  }

  function set(given, first) {
    [answer, data, drawn] = [given, first, -1];
    curves = sides(data).map(({ name, time }, n) => ({ name, n, strong: true, points: time(answer).map((each, i) => [i + 1, each]) }));
    const told = sentences(answer, data);
    play.show(told, Number(page.local("_token", answer.state.output)));
    self.show(given);
    self.describe(`Lines: seconds that the answer has taken after each token. ${told[answer.state.output]}`);
    keys.replaceChildren(...legend(curves));
    scale();
  }

  return { ...self, set };
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

/** The curves up to a token, on axes that hold the longest answer. */
function draw(context, width, height, answer, data, curves, token, logY) {
  const all = curves.flatMap(({ points }) => [points[0], points[points.length - 1]]), times = all.map(([, time]) => time);
  const corners = [[1, Math.min(...times)], [all[1][0], Math.max(...times)]].map((point) => ({ name: "", bound: true, points: [point] }));
  const upTo = curves.map((each) => ({ ...each, points: [...(logY ? [] : [[0, 0]]), ...each.points.slice(0, Math.max(1, token))] }));
  return lines(context, width, height, [...upTo, ...corners],
    { yUnit: "seconds", logY, xName: data.more.batch === 1 ? "tokens of the answer" : "tokens of each answer", yName: "time so far", marks: [[token, `${token}`]] });
}

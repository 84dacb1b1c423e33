// Token by token: a slider over the answer, what both strategies have sent and needed up to there, and their curves.

import { h } from "studio/lib/dom";
import { figure } from "studio/lib/figure";
import { bytes, count, seconds } from "studio/lib/format";
import { legend, lines } from "studio/lib/lines";
import { player } from "studio/lib/player";
import { race } from "studio/views/tokens_race";

/** The figure; `set` shows another answer. All tokens' values are there at once: the slider asks the server nothing. */
export function answerFigure(page) {
  let answer = null, data = null, curves = [], token = 0, drawn = "", leaving = false;
  const odometers = h("dl", { class: "facts odometers lanes" });
  const play = player(page, { name: "_token", label: "Tokens of the answer", seconds: 0.04, onFrame: (at) => {
    token = Math.round(at);
    if (!leaving) written.leave();
    show();
  } });
  const written = race(show, () => {
    leaving = true;
    play.pause();
    leaving = false;
  });
  const log = h("input", { type: "checkbox", onchange: () => page.setLocal({ _log: log.checked ? 1 : null }) });
  const scale = () => { log.checked = page.local("_log", "") === "1"; self.redraw(); };
  const words = h("div", { class: "lanes" }), keys = h("ul", { class: "legend" });
  const self = figure(page, { name: "spent", title: "Token by token", above: [play.node, odometers, h("label", { class: "local" }, log, "Logarithmic scale")],
    extras: [keys, h("div", { class: "row race" }, ...written.controls), words], height: 220,
    draw: (context, width, height) => answer && draw(context, width, height, answer, data, curves, tokens(), log.checked) });
  page.onLocal(scale);

  /** Tokens that each side has: those of the slider, or in a race as many as each has written. */
  function tokens() {
    return sides(data).map((_, i) => written.count(i) ?? token);
  }

  function show() {
    if (!answer) return;
    const now = tokens(), clock = written.seconds();
    if (clock !== null) play.say(`${clock} s after the prompt: ${sides(data).map((_, i) => `${"AB"[i]} has written ${written.count(i, clock)} of ${answer.state.output} tokens`).join(", ")}.`);
    if (drawn === now.join()) return;
    drawn = now.join();
    sides(data).forEach(({ sent, time }, i) => {
      const [big, small] = odometers.children[i].querySelectorAll("dd > span, dd > small");
      big.textContent = seconds(now[i] ? time(answer)[now[i] - 1] : 0);
      small.textContent = `${bytes(now[i] ? sent(answer)[now[i] - 1] : 0)} sent by each device`;
      written.write(i, now[i]);
    });
    self.redraw();
  }

  function set(given, first) {
    [answer, data, drawn] = [given, first, ""];
    curves = sides(data).map(({ name, time }, n) => ({ name, n, strong: true, points: time(answer).map((each, i) => [i + 1, each]) }));
    odometers.replaceChildren(...sides(data).map(({ name }, i) => h("div", {}, h("dt", {}, name), h("dd", {}, h("span", {}), h("small", {})))));
    words.replaceChildren(...sides(data).map((_, i) => written.boxes[i]));
    written.set(sides(data).map(({ time }) => time(answer)), answer.state.output);
    const told = sentences(answer, data);
    play.show(told, Number(page.local("_token", answer.state.output)));
    self.show(given);
    self.describe(`Lines: seconds that the answer has taken after each token. ${told[answer.state.output]}`);
    keys.replaceChildren(...legend(curves));
    scale();
  }

  const both = { start: written.start, pause: () => { play.pause(); written.pause(); } };
  return { ...self, set, play: both };
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

/** The curves up to each side's token, on axes that hold the longest answer. */
function draw(context, width, height, answer, data, curves, tokens, logY) {
  const all = curves.flatMap(({ points }) => [points[0], points[points.length - 1]]), times = all.map(([, time]) => time);
  const corners = [[1, Math.min(...times)], [all[1][0], Math.max(...times)]].map((point) => ({ name: "", bound: true, points: [point] }));
  const upTo = curves.map((each, i) => ({ ...each, points: [...(logY ? [] : [[0, 0]]), ...each.points.slice(0, Math.max(1, tokens[i]))] }));
  return lines(context, width, height, [...upTo, ...corners],
    { yUnit: "seconds", logY, xName: data.more.batch === 1 ? "tokens of the answer" : "tokens of each answer", yName: "time so far", marks: [...new Set(tokens)].map((each) => [each, `${each}`]) });
}

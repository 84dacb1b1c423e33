// Answers from the server, from inside an exported page, or from the files of a static site. Long columns come packed as
// base64.

import { h } from "studio/lib/dom";
import { asked, text } from "studio/lib/state";

const embedded = document.getElementById("embedded");
export const inside = embedded ? JSON.parse(embedded.textContent) : null;

/** A site's states by view, the first one first. asked: words that led to it, state: all of them. */
const presets = Object.fromEntries(Object.entries(inside?.presets ?? {}).map(([view, states]) => [view,
  states.map(({ asked, state }, i) => ({ asked, state: { ...states[0].state, ...state }, file: `${view}-${i}` }))]));

function preset(view, given) {
  return presets[view].find(({ asked, state }) => asked.every((name) => name in given) && Object.entries(given).every(([name, value]) => same(state[name], value)));
}

function same(value, word) {
  return String(typeof value === "boolean" ? Number(value) : value) === String(word);
}

/** The words after a change: all of them, or on a site that has an answer to the changed ones alone, these. */
export function changed(view, given, changes) {
  if (!inside?.presets || preset(view, asked(given))) return given;
  const alone = Object.fromEntries(Object.entries(given).filter(([name]) => name.startsWith("_") || name in changes));
  return preset(view, asked(alone)) ? alone : given;
}

/** A site's answer; its choices are the values that lead to another one. */
async function stored(name, given) {
  const view = name.split("/")[0], found = preset(view, given);
  if (!found) throw new Error(`this site has no answer to that: run shardwise studio --view "${text(view, given).slice(1)}"`);
  const source = `answers/${found.file}.js`;
  if (!globalThis.answers?.[found.file]) {
    await new Promise((done, failed) => document.head.append(h("script", { src: source, onload: done, onerror: () => failed(new Error(`${source} is missing`)) })));
  }
  const packed = Uint8Array.from(atob(globalThis.answers[found.file]), (letter) => letter.charCodeAt(0));
  const all = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"))).json(), answer = unpack(all[name]);
  for (const [choice, values] of Object.entries(answer.choices)) {
    // The slider of devices is one over clusters.
    const word = choice === "devices" ? "cluster" : choice, here = (value) => same(found.state[word], value);
    // Beside what is given where that goes, so that a slider on its way takes no other control back.
    const beside = values.filter((value) => here(value) || preset(view, { ...given, [word]: value }));
    answer.choices[choice] = beside.length > 1 ? beside : values.filter((value) => here(value) || preset(view, { [word]: value }));
  }
  return answer;
}

/** One answer. Throws an Error with the server's one line. */
export async function load(name, given, signal) {
  if (inside?.presets) return stored(name, given);
  if (inside) {
    if (!inside.answers[name]) throw new Error("this file has no such view: run shardwise studio for it");
    return unpack(structuredClone(inside.answers[name]));
  }
  const words = new URLSearchParams(given).toString();
  return receive(await reach(`/api/${name}${words ? `?${words}` : ""}`, { signal }));
}

/** The contents of a file that was dropped on the page, as the server reads them. */
export async function send(file) {
  return receive(await reach("/api/open", { method: "POST", body: file, headers: { "X-Studio": "open" } }));
}

async function reach(address, options) {
  try {
    return await fetch(address, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("the server does not answer: is shardwise studio still running?");
  }
}

async function receive(response) {
  const data = await response.json();
  if (!response.ok) throw new Error(data.error);
  return unpack(data);
}

const KINDS = { f8: Float64Array, f4: Float32Array, i4: Int32Array, u4: Uint32Array, u2: Uint16Array, u1: Uint8Array, i8: BigInt64Array };

function unpack(value) {
  if (Array.isArray(value)) return typeof value[0] === "object" ? value.map(unpack) : value;
  if (value === null || typeof value !== "object") return value;
  if (value.packed) return numbers(value);
  for (const [key, item] of Object.entries(value)) value[key] = unpack(item);
  return value;
}

function numbers({ packed, base64 }) {
  const words = atob(base64), bytes = new Uint8Array(words.length);
  for (let i = 0; i < words.length; i++) bytes[i] = words.charCodeAt(i);
  const array = new KINDS[packed](bytes.buffer);
  return packed === "i8" ? Float64Array.from(array, Number) : array;
}

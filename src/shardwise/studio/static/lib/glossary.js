// The words of the page, each in a sentence.

import { h, unique } from "studio/lib/dom";

const WORDS = {
  "activation": "What a layer's forward pass computes; some of it is kept until the backward pass needs it.",
  "all-reduce, all-gather, reduce-scatter": "Every rank gets the sum of all ranks' data after an all-reduce, every piece after an all-gather, and one piece of the sum after a reduce-scatter.",
  "backward (B), input gradient (I), weight gradient (W)": "The pass that computes gradients: I for the layer before, W for the layer's own weights; B does both at once.",
  "bubble": "Time in which a rank of a pipeline has nothing to do.",
  "all-to-all": "Every rank sends each other rank a part of its own: here the rows whose experts are there.",
  "capacity": "Tokens of a sequence that an expert takes at most, over its equal part. Later ones are dropped: they skip that expert.",
  "chunk": "A piece of a tensor that travels as one.",
  "collective": "An operation that all ranks of a group take part in.",
  "dp, tp, pp, cp": "Degrees of data, tensor, pipeline and context parallelism: copies of the model, slices of each matrix, groups of layers, slices of each sequence.",
  "edp, ep, etp": "The same ranks as experts see them: copies of the experts, groups of whole experts, slices of each expert.",
  "expert": "One of many feed-forward parts of a layer. A router chooses a few of them for each token.",
  "forward (F)": "The pass that computes the model's answer.",
  "imbalance": "The load of the busiest expert, or rank, over the mean.",
  "latency (α) and bandwidth (1/β)": "What a message takes however small it is, and how many bytes a second follow. γ is the time for adding one byte.",
  "layout": "How a model is split over devices.",
  "ledger": "The list of all collectives of one step with their sizes.",
  "lower bound": "Time below which no algorithm can be.",
  "MFU": "Model FLOPs utilisation: the arithmetic that the model needs, over what the devices could do in that time. Causal attention counts once: half of the square.",
  "micro-batch": "The part of a batch that goes through the model at one time.",
  "offload": "Keeping optimizer state, parameters or saved activations in the host's memory or on disk instead of the device.",
  "optimizer state": "What the optimizer keeps for each weight; for Adam two averages, and with bf16 weights a copy in fp32.",
  "rank": "One process with one device.",
  "recompute": "Computing activations again in the backward pass instead of keeping them.",
  "sp": "Sequence parallel: the parts of a layer that tensor parallelism leaves whole are split by tokens.",
  "staleness": "Updates that were made between the weights that a gradient was computed with, and the update that uses it.",
  "step": "One update of the weights from one batch.",
  "worker, server": "A worker computes gradients; a parameter server keeps the weights and the optimizer's state, and makes the updates.",
  "ZeRO, ZeRO stage (zero)": "What data-parallel ranks do not keep twice: from 1 optimizer state, from 2 gradients, from 3 weights.",
};

/** Word in a text -> the entry that explains it; at the head of a sentence, too. */
const ENTRIES = Object.fromEntries(Object.keys(WORDS).flatMap((entry) => entry.replaceAll(/ \([^)]*\)/g, "").split(/, | and /).flatMap((word) => [[word, entry], [word[0].toUpperCase() + word.slice(1), entry]])));
const FOUND = new RegExp(`(?<![\\w-])(${Object.keys(ENTRIES).sort((a, b) => b.length - a.length).join("|")})s?(?![\\w=-])`, "g");
let dialog = null;

/** A text in which the first use of each word of the list opens the list there. seen: entries that were linked before. */
export function linked(text, seen = new Set()) {
  const nodes = [];
  let at = 0;
  for (const match of text.matchAll(FOUND)) {
    const entry = ENTRIES[match[1]];
    if (seen.has(entry)) continue;
    seen.add(entry);
    nodes.push(text.slice(at, match.index), h("button", { type: "button", class: "term", title: WORDS[entry], "aria-haspopup": "dialog", onclick: () => openAt(entry) }, match[0]));
    at = match.index + match[0].length;
  }
  return [...nodes, text.slice(at)];
}

function openAt(entry) {
  dialog.showModal();
  const term = [...dialog.querySelectorAll("dt")].find((each) => each.textContent === entry);
  term.scrollIntoView({ block: "center" });
  term.focus({ preventScroll: true });
}

/** A button that opens the list. */
export function glossary() {
  const id = unique("glossary");
  const list = h("dl", {}, Object.entries(WORDS).flatMap(([word, says]) => [h("dt", { tabindex: -1 }, word), h("dd", {}, says)]));
  const head = h("h2", { tabindex: -1 }, "Words");
  dialog = h("dialog", { id, "aria-label": "Words" }, head, list,
    h("form", { method: "dialog" }, h("button", { class: "primary" }, "Close")));
  document.body.append(dialog);
  return h("button", { type: "button", class: "quiet", "aria-haspopup": "dialog", onclick: () => { dialog.showModal(); dialog.scrollTop = 0; head.focus(); } }, "Words");
}

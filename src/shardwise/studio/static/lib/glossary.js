// The words of the page, each in a sentence.

import { h, unique } from "studio/lib/dom";

const WORDS = {
  "activation": "What a layer's forward pass computes; some of it is kept until the backward pass needs it.",
  "all-reduce": "Every rank gets the sum of all ranks' data. An all-gather gives everyone every piece; a reduce-scatter gives everyone one piece of the sum.",
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
  "ZeRO stage (zero)": "What data-parallel ranks do not keep twice: from 1 optimizer state, from 2 gradients, from 3 weights.",
};

/** A button that opens the list. */
export function glossary() {
  const id = unique("glossary");
  const list = h("dl", {}, Object.entries(WORDS).flatMap(([word, says]) => [h("dt", {}, word), h("dd", {}, says)]));
  const dialog = h("dialog", { id, "aria-label": "Words" }, h("h2", { tabindex: -1, autofocus: true }, "Words"), list,
    h("form", { method: "dialog" }, h("button", { class: "primary" }, "Close")));
  document.body.append(dialog);
  return h("button", { type: "button", class: "quiet", "aria-haspopup": "dialog", onclick: () => dialog.showModal() }, "Words");
}

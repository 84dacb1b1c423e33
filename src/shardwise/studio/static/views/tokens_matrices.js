// The matrices of a layer: their names, and a rank's part of one in words.

import { bytes, share } from "studio/lib/format";

const NAMES = { "attention.qkv.q.weight": "Q", "attention.qkv.k.weight": "K", "attention.qkv.v.weight": "V", "attention.out.weight": "out", "mlp.gate_up.gate.weight": "gate", "mlp.gate_up.up.weight": "up", "mlp.up.up.weight": "up", "mlp.down.weight": "down" };

export function short(name) {
  return NAMES[name] ?? name.replace(".weight", "");
}

/** What a rank has of a matrix. width: bytes of a number. */
export function partWords(rank, matrix, piece, width) {
  const size = `${matrix.rows.toLocaleString("en-US")} x ${matrix.columns.toLocaleString("en-US")}`;
  if (!piece) return `rank ${rank}, ${short(matrix.name)} (${size}): nothing`;
  return `rank ${rank}, ${short(matrix.name)} (${size})\n${share(piece.elements / (matrix.rows * matrix.columns))} of it: ${bytes(piece.elements * width)}${piece.how === "flat" ? ", an interval of its numbers" : piece.how === "whole" ? "" : `, ${piece.how} ${piece.start.toLocaleString("en-US")} to ${(piece.stop - 1).toLocaleString("en-US")}`}`;
}

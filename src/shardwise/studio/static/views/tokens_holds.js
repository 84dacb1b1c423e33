// Who holds what of a layer: its matrices side by side, with every rank's part and number. Columns are outputs.

import { colourOf, colours } from "studio/lib/theme";
import { partWords, short } from "studio/views/tokens_matrices";

const GAP = 14, TOP = 44, LEAST = 40;

/** The sides' matrices in pixels: as wide as their columns and as high as their rows, but no lower than `LEAST`. */
export function holdsPlaces(width, data) {
  const { matrices, sides } = data.more, narrow = width < 640, wide = narrow ? width : width / sides.length - 16;
  const all = matrices.reduce((sum, m) => sum + m.columns, 0), tallest = Math.max(...matrices.map((m) => m.rows));
  const unit = Math.min((wide - GAP * (matrices.length - 1)) / all, 300 / tallest), high = Math.max(LEAST, tallest * unit);
  return sides.map((side, i) => {
    const left = narrow ? 0 : i * (wide + 32), top = narrow ? i * (high + TOP + 22) : 0;
    let x = left;
    const placed = matrices.map((matrix) => {
      const box = { ...matrix, x, y: top + TOP, w: matrix.columns * unit, h: Math.max(LEAST, matrix.rows * unit) };
      x += box.w + GAP;
      return box;
    });
    return { left, top, wide, high, matrices: placed };
  });
}

export function holdsHeight(width, data) {
  if (!data) return 100;
  const places = holdsPlaces(width, data), last = places[places.length - 1];
  return last.top + last.high + TOP + 22;
}

export function drawHolds(context, width, data, pointed) {
  const theme = colours(), font = context.font;
  holdsPlaces(width, data).forEach((place, i) => {
    const side = data.more.sides[i];
    context.textAlign = "left";
    context.fillStyle = theme.ink;
    context.font = font.replace("12px", "600 14px");
    const name = `${"AB"[i]}: ${side.layout}${side.stages.length > 1 ? `, rank 0 has ${side.stages[0]}` : ""}`, bad = side.fits.startsWith("does not");
    context.fillText(name, place.left, place.top + 9, place.wide);
    const x = place.left + context.measureText(name).width + 10;
    context.font = font;
    context.fillStyle = bad ? theme.bad : theme.muted;
    context.fillText(side.fits, x, place.top + 9, Math.max(20, place.left + place.wide - x));
    for (const matrix of place.matrices) {
      context.fillStyle = theme.muted;
      context.textAlign = "left";
      context.fillText(short(matrix.name), matrix.x, matrix.y - 12, Math.min(matrix.w + GAP - 3, width - matrix.x));
      context.fillStyle = theme.raised;
      context.fillRect(matrix.x, matrix.y, matrix.w, matrix.h);
      for (const piece of side.pieces) if (piece.name === matrix.name) drawPiece(context, theme, piece, matrix, "ab"[i], pointed === null || pointed === piece.rank);
      context.strokeStyle = theme.line;
      context.strokeRect(matrix.x - 0.5, matrix.y - 0.5, matrix.w + 1, matrix.h + 1);
    }
  });
  return (x, y) => holdsAt(width, data, x, y);
}

/** strong: false where another rank is pointed at. */
function drawPiece(context, theme, piece, { x, y, w, h }, hue, strong) {
  let biggest = [0, 0, 0, 0];
  // Neighbours differ in strength, not in hue: the hue is the strategy's.
  context.globalAlpha = strong ? (piece.rank % 2 ? 0.72 : 1) : 0.2;
  for (const [left, top, wide, high] of piece.boxes) {
    const box = [x + left * w, y + top * h, wide * w, high * h];
    context.fillStyle = colourOf(hue);
    context.fillRect(...box);
    if (box[2] * box[3] > biggest[2] * biggest[3]) biggest = box;
    if (Math.min(box[2], box[3]) < 4) continue;
    // A seam between neighbours, where it leaves something of them.
    context.strokeStyle = theme.surface;
    context.lineWidth = 0.7;
    context.strokeRect(...box);
    context.lineWidth = 1;
  }
  context.globalAlpha = 1;
  if (biggest[2] < 11 || biggest[3] < 13) return;
  const word = String(piece.rank), wide = context.measureText(word).width + 6, middle = [biggest[0] + biggest[2] / 2, biggest[1] + biggest[3] / 2];
  context.fillStyle = theme.surface;
  context.fillRect(middle[0] - wide / 2, middle[1] - 8, wide, 16);
  context.fillStyle = theme.ink;
  context.textAlign = "center";
  context.fillText(word, middle[0], middle[1] + 0.5);
}

/** What is under the pointer: its rank, and words. */
function holdsAt(width, data, px, py) {
  for (const [i, place] of holdsPlaces(width, data).entries()) {
    const matrix = place.matrices.find((each) => px >= each.x && px <= each.x + each.w && py >= each.y && py <= each.y + each.h);
    if (!matrix) continue;
    const [u, v] = [(px - matrix.x) / matrix.w, (py - matrix.y) / matrix.h];
    const under = data.more.sides[i].pieces.filter((piece) => piece.name === matrix.name && piece.boxes.some(([left, top, wide, high]) => u >= left && u <= left + wide && v >= top && v <= top + high));
    return under.length ? { rank: under[0].rank, words: under.map((piece) => partWords(piece.rank, matrix, piece, data.more.width)).join("\n") } : "on a rank that is not drawn";
  }
  return "";
}

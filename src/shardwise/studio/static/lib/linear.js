// Two quantities as areas on one linear scale.

import { bytes } from "studio/lib/format";
import { colourOf, colours } from "studio/lib/theme";

const TOP = 20, NAMES = 118;

/** Sizes in whole pixels of two areas in the ratio of two quantities, at most `wide` by about `high`. What is smaller
 * than a pixel has sides below one. */
export function linearAreas(wide, high, most, least) {
  const ratio = least > 0 ? most / least : Infinity;
  if (ratio > 2 * wide * high) return { big: [wide, high], small: [Math.sqrt((wide * high) / ratio), Math.sqrt((wide * high) / ratio)] };
  const side = Math.max(1, Math.min(high, Math.floor(Math.sqrt((wide * high) / ratio)))), area = ratio * side * side;
  const tall = Math.max(side, Math.ceil(area / wide));
  return { big: [Math.round(area / tall), tall], small: [side, side] };
}

function sizes(width, sides) {
  const [more, less] = sides.length < 2 || sides[0].sends >= sides[1].sends ? [0, 1] : [1, 0];
  return { more, less, ...linearAreas(Math.max(60, width - NAMES), 104, sides[more].sends, sides[less]?.sends ?? 0) };
}

export function linearHeight(width, sides) {
  const { big, small } = sizes(width, sides);
  return TOP + Math.max(big[1], small[1] + 42) + 4;
}

/** What a device sends for one step under each strategy; a side has `sends` and `layout`. Returns what is at a place. */
export function drawLinear(context, width, sides, top) {
  const theme = colours(), { more, less, big, small } = sizes(width, sides), x = big[0] + 14, y = top + TOP;
  context.textAlign = "left";
  context.fillStyle = theme.ink;
  context.fillText(`${"AB"[more]}, ${sides[more].layout}: ${bytes(sides[more].sends)} sent by each device`, 0, top + 8, width);
  context.fillStyle = colourOf("ab"[more]);
  context.fillRect(0, y, ...big);
  if (sides[less]) {
    context.fillStyle = colourOf("ab"[less]);
    context.fillRect(x, y, ...small);
    context.fillStyle = theme.ink;
    const words = [`${"AB"[less]}: ${bytes(sides[less].sends)}`, ...(small[0] < 1 ? ["less than a pixel"] : small[0] < 8 ? [small[0] === 1 ? "one pixel" : `${small[0]} x ${small[1]} pixels`] : [])];
    words.forEach((each, i) => context.fillText(each, x, y + small[1] + 12 + 16 * i, width - x));
  }
  return (px, py) => {
    if (py < top || py > y + Math.max(big[1], small[1] + 30)) return "";
    const side = px < x - 6 ? more : less;
    return sides[side] ? `${"AB"[side]}, ${sides[side].layout}\n${bytes(sides[side].sends)} for one step, on one linear scale` : "";
  };
}

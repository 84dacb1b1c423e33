// A layout in other views: links that carry the model, the cluster and the layout. Without a server there is no answer to them.

import { inside } from "studio/lib/data";
import { h } from "studio/lib/dom";

/** opens: [title, address] of each view, from the answer. */
export function opensIn(words, opens) {
  if (inside || !opens.length) return null;
  return h("p", { class: "lead" }, `Open ${words} in `, opens.flatMap(([title, address], i) => [i ? " · " : "", h("a", { href: `#${address}` }, title)]));
}

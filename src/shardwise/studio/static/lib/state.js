// What is shown, kept behind the # of the address so that it can be shared: #collectives?ranks=8&_round=3.
// Words that begin with _ are the page's own (a round, an open table, a zoomed window); the server never sees them.

export function parse(hash) {
  const [view, words = ""] = hash.replace(/^#/, "").split(/\?(.*)/s);
  return { view, given: Object.fromEntries(new URLSearchParams(words)) };
}

export function text(view, given) {
  const words = new URLSearchParams(given).toString().replaceAll("%2C", ",").replaceAll("%2F", "/");
  return words ? `#${view}?${words}` : `#${view}`;
}

export function asked(given) {
  return Object.fromEntries(Object.entries(given).filter(([name]) => !name.startsWith("_")));
}

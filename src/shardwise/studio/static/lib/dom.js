// Elements from words: h("button", {onclick, class: "quiet"}, "Play"). Text is text, never markup.

const SVG = "http://www.w3.org/2000/svg";

export function h(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

export function s(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.setAttribute("class", value);
    else if (name === "dataset") Object.assign(element.dataset, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

let serial = 0;

/** An id that nothing else on the page has. */
export function unique(word) {
  serial += 1;
  return `${word}-${serial}`;
}

/** Whether the person asked the system for less motion. */
export function still() {
  return matchMedia("(prefers-reduced-motion: reduce)").matches;
}

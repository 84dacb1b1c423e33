// Answers from the server, or from inside an exported page. Long columns come packed as base64.

const embedded = document.getElementById("embedded");
export const inside = embedded ? JSON.parse(embedded.textContent) : null;

/** One answer. Throws an Error with the server's one line. */
export async function load(name, given, signal) {
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

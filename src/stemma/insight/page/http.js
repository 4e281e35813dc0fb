// Questions to the server. Keys stay in this tab and go out as a header, never as a cookie.
export const UNREACHABLE = "the server can't be reached";

export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

// `kind`: "api" or "admin". The chat and the operator's pages of a tab share what was typed.
export function setKey(kind, key) { sessionStorage.setItem(`stemma-${kind}-key`, key); }
export function dropKey(kind) { sessionStorage.removeItem(`stemma-${kind}-key`); }
export function keyOf(kind) { return sessionStorage.getItem(`stemma-${kind}-key`); }

// Throws Refused for any status but 200, a TypeError if there is no server, an AbortError if it is stopped.
export async function open(path, key, { headers, ...options } = {}) {
  const sent = { ...headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { cache: "no-store", credentials: "omit", headers: sent, ...options });
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw new Refused(body?.error?.message ?? `the server answered with status ${response.status}`, response.status);
}

export async function get(path, key) { return (await open(path, key)).json(); }

// The data of each server-sent event, a line each. EventSource can't send a key.
export async function* dataOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (held + value).split("\n");
    held = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
  }
}

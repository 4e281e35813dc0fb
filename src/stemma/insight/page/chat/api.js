// Questions to the server. The key stays in this tab and goes out as a header, never as a cookie.
const KEY = "stemma-api-key", ADMIN_KEY = "stemma-admin-key"; // the latter is the dashboard's
export const UNREACHABLE = "the server can't be reached";

export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export function setKey(key) { sessionStorage.setItem(KEY, key); }

function headers(key) {
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

async function refusal(response) {
  const body = await response.json().catch(() => ({}));
  return new Refused(body?.error?.message ?? `the server answered with status ${response.status}`, response.status);
}

async function get(path, key) {
  const response = await fetch(path, { headers: headers(key), cache: "no-store", credentials: "omit" });
  if (!response.ok) throw await refusal(response);
  return response.json();
}

export async function models() { return (await get("/v1/models", sessionStorage.getItem(KEY))).data; }

export async function explanation(id) {
  const key = sessionStorage.getItem(ADMIN_KEY) ?? sessionStorage.getItem(KEY);
  return get(`/admin/explain?request=${encodeURIComponent(id)}`, key);
}

export async function isUp() {
  try { return (await fetch("/health", { cache: "no-store" })).ok; } catch { return false; }
}

async function* dataOf(body) {
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

// The events of an answer. Throws Refused, a TypeError if the connection breaks, an AbortError if it is stopped.
export async function* answerEvents(body, signal) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST", headers: headers(sessionStorage.getItem(KEY)), signal, body: JSON.stringify(body), credentials: "omit",
  });
  if (!response.ok) throw await refusal(response);
  for await (const data of dataOf(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new Refused(event.error.message, 200);
    yield event;
  }
  throw new TypeError("the stream ended early");
}

// What the chat asks the server for.
import { dataOf, get, keyOf, open, Refused } from "/chat/http.js";

export async function models() { return (await get("/v1/models", keyOf("api"))).data; }

export async function explanation(id) {
  return get(`/admin/explain?request=${encodeURIComponent(id)}`, keyOf("admin") ?? keyOf("api"));
}

export async function isUp() {
  try { return (await fetch("/health", { cache: "no-store" })).ok; } catch { return false; }
}

// The events of an answer. Throws Refused, a TypeError if the connection breaks, an AbortError if it is stopped.
export async function* answerEvents(body, signal) {
  const headers = { "content-type": "application/json" };
  const response = await open("/v1/chat/completions", keyOf("api"),
    { method: "POST", headers, signal, body: JSON.stringify(body) });
  for await (const data of dataOf(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new Refused(event.error.message, 200);
    yield event;
  }
  throw new TypeError("the stream ended early");
}

// Questions to the server. The key stays in this tab and goes out as a header, never as a cookie.
const KEY = "stemma-admin-key";

export class Refused extends Error {}

export function setKey(key) { sessionStorage.setItem(KEY, key); }
export function dropKey() { sessionStorage.removeItem(KEY); }

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function open(path, signal) {
  const answer = await fetch(path, { headers: headers(), signal, cache: "no-store", credentials: "omit" });
  if (answer.ok) return answer;
  let message = `status ${answer.status}`;
  try { message = (await answer.json()).error.message; } catch { /* no JSON: the status says it */ }
  if (answer.status === 401 || answer.status === 403) throw new Refused(message);
  throw new Error(message);
}

export async function ask(path) { return (await open(path)).json(); }

// Calls `take` with the data of each server-sent event until the stream ends. EventSource can't send a key.
export async function follow(path, take, signal) {
  const reader = (await open(path, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
      if (data.length) take(JSON.parse(data.join("\n")));
    }
  }
}

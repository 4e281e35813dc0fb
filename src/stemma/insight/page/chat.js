const $ = (id) => document.getElementById(id);
const KEY = "stemma-api-key";
const number = (n) => n.toLocaleString("en");
let turns = [], under = null;

function headers() {
  const key = sessionStorage.getItem(KEY);
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

function tell(text) { $("state").textContent = text; }

async function refusal(response) {
  if (response.status === 401) { $("login").hidden = false; $("key").focus(); }
  const body = await response.json().catch(() => ({}));
  return body?.error?.message ?? `the server answered with status ${response.status}`;
}

async function models() {
  const response = await fetch("/v1/models", { headers: headers() });
  if (!response.ok) return tell(await refusal(response));
  $("login").hidden = true;
  tell("");
  const names = (await response.json()).data.map((one) => one.id);
  $("which").replaceChildren(...names.map((name) => new Option(name)));
  $("model").textContent = names[0] ?? "";
}

function line(kind, text = "") {
  const made = document.createElement("p");
  made.className = kind;
  made.textContent = text;
  return made;
}

// A bar of the prompt's tokens by tier, and the same in words with the reason of what was not reused.
function reuse(usage) {
  const own = usage.stemma ?? {}, total = Math.max(1, usage.prompt_tokens);
  const tiers = Object.entries(own.cached_tokens_by_tier ?? {}).filter(([, count]) => count > 0);
  const cached = tiers.reduce((sum, [, count]) => sum + count, 0);
  const bar = document.createElement("div");
  bar.className = "bar";
  bar.setAttribute("aria-hidden", "true");
  for (const [tier, count] of [...tiers, ["computed", usage.prompt_tokens - cached]]) {
    const part = document.createElement("i");
    part.className = tier;
    part.style.width = `${100 * count / total}%`;
    bar.append(part);
  }
  const where = tiers.map(([tier, count]) => `${number(count)} from ${tier}`).join(", ");
  const share = `${(100 * cached / total).toFixed(0)} %`;
  const words = `${number(cached)} of ${number(usage.prompt_tokens)} prompt tokens reused (${share}${where ? `: ${where}` : ""})`;
  return [bar, line("reuse", `${words}. ${own.miss_detail ?? ""}`)];
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += value;
    const lines = held.split("\n");
    held = lines.pop();
    for (const each of lines)
      if (each.startsWith("data: ") && each !== "data: [DONE]") yield JSON.parse(each.slice(6));
  }
}

async function ask(question) {
  const system = $("system").value.trim();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...turns, { role: "user", content: question }];
  const item = document.createElement("li"), thought = line("thought"), said = line("answer");
  item.append(line("question", question), thought, said);
  $("turns").append(item);
  under = new AbortController();
  $("send").hidden = true;
  $("stop").hidden = false;
  tell("answering");
  let outcome = "";
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST", headers: headers(), signal: under.signal,
      body: JSON.stringify({
        model: $("which").value, messages, stream: true, stream_options: { include_usage: true },
        temperature: Number($("temperature").value), max_tokens: Number($("limit").value),
      }),
    });
    if (!response.ok) throw new Error(await refusal(response));
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      const delta = event.choices?.[0]?.delta ?? {};
      thought.append(delta.reasoning_content ?? "");
      said.append(delta.content ?? "");
      if (event.usage) item.append(...reuse(event.usage));
    }
  } catch (error) {
    outcome = error.name === "AbortError" ? "stopped" : error.message;
    item.append(line("bad", outcome));
  }
  if (said.textContent) turns.push({ role: "user", content: question }, { role: "assistant", content: said.textContent });
  under = null;
  $("send").hidden = false;
  $("stop").hidden = true;
  tell(outcome);
  $("question").focus();
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = $("question").value.trim();
  if (!question || under) return;
  $("question").value = "";
  ask(question);
});
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("ask").requestSubmit(); }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") under?.abort(); });
$("stop").addEventListener("click", () => under?.abort());
$("again").addEventListener("click", () => { under?.abort(); turns = []; $("turns").replaceChildren(); $("question").focus(); });
$("which").addEventListener("change", () => { $("model").textContent = $("which").value; });
$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value);
  models();
});
models();

const $ = (id) => document.getElementById(id);
const KEY = "stemma-api-key";
const UNREACHABLE = "the server can't be reached";
const number = (n) => n.toLocaleString("en");
const NEAR_END_PX = 80;
// An answer belongs to the conversation that it was asked in, whatever has begun since.
let turns = [], under = null;

function headers() {
  const key = sessionStorage.getItem(KEY);
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

// Beside the question, which stays in sight.
function tell(text, isBad = false) {
  $("state").textContent = text;
  $("state").classList.toggle("bad", isBad);
}

function isAtEnd() {
  const page = document.documentElement;
  return page.scrollHeight - page.scrollTop - page.clientHeight < NEAR_END_PX;
}

// The page follows an answer unless its reader has scrolled up.
function following(change) {
  const follows = isAtEnd();
  change();
  if (follows) document.documentElement.scrollTop = document.documentElement.scrollHeight;
}

async function refusal(response) {
  if (response.status === 401) { $("login").hidden = false; $("key").focus(); }
  const body = await response.json().catch(() => ({}));
  return body?.error?.message ?? `the server answered with status ${response.status}`;
}

async function models() {
  const response = await fetch("/v1/models", { headers: headers() }).catch(() => null);
  if (!response) return tell(UNREACHABLE, true);
  if (!response.ok) return tell(await refusal(response), true);
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

function failureOf(error) {
  if (error.name === "AbortError") return "stopped";
  return error instanceof TypeError ? UNREACHABLE : error.message; // fetch's, which says no more
}

async function ask(question) {
  const mine = new AbortController(), conversation = turns;
  const system = $("system").value.trim();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...conversation, { role: "user", content: question }];
  const item = document.createElement("li"), thought = line("thought"), said = line("answer");
  item.append(line("question", question), thought, said);
  $("turns").append(item);
  document.documentElement.scrollTop = document.documentElement.scrollHeight;
  under = mine;
  $("send").hidden = true;
  $("stop").hidden = false;
  tell("answering");
  let outcome = "";
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST", headers: headers(), signal: mine.signal,
      body: JSON.stringify({
        model: $("which").value, messages, stream: true, stream_options: { include_usage: true },
        temperature: Number($("temperature").value), max_tokens: Number($("limit").value),
      }),
    });
    if (!response.ok) throw new Error(await refusal(response));
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      const delta = event.choices?.[0]?.delta ?? {};
      following(() => {
        thought.append(delta.reasoning_content ?? "");
        said.append(delta.content ?? "");
        if (event.usage) item.append(...reuse(event.usage));
      });
    }
  } catch (error) {
    outcome = failureOf(error);
  }
  if (conversation !== turns) return; // its place on the page is gone
  const isBad = outcome && outcome !== "stopped";
  if (said.textContent) conversation.push({ role: "user", content: question }, { role: "assistant", content: said.textContent });
  if (outcome) following(() => item.append(line("bad", outcome)));
  if (isBad && !said.textContent) { // the next answer won't know of it: it is asked again, or not at all
    item.remove();
    if (!$("question").value) $("question").value = question;
  }
  end(mine);
  tell(outcome, isBad);
}

// Let the next question be sent, unless that has begun already.
function end(controller) {
  if (under !== controller) return;
  under = null;
  $("send").hidden = false;
  $("stop").hidden = true;
  $("question").focus();
}

function beginAnew() {
  const before = under;
  turns = [];
  $("turns").replaceChildren();
  tell("");
  before?.abort();
  end(before);
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
$("again").addEventListener("click", beginAnew);
$("which").addEventListener("change", () => { $("model").textContent = $("which").value; });
$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value);
  models();
});
models();

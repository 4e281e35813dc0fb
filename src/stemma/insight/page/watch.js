// What every operator's page does: ask for the key, follow figures as they come, say when they don't.
import { $ } from "./elements.js";
import { dataOf, dropKey, keyOf, open, Refused, setKey, UNREACHABLE } from "./http.js";

const RETRY_MS = 2000, SILENT_MS = 10_000, LOOK_MS = 1000;
let heardAt = null;

export function tell(words, isBad = false) {
  if ($("state").textContent !== words) $("state").textContent = words;
  $("state").classList.toggle("bad", isBad);
}

function askForKey(message) {
  dropKey("admin");
  $("login").hidden = false;
  $("main").hidden = true;
  $("refusal").textContent = message;
  tell("asks for the admin key", true);
  $("key").focus();
}

// One stream. A machine that slept, or a server that hangs, leaves one open on which nothing comes any more.
async function once(path, take) {
  const ending = new AbortController();
  let lastAt = Date.now();
  const looking = setInterval(() => { if (Date.now() - lastAt > SILENT_MS) ending.abort(); }, LOOK_MS);
  try {
    const { body } = await open(path, keyOf("admin"), { signal: ending.signal });
    for await (const data of dataOf(body)) {
      heardAt = new Date(lastAt = Date.now());
      $("login").hidden = true;
      $("main").hidden = false;
      take(JSON.parse(data));
    }
    return "the server ended the stream";
  } finally { clearInterval(looking); }
}

async function run(path, take) {
  for (;;) {
    let words;
    try { words = await once(path(), take); } catch (error) {
      if (error instanceof Refused && (error.status === 401 || error.status === 403)) return askForKey(error.message);
      if (!(error instanceof Refused || error instanceof TypeError || error.name === "AbortError")) throw error;
      words = error instanceof Refused ? error.message : UNREACHABLE;
    }
    tell(`${words}; trying again${heardAt ? `. What stands here is of ${heardAt.toLocaleTimeString()}` : ""}`, true);
    await new Promise((done) => setTimeout(done, RETRY_MS));
  }
}

// `path()` is asked for a stream of figures, each given to `take`, again and again, for ever.
export function watch(path, take) {
  $("login").addEventListener("submit", (event) => {
    event.preventDefault();
    setKey("admin", $("key").value);
    $("key").value = "";
    $("refusal").textContent = "";
    run(path, take);
  });
  return run(path, take);
}

// The server as the page sees it: its models, whether it asks for a key, whether it is there.
import { isUp, models } from "/chat/api.js";
import { mayAttachImages } from "/chat/attachments.js";
import { $ } from "/chat/elements.js";
import { Refused, setKey, UNREACHABLE } from "/chat/http.js";
import { recall, remember } from "/chat/store.js";

const RETRY_MS = 1500, LOOK_EVERY_MS = 15_000;
let cards = [], isWatching = false, tell = () => {};

export function beginServer(onNews) {
  tell = onNews;
  $("which").addEventListener("change", choose);
  $("login").addEventListener("submit", (event) => {
    event.preventDefault();
    setKey("api", $("key").value);
    readModels();
  });
  addEventListener("online", readModels);
  setInterval(async () => { if (!document.hidden && !(await isUp())) watch(); }, LOOK_EVERY_MS);
  return readModels();
}

export function chosenModel() { return $("which").value; }

function choose() {
  remember("model", chosenModel());
  const card = cards.find((one) => one.id === chosenModel());
  $("model").textContent = chosenModel();
  mayAttachImages(!card?.input_modalities || card.input_modalities.includes("image"));
}

function label(card) { return card.state ? `${card.id} (${card.state})` : card.id; }

export async function readModels() {
  try {
    cards = await models();
  } catch (error) { failed(error); return false; }
  const wanted = chosenModel() || recall("model");
  $("which").replaceChildren(...cards.map((card) => new Option(label(card), card.id)));
  if (cards.some((card) => card.id === wanted)) $("which").value = wanted;
  $("login").hidden = true;
  tell("");
  choose();
  return true;
}

// Say what went wrong with a request, ask for the key if it is that, and wait for a server that is gone.
export function failed(error) {
  if (error instanceof Refused && error.status === 401) { $("login").hidden = false; $("key").focus(); }
  if (error instanceof TypeError) { tell(`${UNREACHABLE}; waiting for it`, true); watch(); }
  else tell(error.message, true);
}

async function watch() {
  if (isWatching) return;
  isWatching = true;
  while (!(await isUp())) {
    tell(`${UNREACHABLE}; waiting for it`, true);
    await new Promise((done) => setTimeout(done, RETRY_MS));
  }
  isWatching = false;
  if (await readModels()) tell("the server is back");
}

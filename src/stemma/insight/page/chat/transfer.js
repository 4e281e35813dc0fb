// Conversations as JSON: out as they are kept; in from our own export or from that of llama.cpp's page.
// What comes in is somebody's file: only fields that we know are taken, with their types and sizes.
import { newId, titleOf } from "/chat/conversation.js";
import { allHeads, keepHead, keepMessages, messagesOf } from "/chat/store.js";

const FORMAT = "stemma-conversations", MAX_BYTES = 256 * 1024 * 1024, MAX_CHARS = 4_000_000, MAX_IMAGES = 64;
const ROLES = new Set(["user", "assistant", "tool"]);
const IMAGE = /^data:image\/(?:png|jpeg|gif|webp|bmp);base64,[A-Za-z0-9+/=]*$/;

export async function exported(ids = null) {
  const heads = (await allHeads()).filter((head) => !ids || ids.includes(head.id));
  const conversations = [];
  for (const head of heads) conversations.push({ ...head, messages: await messagesOf(head.id) });
  return JSON.stringify({ format: FORMAT, version: 1, conversations });
}

const text = (value) => (typeof value === "string" ? value.slice(0, MAX_CHARS) : "");
const count = (value) => (Number.isFinite(value) && value >= 0 ? value : undefined);
const listOf = (value) => (Array.isArray(value) ? value : []);

function callOf(call) {
  return { id: text(call?.id), type: "function",
    function: { name: text(call?.function?.name), arguments: text(call?.function?.arguments) } };
}

function usageOf(usage) {
  if (typeof usage !== "object" || usage === null || count(usage.prompt_tokens) === undefined) return undefined;
  const own = usage.stemma ?? {}, tiers = Object.entries(own.cached_tokens_by_tier ?? {});
  return {
    prompt_tokens: count(usage.prompt_tokens), completion_tokens: count(usage.completion_tokens) ?? 0,
    stemma: {
      cached_tokens_by_tier: Object.fromEntries(tiers.filter(([, n]) => count(n) !== undefined).slice(0, 16)),
      miss_reason: text(own.miss_reason), miss_detail: text(own.miss_detail), queue_wait_s: count(own.queue_wait_s) ?? 0,
    },
  };
}

function messageOf(given) {
  const role = given?.role;
  if (!ROLES.has(role)) throw new Error(`a message has the role ${JSON.stringify(role)}`);
  const images = listOf(given.images).filter((one) => typeof one === "string" && IMAGE.test(one)).slice(0, MAX_IMAGES);
  const both = { role, text: text(given.text), at: count(given.at) ?? Date.now() };
  if (role === "user") return { ...both, images };
  const results = listOf(given.results).map((one) => ({ id: text(one?.id), text: text(one?.text) }));
  if (role === "tool") return { ...both, results };
  return {
    ...both, reasoning: text(given.reasoning) || undefined, model: text(given.model), usage: usageOf(given.usage),
    answerId: text(given.answerId), firstTokenS: count(given.firstTokenS), seconds: count(given.seconds),
    calls: given.calls ? listOf(given.calls).slice(0, 128).map(callOf) : undefined,
    finish: text(given.finish) || "stop", failure: text(given.failure) || undefined,
  };
}

// New ids throughout: importing twice makes a copy. A message whose parent isn't there, or comes back to itself,
// can't be reached from a leaf that is: it is left out.
function conversationOf(given) {
  const id = newId(), ids = new Map(), all = listOf(given?.messages);
  for (const one of all) ids.set(one?.id, newId());
  const parents = new Map(all.map((one) => [one?.id, one?.parent ?? null]));
  const isRooted = rootedIn(parents);
  const messages = all.filter((one) => isRooted(one?.id)).map((one) => ({
    ...messageOf(one), id: ids.get(one.id), conversation: id, parent: ids.get(one.parent ?? null) ?? null,
  }));
  const leaf = isRooted(given?.leaf) ? ids.get(given.leaf) : messages.at(-1)?.id ?? null;
  const changed = count(given?.changed) ?? Date.now();
  return { head: { id, title: titleOf(text(given?.title)), changed, leaf, system: text(given?.system) }, messages };
}

function rootedIn(parents) {
  const known = new Map([[null, true]]);
  return (id) => {
    const way = [];
    while (!known.has(id) && parents.has(id)) { known.set(id, false); way.push(id); id = parents.get(id); }
    const isRooted = known.get(id) ?? false;
    for (const one of way) known.set(one, isRooted);
    return way.length ? isRooted : known.get(id) ?? false;
  };
}

// llama.cpp's page writes [{ conv, messages }], or one of them; its root is a message of the type "root".
function fromLlamaCpp({ conv, messages }) {
  const roots = new Set(listOf(messages).filter((one) => one?.type === "root").map((one) => one.id));
  const system = listOf(messages).find((one) => one?.role === "system" && one.content)?.content;
  for (const one of listOf(messages)) if (one?.role === "system") roots.add(one.id);
  const files = (one) => listOf(one?.extra).map((extra) => extra?.content).filter((content) => typeof content === "string");
  const kept = listOf(messages).filter((one) => !roots.has(one?.id)).map((one) => ({
    id: one?.id, parent: roots.has(one?.parent) ? null : one?.parent, role: one?.role, at: one?.timestamp,
    text: [one?.content, ...files(one)].join("\n\n"),
    reasoning: one?.reasoningContent ?? one?.thinking, model: one?.model,
    images: listOf(one?.extra).filter((extra) => /^image/i.test(extra?.type)).map((extra) => extra.base64Url),
  }));
  return { title: conv?.name, changed: conv?.lastModified, leaf: conv?.currNode, system, messages: kept };
}

function conversationsIn(found) {
  if (found?.format === FORMAT) return listOf(found.conversations);
  const all = Array.isArray(found) ? found : [found];
  if (all.length && all.every((one) => one?.conv && one.messages)) return all.map(fromLlamaCpp);
  throw new Error("it is neither an export of this page nor of llama.cpp's");
}

// Returns the ids of the conversations that a file held. Throws an Error that says what is wrong with it.
export async function imported(file) {
  if (file.size > MAX_BYTES) throw new Error("it is larger than 256 MB");
  const made = conversationsIn(JSON.parse(await file.text())).map(conversationOf);
  for (const { head, messages } of made) {
    await keepMessages(messages);
    await keepHead(head);
  }
  return made.map(({ head }) => head.id);
}

// What the browser keeps: conversations and their messages in IndexedDB, small things in localStorage.
// A message is a record of its own, so that two tabs don't undo each other's work. Without a database (a
// private window of some browsers) all works until the page is closed.
const NAME = "stemma-chat", VERSION = 1, PREFIX = "stemma-chat:";
let database = null;
const memory = { conversations: new Map(), messages: new Map() }; // without a database
let onFailure = () => {};
const others = new BroadcastChannel(NAME);

const answered = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

// Returns whether anything is kept. `failed(message)` is told of what couldn't be.
export async function openStore(failed) {
  onFailure = failed;
  try {
    const opening = indexedDB.open(NAME, VERSION);
    opening.onupgradeneeded = () => {
      opening.result.createObjectStore("conversations", { keyPath: "id" });
      opening.result.createObjectStore("messages", { keyPath: "id" }).createIndex("conversation", "conversation");
    };
    database = await answered(opening);
    database.onversionchange = () => database.close();
  } catch { database = null; }
  return database !== null;
}

async function within(stores, mode, act) {
  if (!database) return undefined;
  const transaction = database.transaction(stores, mode);
  const ended = new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onabort = transaction.onerror = () => reject(transaction.error ?? new Error("it was ended"));
  });
  ended.catch(() => {}); // it is awaited below, unless `act` fails first
  const found = await act(...stores.map((name) => transaction.objectStore(name)));
  await ended;
  return found;
}

async function change(stores, act) {
  try { await within(stores, "readwrite", act); }
  catch (error) { onFailure(`this browser couldn't keep the conversation: ${error.message}`); }
}

export async function allHeads() {
  return (await within(["conversations"], "readonly", (heads) => answered(heads.getAll()))) ?? [...memory.conversations.values()];
}

export async function messagesOf(id) {
  const found = await within(["messages"], "readonly", (all) => answered(all.index("conversation").getAll(id)));
  return found ?? [...memory.messages.values()].filter((one) => one.conversation === id);
}

export async function keepHead(head) {
  if (!database) memory.conversations.set(head.id, head);
  await change(["conversations"], async (heads) => { heads.put(head); });
  others.postMessage(head.id);
}

export async function keepMessages(messages) {
  if (!database) for (const one of messages) memory.messages.set(one.id, one);
  await change(["messages"], async (all) => { for (const one of messages) all.put(one); });
}

export async function dropMessages(ids) {
  for (const id of ids) memory.messages.delete(id);
  await change(["messages"], async (all) => { for (const id of ids) all.delete(id); });
}

export async function dropConversation(id) {
  memory.conversations.delete(id);
  await change(["conversations", "messages"], async (heads, all) => {
    heads.delete(id);
    for (const key of await answered(all.index("conversation").getAllKeys(id))) all.delete(key);
  });
  forget(`draft:${id}`);
  forget(`pictures:${id}`);
  others.postMessage(id);
}

// Calls `act` with the id of a conversation that another tab changed.
export function onOtherTab(act) { others.onmessage = (event) => act(event.data); }

export function recall(name, other = null) {
  try { return JSON.parse(localStorage.getItem(PREFIX + name)) ?? other; } catch { return other; }
}

export function remember(name, value) {
  try { localStorage.setItem(PREFIX + name, JSON.stringify(value)); }
  catch { /* full, or forbidden: it lasts as long as the page */ }
}

export function forget(name) {
  try { localStorage.removeItem(PREFIX + name); } catch { /* forbidden */ }
}

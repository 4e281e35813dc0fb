// A conversation is a tree of messages; what is shown and sent is the path to its leaf.
// A message: { id, conversation, parent, at, role, text } with, by role, images, reasoning, calls, model, usage,
// answerId, firstTokenS, seconds, finish, failure. `finish` null: nothing has ended it yet.
import { allHeads, dropConversation, dropMessages, keepHead, keepMessages, messagesOf, recall } from "/chat/store.js";

const TITLE_CHARS = 60;
export const UNTITLED = "New conversation";
const known = new Map(); // those that were opened, by id: an answer goes on while another is shown

// Ids in the order of their making; crypto.randomUUID is there on localhost and over TLS alone.
export function newId() {
  const random = crypto.getRandomValues(new Uint32Array(2));
  return `${Date.now().toString(36)}-${random[0].toString(36)}${random[1].toString(36)}`;
}

function byAge(a, b) { return a.at - b.at || (a.id < b.id ? -1 : 1); }

export class Conversation {
  constructor(head, messages = []) {
    this.head = head;
    this.isKept = this.isDropped = false;
    this.messages = new Map(messages.map((one) => [one.id, one]));
    known.set(head.id, this);
  }

  static fresh() {
    const head = { id: newId(), title: "", changed: Date.now(), leaf: null, system: recall("system", "") };
    return new Conversation(head);
  }

  static async open(id) {
    if (known.has(id)) return known.get(id);
    const head = (await allHeads()).find((one) => one.id === id);
    if (!head) return null;
    const made = new Conversation(head, await messagesOf(id));
    made.isKept = true;
    return made;
  }

  get title() { return this.head.title || UNTITLED; }
  get leaf() { return this.messages.get(this.head.leaf) ?? null; }

  pathTo(message) {
    const path = [];
    for (let at = message; at && path.length <= this.messages.size; at = this.messages.get(at.parent)) path.push(at);
    return path.reverse();
  }

  path() { return this.pathTo(this.leaf); }

  // Parent's id -> its children, the oldest first.
  branches() {
    const found = new Map();
    for (const one of [...this.messages.values()].sort(byAge)) {
      if (!found.has(one.parent)) found.set(one.parent, []);
      found.get(one.parent).push(one);
    }
    return found;
  }

  // A message and all that follows it.
  from(message) {
    const branches = this.branches(), found = [message];
    for (const one of found) found.push(...(branches.get(one.id) ?? [])); // it grows as it is read
    return found;
  }

  // The end of the branch through `message` that was last added to.
  endOf(message) { return this.from(message).sort(byAge).at(-1); }

  async choose(message) {
    this.head.leaf = message?.id ?? null;
    await this.keep();
  }

  async add(fields) {
    const message = { id: newId(), conversation: this.head.id, parent: null, at: Date.now(), text: "", ...fields };
    this.messages.set(message.id, message);
    this.head.leaf = message.id;
    if (!this.head.title) this.head.title = titleOf(message.text);
    this.head.changed = Date.now();
    await Promise.all([keepMessages([message]), this.keep()]);
    return message;
  }

  async keep() {
    if (this.isDropped) return;
    this.isKept = true;
    await keepHead(this.head);
  }

  // An answer may end after its conversation was deleted.
  async keepMessage(message) {
    if (!this.isDropped) await keepMessages([message]);
  }

  async remove(message) {
    const gone = this.from(message), others = this.branches().get(message.parent).filter((one) => one !== message);
    const isShown = this.path().includes(message);
    for (const one of gone) this.messages.delete(one.id);
    await dropMessages(gone.map((one) => one.id));
    if (isShown) await this.choose(others.length ? this.endOf(others.at(-1)) : this.messages.get(message.parent));
  }

  async rename(title) {
    this.head.title = title.trim().slice(0, TITLE_CHARS);
    await this.keep();
  }

  async drop() {
    this.isDropped = true;
    known.delete(this.head.id);
    await dropConversation(this.head.id);
  }

  // Another tab changed it: it is read again when it is opened.
  static forget(id) { known.delete(id); }
}

export function titleOf(text) {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > TITLE_CHARS ? `${line.slice(0, TITLE_CHARS - 1)}…` : line;
}

const partsOf = (one) => [
  ...one.images.map((url) => ({ type: "image_url", image_url: { url } })),
  ...(one.text ? [{ type: "text", text: one.text }] : []),
];

// Whether an answer says nothing since it never came, which isn't one that is empty.
export function hasNotCome({ role, text, calls, finish }) {
  return role === "assistant" && !text && !calls?.length && finish !== "stop" && finish !== "length";
}

// A path as the API takes it.
export function asRequest(system, path) {
  const messages = system.trim() ? [{ role: "system", content: system.trim() }] : [];
  path.forEach((one, i) => {
    if (one.role === "user") messages.push({ role: "user", content: one.images?.length ? partsOf(one) : one.text });
    else if (one.role === "tool")
      messages.push(...one.results.map(({ id, text }) => ({ role: "tool", tool_call_id: id, content: text })));
    else if (path[i + 1]?.role === "tool") messages.push({ role: "assistant", content: one.text, tool_calls: one.calls });
    else if (!hasNotCome(one)) messages.push({ role: "assistant", content: one.text });
  });
  return messages;
}

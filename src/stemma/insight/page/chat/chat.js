// The chat page: what is asked, which conversation is shown, which answers are under way.
import { Answer } from "/chat/answer.js";
import { attachedImages, beginAttachments, setAttached } from "/chat/attachments.js";
import { Conversation, hasNotCome } from "/chat/conversation.js";
import { beginList, showList, toggle } from "/chat/conversations.js";
import { $ } from "/chat/elements.js";
import { explain } from "/chat/explanation.js";
import { beginServer, chosenModel, failed } from "/chat/server.js";
import { beginSettings, requestFields } from "/chat/settings.js";
import { forget, onOtherTab, openStore, recall, remember } from "/chat/store.js";
import { following, scrollToEnd, Turns } from "/chat/turns.js";

const underWay = new Map(); // conversation's id -> its answer
let shown = null; // the conversation on the page
const acts = { edit, regenerate, retry, proceed, remove, choose, explain, results };
const turns = new Turns($("turns"), acts);

// Beside the question, which stays in sight.
function tell(text, isBad = false) {
  if ($("state").textContent !== text) $("state").textContent = text;
  $("state").classList.toggle("bad", isBad);
}

const isAnswered = (message) => underWay.get(message.conversation)?.message === message;

function show() {
  following(() => turns.show(shown, isAnswered));
  const isBusy = underWay.has(shown.head.id);
  $("send").hidden = isBusy;
  $("stop").hidden = !isBusy;
}

// Drafts outlive a reload. One of a conversation that was never sent has no id to be found by.
const draftKey = () => (shown.isKept ? shown.head.id : "new");

function keepDraft() { remember(`draft:${draftKey()}`, $("question").value); }

function keepAttached() {
  keepDraft(); // a text file becomes part of it
  remember(`pictures:${draftKey()}`, attachedImages());
}

function dropDraft() {
  $("question").value = "";
  setAttached([]);
  forget(`draft:${draftKey()}`);
  forget(`pictures:${draftKey()}`);
}

function put(conversation) {
  shown = conversation;
  $("question").value = recall(`draft:${draftKey()}`, "");
  setAttached(recall(`pictures:${draftKey()}`, []));
  $("system").value = shown.head.system;
  document.title = `${shown.title} - Stemma`;
  tell(underWay.has(shown.head.id) ? "answering" : "");
  show();
  scrollToEnd();
  showList(shown.head.id);
}

function beginAnew() {
  history.replaceState(null, "", location.pathname);
  put(Conversation.fresh());
  toggle(false);
  $("question").focus();
}

async function open(id) {
  if (shown?.head.id === id) return;
  const found = id && (await Conversation.open(id));
  if (!found) return beginAnew();
  history.replaceState(null, "", `#${id}`);
  toggle(false);
  put(found);
}

// Where the next question hangs: a question that got no answer is a branch of its own, and isn't sent along.
function placeForNext(conversation) {
  let { leaf } = conversation;
  if (leaf && hasNotCome(leaf)) leaf = conversation.messages.get(leaf.parent);
  return leaf?.role === "user" ? leaf.parent : leaf?.id ?? null;
}

function fieldsToSend() {
  try { return { ...requestFields(), ...(chosenModel() ? { model: chosenModel() } : {}) }; }
  catch (error) { $("panel").open = true; tell(error.message, true); return null; }
}

async function send() {
  const conversation = shown, text = $("question").value.trim(), images = [...attachedImages()];
  if (!(text || images.length) || underWay.has(conversation.head.id) || !fieldsToSend()) return;
  dropDraft();
  await ask(conversation, placeForNext(conversation), { role: "user", text, images });
}

async function ask(conversation, parent, question) {
  if (underWay.has(conversation.head.id) || !fieldsToSend()) return;
  const adding = conversation.add({ parent, ...question });
  const answering = answer(conversation, conversation.leaf.id);
  await adding;
  await answering;
}

// All that changes the conversation happens before the first wait: two clicks don't make two answers.
async function answer(conversation, parent) {
  const options = fieldsToSend();
  if (underWay.has(conversation.head.id) || !options) return;
  conversation.add({ parent, role: "assistant", finish: null, model: options.model });
  await run(conversation, conversation.leaf, options);
}

async function run(conversation, message, options) {
  const mine = new Answer(conversation, message, options, () => turns.rowOf(message)?.show(true));
  underWay.set(conversation.head.id, mine);
  if (conversation === shown) {
    history.replaceState(null, "", `#${conversation.head.id}`);
    tell("answering");
    show();
    scrollToEnd();
    turns.rowOf(message)?.show(true);
  }
  showList(shown.head.id);
  await mine.run();
  underWay.delete(conversation.head.id);
  conversation.keep(); // other tabs look again
  if (conversation === shown) {
    show();
    tell(message.finish === "stopped" ? "stopped" : "");
    $("question").focus({ preventScroll: true });
  }
  if (mine.error) failed(mine.error);
}

function mayChange() {
  if (!underWay.has(shown.head.id)) return true;
  tell("stop the answer first", true);
  return false;
}

function edit(message, text) {
  if (!mayChange() || !fieldsToSend()) return false;
  ask(shown, message.parent, { role: "user", text, images: message.images ?? [] });
  return true;
}

function regenerate(message) { if (mayChange()) answer(shown, message.parent); }
function results(message, found) { if (mayChange()) ask(shown, message.id, { role: "tool", results: found }); }

// A failed answer makes room for the next try; one that said something stays as a branch.
async function retry(message) {
  if (!mayChange() || !fieldsToSend()) return;
  const conversation = shown;
  answer(conversation, message.parent);
  if (message.text) return;
  await conversation.remove(message);
  show();
}

function proceed(message) {
  const options = mayChange() && fieldsToSend();
  if (!options) return;
  Object.assign(message, { finish: null, failure: undefined, usage: undefined });
  run(shown, message, options);
}

async function remove(message) {
  if (!mayChange() || !confirm("Delete this and all that follows it?")) return;
  await shown.remove(message);
  show();
}

async function choose(message) {
  if (!mayChange()) return;
  await shown.choose(shown.endOf(message));
  show();
}

async function rename(id) {
  const conversation = await Conversation.open(id);
  const title = prompt("Name of the conversation", conversation.title);
  if (!title?.trim()) return;
  await conversation.rename(title);
  showList(shown.head.id);
}

async function drop(id) {
  const conversation = await Conversation.open(id);
  if (!confirm(`Delete "${conversation.title}"?`)) return;
  underWay.get(id)?.stop();
  await conversation.drop();
  if (id === shown.head.id) beginAnew();
  else showList(shown.head.id);
}

// Another tab changed one: the list is read again, and the conversation if it is on this page too.
async function heed(id) {
  if (!underWay.has(id)) Conversation.forget(id);
  if (id === shown.head.id && !underWay.has(id)) {
    const found = await Conversation.open(id);
    if (found) { shown = found; show(); }
  }
  showList(shown.head.id);
}

function bind() {
  $("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  $("question").addEventListener("input", keepDraft);
  $("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("ask").requestSubmit(); }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !$("why").open) underWay.get(shown.head.id)?.stop();
    if (event.key.toLowerCase() === "o" && event.ctrlKey && event.shiftKey) { event.preventDefault(); beginAnew(); }
  });
  $("stop").addEventListener("click", () => underWay.get(shown.head.id)?.stop());
  $("again").addEventListener("click", beginAnew);
  $("system").addEventListener("input", () => {
    shown.head.system = $("system").value;
    remember("system", shown.head.system); // new conversations begin with it
    if (shown.isKept) shown.keep();
  });
  addEventListener("hashchange", () => { // but for the link that skips to the question
    if (!$(location.hash.slice(1))) open(location.hash.slice(1));
  });
  addEventListener("pagehide", () => { for (const one of underWay.values()) one.conversation.keepMessage(one.message); });
}

async function begin() {
  const isKept = await openStore((message) => tell(message, true));
  beginSettings();
  beginAttachments(tell, keepAttached);
  beginList({ open, rename, remove: drop, tell });
  onOtherTab(heed);
  bind();
  await open(location.hash.slice(1));
  await beginServer(tell);
  if (!isKept) tell("this browser keeps no conversations: they are gone when the page is closed");
}

begin();

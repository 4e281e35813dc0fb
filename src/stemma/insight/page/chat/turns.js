// The turns on the page: a row for each message of the path. Rows that stay are left as they are.
import { STOPPED } from "/chat/answer.js";
import { button, copyButton, make } from "/chat/elements.js";
import { Markdown } from "/chat/markdown.js";
import { reuseNodes, speedWords } from "/chat/reuse.js";

const NEAR_END_PX = 80, SHARE_OF_TIME = 4;
const NAMES = { user: "Question", assistant: "Answer", tool: "Results" };
const page = document.documentElement;

function isAtEnd() { return page.scrollHeight - page.scrollTop - page.clientHeight < NEAR_END_PX; }
export function scrollToEnd() { page.scrollTop = page.scrollHeight; }

// The page follows an answer unless its reader has scrolled up.
export function following(change) {
  const follows = isAtEnd();
  change();
  if (follows) scrollToEnd();
}

// `acts`: what buttons do, each given a message: edit, regenerate, proceed, remove, choose, explain, results.
class Row {
  constructor(message, acts) {
    Object.assign(this, { message, acts });
    this.branches = make("span", { className: "branches" });
    const heading = make("h2", { className: "unseen", textContent: NAMES[message.role] }); // for screen readers
    this.item = make("li", { className: `turn ${message.role}` }, heading);
    this.item.dataset.message = message.id;
  }

  // "2/3" with a way to the branches beside it.
  showSiblings(siblings) {
    const place = siblings.indexOf(this.message), label = `${place + 1}/${siblings.length}`;
    if (this.label === label) return;
    const hadFocus = this.branches.contains(document.activeElement);
    this.label = label;
    const to = (i, text, ariaLabel) => button(text, () => this.acts.choose(siblings[i]), { ariaLabel, disabled: !siblings[i] });
    this.branches.replaceChildren(...(siblings.length < 2 ? [] : [
      to(place - 1, "‹", "The branch before"), make("span", { textContent: label }), to(place + 1, "›", "The next branch")]));
    if (hadFocus) this.branches.querySelector("button:enabled")?.focus();
  }

  actions(...more) {
    const act = (label, name, ariaLabel) => button(label, () => this.acts[name](this.message), { ariaLabel });
    return make("p", { className: "actions" }, this.branches, copyButton(() => this.message.text),
      more.map(([label, name, ariaLabel]) => act(label, name, ariaLabel ?? label)),
      act("Delete", "remove", "Delete from here on"));
  }
}

class QuestionRow extends Row {
  constructor(message, acts) {
    super(message, acts);
    this.text = make("div", { className: "question", textContent: message.text });
    const images = (message.images ?? []).map((src, i) => make("img", { src, alt: `Picture ${i + 1} of the question` }));
    this.below = this.actions();
    this.below.children[1].after(button("Edit", () => this.edit()));
    this.item.append(this.text, ...images, this.below);
  }

  show() {}

  edit() {
    const field = make("textarea", { value: this.message.text, rows: 4, ariaLabel: "The question, changed" });
    const end = () => { form.replaceWith(this.text); this.below.hidden = false; };
    const form = make("form", { className: "edit" }, field,
      make("p", { className: "keys" }, make("button", { textContent: "Ask this instead" }), button("Cancel", end)));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!field.value.trim()) return;
      if (this.acts.edit(this.message, field.value.trim())) end();
    });
    this.text.replaceWith(form);
    this.below.hidden = true;
    field.focus();
  }
}

class ResultRow extends Row {
  constructor(message, acts) {
    super(message, acts);
    this.item.append(...message.results.map((one) => make("pre", { textContent: one.text, tabIndex: 0 })), this.actions());
  }

  show() {}
}

class AnswerRow extends Row {
  constructor(message, acts) {
    super(message, acts);
    this.thought = make("details", { className: "thought", hidden: true }, make("summary", { textContent: "Reasoning" }));
    this.reasoning = make("p", { className: "reasoning" });
    this.thought.append(this.reasoning);
    this.said = make("div", { className: "answer" });
    this.below = make("div", { className: "below" });
    this.item.append(this.thought, this.said, this.below);
    this.markdown = new Markdown(this.said);
    this.wait = 0;
    this.timer = null;
  }

  // While an answer grows, what it says is laid out for a fourth of the time at most.
  show(isUnderWay) {
    if (!isUnderWay) { clearTimeout(this.timer); this.timer = null; this.showText(); this.showEnd(); return; }
    if (this.ended) this.showBegin();
    this.timer ??= setTimeout(() => { this.timer = null; following(() => this.showText()); }, this.wait);
  }

  showBegin() {
    this.ended = false;
    this.below.replaceChildren();
  }

  showText() {
    const began = performance.now(), { text, reasoning = "" } = this.message;
    this.thought.hidden = !reasoning;
    const known = this.reasoning.textContent.length;
    if (reasoning.length > known) this.reasoning.append(reasoning.slice(known));
    if (text !== this.markdown.text) this.markdown.show(text);
    this.wait = SHARE_OF_TIME * (performance.now() - began);
  }

  showEnd() {
    if (this.ended) return;
    this.ended = true;
    const { message } = this, again = ["Regenerate", "regenerate"];
    const nodes = [...this.calls(), ...this.outcome()];
    if (message.usage) nodes.push(...reuseNodes(message));
    const speed = speedWords(message);
    if (speed) nodes.push(make("p", { className: "speed", textContent: speed }));
    nodes.push(this.actions(again, ...(message.answerId ? [["Explain", "explain", "Explain what was reused"]] : [])));
    this.below.replaceChildren(...nodes);
  }

  // How it ended, where it isn't by itself, with what can be done.
  outcome() {
    const { finish, failure, text, reasoning } = this.message;
    const proceed = text ? [button("Continue", () => this.acts.proceed(this.message))] : [];
    const said = (words, ...buttons) => [make("p", { className: "bad outcome" }, `${words} `, buttons)];
    if (finish === "failed") return said(failure, ...proceed, button("Try again", () => this.acts.retry(this.message)));
    if (finish === "length" && !text && reasoning)
      return said("Cut by the token limit before it began to answer: allow more tokens.");
    if (finish === "length") return said("Cut by the token limit.", ...proceed);
    if (finish === STOPPED) return said("Stopped.", ...proceed);
    if (!finish) return said("Not whole: its page was closed, or another tab is at it.", ...proceed);
    return [];
  }

  calls() {
    const { calls } = this.message;
    if (!calls?.length) return [];
    const shown = calls.map((call, i) => make("details", { className: "call", open: true },
      make("summary", { textContent: `Call of ${call.function.name}` }),
      make("pre", { textContent: call.function.arguments, tabIndex: 0 }),
      make("textarea", { rows: 2, ariaLabel: `Result of call ${i + 1}, ${call.function.name}`, placeholder: "Result" })));
    const form = make("form", { className: "calls" }, shown, make("button", { textContent: "Send results" }));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const fields = [...form.querySelectorAll("textarea")];
      this.acts.results(this.message, calls.map((call, i) => ({ id: call.id, text: fields[i].value })));
    });
    return [form];
  }
}

const ROWS = { user: QuestionRow, assistant: AnswerRow, tool: ResultRow };

export class Turns {
  constructor(list, acts) {
    Object.assign(this, { list, acts });
    this.rows = [];
  }

  // `isUnderWay(message)`: whether it is being answered here and now.
  show(conversation, isUnderWay) {
    const path = conversation.path();
    let same = 0;
    while (same < path.length && this.rows[same]?.message === path[same]) same++;
    for (const row of this.rows.splice(same)) row.item.remove();
    for (const message of path.slice(same)) {
      const row = new ROWS[message.role](message, this.acts);
      this.rows.push(row);
      this.list.append(row.item);
    }
    const branches = conversation.branches();
    for (const row of this.rows) {
      row.showSiblings(branches.get(row.message.parent));
      row.show(isUnderWay(row.message));
    }
  }

  rowOf(message) { return this.rows.findLast((row) => row.message === message); }
}

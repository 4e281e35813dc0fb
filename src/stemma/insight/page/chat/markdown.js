// Markdown as nodes of the page, also of a text that still grows: what is whole is made once.
import { blocksOf } from "/chat/blocks.js";
import { copyButton, make } from "/chat/elements.js";
import { coloured } from "/chat/colours.js";
import { inline } from "/chat/inline.js";

const KINDS = {
  code: ({ language, text }) => {
    const code = make("code", {}, coloured(text, language));
    const pre = make("pre", { tabIndex: 0 }, code);
    return make("div", { className: "code" },
      make("p", { className: "code-head" }, make("span", { textContent: language || "text" }), copyButton(() => text)), pre);
  },
  heading: ({ level, text }) => make(`h${Math.min(6, level + 2)}`, {}, inline(text)), // the page has h1 and h2
  rule: () => make("hr"),
  quote: ({ blocks }) => make("blockquote", {}, blocks.map(nodeOf)),
  list: ({ isOrdered, start, items }) => {
    const made = make(isOrdered ? "ol" : "ul", {}, items.map((blocks) => make("li", {}, tight(blocks))));
    if (isOrdered && start !== 1) made.start = start;
    return made;
  },
  table: ({ head, rows, sides }) => {
    const row = (cells, tag) => make("tr", {}, cells.map((cell, i) => make(tag, { className: sides[i] }, inline(cell))));
    return make("div", { className: "scroll", tabIndex: 0 }, make("table", {},
      make("thead", {}, row(head, "th")), make("tbody", {}, rows.map((cells) => row(cells, "td")))));
  },
  paragraph: ({ text }) => make("p", {}, inline(text)),
};

function nodeOf(block) { return KINDS[block.kind](block); }

const TASKS = { "[ ] ": "☐ ", "[x] ": "☑ ", "[X] ": "☑ " };

// An item's first paragraph stands beside its marker.
function tight(blocks) {
  return blocks.flatMap((block, i) => {
    if (i || block.kind !== "paragraph") return nodeOf(block);
    const task = TASKS[block.text.slice(0, 4)];
    return task ? [task, ...inline(block.text.slice(4))] : inline(block.text);
  });
}

export class Markdown {
  constructor(place) {
    this.place = place;
    this.text = "";
    this.from = 0; // where the first block begins that may still change
    this.open = []; // the nodes of what may
  }

  // Show `text`, which begins with what was shown before.
  show(text) {
    if (!text.startsWith(this.text)) this.clear();
    this.text = text;
    const rest = text.slice(this.from), blocks = blocksOf(rest);
    for (const node of this.open) node.remove();
    this.open = [];
    const firstOpen = this.numWhole(rest, blocks);
    blocks.forEach((block, i) => {
      const node = nodeOf(block);
      this.place.append(node);
      if (i >= firstOpen) this.open.push(node);
    });
    if (firstOpen) this.from += offsetOf(rest, blocks[firstOpen].line);
  }

  // A block is whole once the first line of the next one is.
  numWhole(rest, blocks) {
    const lastLine = rest.split("\n").length - 1;
    return Math.max(0, blocks.findLastIndex((block) => block.line < lastLine));
  }

  clear() {
    this.place.replaceChildren();
    this.from = 0;
    this.open = [];
  }
}

function offsetOf(text, line) {
  let at = 0;
  for (; line > 0; line--) at = text.indexOf("\n", at) + 1;
  return at;
}

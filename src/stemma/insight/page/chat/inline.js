// Markdown within a line: code, emphasis, links. One pass; a delimiter is looked for among MAX_DEPTH open ones.
import { make } from "/chat/elements.js";

const MAX_DEPTH = 12, MAX_URL = 2048;
const TAGS = { "*": "em", "**": "strong", "_": "em", "__": "strong", "~~": "del" };
const DESTINATION = /\(<?([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*)>?(?:\s+"[^"\n]*")?\)/y;
const BARE = /https?:\/\/[^\s<>"`\])]{1,2000}/y;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const isSpace = (c) => c === undefined || /\s/.test(c);
const isWord = (c) => c !== undefined && /[\p{L}\p{N}]/u.test(c);

// The address if it may be followed: nothing but http and https.
export function safeUrl(text) {
  if (text.length > MAX_URL || !URL.canParse(text)) return null;
  const url = new URL(text);
  return url.protocol === "https:" || url.protocol === "http:" ? url.href : null;
}

function link(href, children) {
  return make("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, children);
}

class Line {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.plain = "";
    this.open = [{ marker: "", nodes: [] }]; // what has begun, innermost last
    this.ticks = null;
  }

  get top() { return this.open.at(-1); }

  say() {
    if (this.plain) this.top.nodes.push(this.plain);
    this.plain = "";
  }

  // What was opened above `level` and didn't end is text.
  fall(level) {
    while (this.open.length > level + 1) {
      const { marker, nodes } = this.open.pop();
      this.top.nodes.push(marker);
      for (const node of nodes) this.top.nodes.push(node);
    }
  }

  begin(marker) {
    if (this.open.length > MAX_DEPTH) { this.plain += marker; return; }
    this.say();
    this.open.push({ marker, nodes: [] });
  }

  end(level, wrap) {
    this.say();
    this.fall(level);
    const { nodes } = this.open.pop();
    this.top.nodes.push(wrap(nodes));
  }

  nodes() {
    while (this.at < this.text.length) this.step(this.text[this.at]);
    this.say();
    this.fall(0);
    return this.top.nodes;
  }

  step(c) {
    const { text, at } = this;
    if (c === "\\" && PUNCTUATION.test(text[at + 1] ?? "")) { this.plain += text[at + 1]; this.at += 2; }
    else if (c === "`") this.code();
    else if (c === "*" || c === "_" || (c === "~" && text[at + 1] === "~")) this.emphasis(c);
    else if (c === "!" && text[at + 1] === "[") this.at++; // a picture from elsewhere is a link to it
    else if (c === "[") { this.begin("["); this.at++; }
    else if (c === "]") this.bracket();
    else if (c === "h" && !isWord(text[at - 1]) && this.bare()) return;
    else { this.plain += c; this.at++; }
  }

  run(c) {
    let end = this.at;
    while (this.text[end] === c) end++;
    return end - this.at;
  }

  // Runs of backticks by length, found once; those before `at` are dropped for good.
  closing(length, from) {
    if (!this.ticks) {
      this.ticks = new Map();
      for (const { 0: run, index } of this.text.matchAll(/`+/g)) {
        if (!this.ticks.has(run.length)) this.ticks.set(run.length, { places: [], next: 0 });
        this.ticks.get(run.length).places.push(index);
      }
    }
    const known = this.ticks.get(length);
    while (known && known.places[known.next] < from) known.next++;
    return known?.places[known.next];
  }

  code() {
    const length = this.run("`"), from = this.at + length, to = this.closing(length, from);
    if (to === undefined) { this.plain += "`".repeat(length); this.at = from; return; }
    this.say();
    const inner = this.text.slice(from, to), isPadded = inner[0] === " " && inner.at(-1) === " " && inner.trim();
    this.top.nodes.push(make("code", { textContent: isPadded ? inner.slice(1, -1) : inner }));
    this.at = to + length;
  }

  emphasis(c) {
    let left = this.run(c);
    const before = this.text[this.at - 1], after = this.text[this.at + left];
    this.at += left;
    const mayEnd = !isSpace(before) && !(c === "_" && isWord(after));
    const mayBegin = !isSpace(after) && !(c === "_" && isWord(before));
    while (left) {
      const level = mayEnd ? this.open.findLastIndex((one) => one.marker[0] === c && one.marker.length <= left) : -1;
      const marker = level > 0 ? this.open[level].marker : c.repeat(Math.min(2, left));
      if (level > 0) this.end(level, (nodes) => make(TAGS[marker], {}, nodes));
      else if (mayBegin && TAGS[marker]) this.begin(marker);
      else { this.plain += c.repeat(left); return; }
      left -= marker.length;
    }
  }

  bracket() {
    const level = this.open.findLastIndex((one) => one.marker === "[");
    DESTINATION.lastIndex = ++this.at;
    const found = level > 0 && this.text[this.at] === "(" ? DESTINATION.exec(this.text) : null;
    if (!found) {
      this.say();
      if (level > 0) this.fall(level - 1);
      this.plain += "]";
      return;
    }
    this.at += found[0].length;
    const href = safeUrl(found[1]);
    this.end(level, (nodes) => (href ? link(href, nodes) : make("span", {}, nodes, ` (${found[1]})`)));
  }

  bare() {
    BARE.lastIndex = this.at;
    const found = BARE.exec(this.text)?.[0].replace(/[.,;:!?'*_~]{1,9}$/, "");
    const href = found && safeUrl(found);
    if (!href) return false;
    this.say();
    this.top.nodes.push(link(href, [found]));
    this.at += found.length;
    return true;
  }
}

export function inline(text) { return new Line(text).nodes(); }

// Markdown's blocks out of lines: a list of { kind, line, ... }, `line` being the first one's number.
// Each level of nesting reads its lines once more, and there are MAX_DEPTH at most: linear time.
const MAX_DEPTH = 8, MAX_COLUMNS = 64;
const FENCE = /^ {0,3}(`{3,}|~{3,}) {0,3}([^`\s]*)(?:\s[^`]*)?$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]|$)/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( {1,4}|$)/;
const DELIMITERS = /^[ |:-]*$/;

const isBlank = (line) => line.trim() === "";
const indent = (line) => line.length - line.trimStart().length;

class Reader {
  constructor(lines, depth) {
    this.lines = lines.map((line) => (line.includes("\t") ? line.replaceAll("\t", "    ") : line));
    this.raw = lines;
    this.depth = depth;
    this.at = 0;
  }

  get line() { return this.lines[this.at]; }
  get isOver() { return this.at >= this.lines.length; }

  blocks() {
    const found = [];
    while (!this.isOver) {
      if (isBlank(this.line)) { this.at++; continue; }
      const line = this.at;
      found.push({ line, ...this.block() });
    }
    return found;
  }

  block() {
    if (FENCE.test(this.line)) return this.code();
    if (HEADING.test(this.line)) return this.heading();
    if (RULE.test(this.line)) { this.at++; return { kind: "rule" }; }
    if (this.depth < MAX_DEPTH && QUOTE.test(this.line)) return this.quote();
    if (this.depth < MAX_DEPTH && ITEM.test(this.line)) return this.list();
    return this.table() ?? this.paragraph();
  }

  code() {
    const [, fence, language] = FENCE.exec(this.line), margin = indent(this.line), text = [];
    for (this.at++; !this.isOver; this.at++) {
      const end = this.line.trim();
      if (end.length >= fence.length && indent(this.line) < 4 && end === fence[0].repeat(end.length)) {
        this.at++;
        break;
      }
      const line = this.raw[this.at];
      text.push(line.slice(Math.min(margin, indent(line))));
    }
    return { kind: "code", language, text: text.join("\n") };
  }

  heading() {
    const level = HEADING.exec(this.line)[1].length;
    const text = this.lines[this.at++].trim().slice(level).trim();
    let end = text.length;
    while (text[end - 1] === "#") end--;
    return { kind: "heading", level, text: end === 0 || text[end - 1] === " " ? text.slice(0, end).trim() : text };
  }

  quote() {
    const inner = [];
    for (; !this.isOver && QUOTE.test(this.line); this.at++) inner.push(this.line.replace(QUOTE, ""));
    return { kind: "quote", blocks: new Reader(inner, this.depth + 1).blocks() };
  }

  list() {
    const first = ITEM.exec(this.line)[2], isOrdered = first.length > 1, items = [];
    while (!this.isOver) {
      const found = RULE.test(this.line) ? null : ITEM.exec(this.line);
      if (!found || (found[2].length > 1) !== isOrdered) break;
      items.push(this.item(found));
    }
    return { kind: "list", isOrdered, start: parseInt(first, 10), items };
  }

  // An item's lines: those indented below its marker, and those that go on with its last paragraph.
  item([marker, margin]) {
    const inner = [this.line.slice(marker.length)], least = margin.length + 2;
    let end = 1;
    for (let i = this.at + 1; i < this.lines.length; i++) {
      const line = this.lines[i];
      if (isBlank(line)) { inner.push(""); continue; }
      const isLazy = !isBlank(this.lines[i - 1]) && !begins(line) && !ITEM.test(line);
      if (indent(line) < least && !isLazy) break;
      inner.push(line.slice(Math.min(indent(line), marker.length)));
      end = inner.length;
    }
    this.at += inner.length; // blank lines at its end belong to nobody
    return new Reader(inner.slice(0, end), this.depth + 1).blocks();
  }

  table() {
    const under = this.lines[this.at + 1];
    if (!this.line.includes("|") || !under?.includes("-") || !DELIMITERS.test(under)) return null;
    const head = cells(this.line), ways = cells(under);
    if (head.length !== ways.length || head.length > MAX_COLUMNS || ways.some((one) => !one.includes("-"))) return null;
    const rows = [];
    for (this.at += 2; !this.isOver && this.line.includes("|"); this.at++) {
      const row = cells(this.line);
      rows.push(head.map((_, i) => row[i] ?? ""));
    }
    const side = (way) => (way.endsWith(":") ? (way.startsWith(":") ? "center" : "right") : "left");
    return { kind: "table", head, rows, sides: ways.map(side) };
  }

  paragraph() {
    const text = [];
    do text.push(this.lines[this.at++].trim()); while (!this.isOver && !isBlank(this.line) && !begins(this.line));
    return { kind: "paragraph", text: text.join("\n") };
  }
}

// Whether a line ends the paragraph before it. A list does if its first item says something and counts from 1.
function begins(line) {
  if (FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)) return true;
  const item = ITEM.exec(line);
  return item !== null && line.length > item[0].length && (item[2].length === 1 || parseInt(item[2], 10) === 1);
}

// A row's cells: parted at bars, but not at `\|` nor within code.
function cells(line) {
  const found = [""];
  let isCode = false;
  const text = line.trim().replace(/^\|/, "");
  for (let i = 0; i < text.length; i++) {
    if (text[i] === "\\" && text[i + 1] === "|") { found[found.length - 1] += "|"; i++; }
    else if (text[i] === "|" && !isCode) found.push("");
    else {
      if (text[i] === "`") isCode = !isCode;
      found[found.length - 1] += text[i];
    }
  }
  if (found.length > 1 && isBlank(found.at(-1))) found.pop();
  return found.map((cell) => cell.trim());
}

export function blocksOf(text) { return new Reader(text.split("\n"), 0).blocks(); }

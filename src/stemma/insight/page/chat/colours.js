// Code with its comments, strings, numbers and common keywords marked: one expression for all languages,
// whose branches begin with different characters, so that time is linear.
import { make } from "/chat/elements.js";

const MAX_CHARS = 50_000;
const HASH = new Set(["python", "py", "sh", "bash", "shell", "zsh", "yaml", "yml", "toml", "ruby", "rb", "r", "perl",
  "dockerfile", "makefile", "make", "ini", "nginx", "julia", "elixir"]);
const DASH = new Set(["sql", "lua", "haskell", "hs", "ada"]);
const PLAIN = new Set(["", "text", "txt", "plain", "markdown", "md", "diff", "console", "output"]);
const KEYWORDS = new Set(`abstract and as async await begin bool boolean break case catch char class const continue
  def default defer del delete do double echo elif else elseif end enum esac except export extends extern false fi
  final finally float fn for foreach from func function global go if impl implements import in include instanceof int
  interface is lambda let local long loop match mod module mut namespace new nil none not null of or package pass
  private protected pub public raise require return select self short static struct super switch then this throw
  throws trait true try type typedef typeof union unless unsigned until use using var virtual void when where while
  with yield insert into values update set create table join on group by order limit`.split(/\s+/));
const STRING = /"(?:[^"\\\n]|\\.){0,5000}"|'(?:[^'\\\n]|\\.){0,5000}'/;
const WORD = /\b\d[\w.]{0,40}|[A-Za-z_$][\w$]*/;

function parts(comment) { return new RegExp(`(${comment})|(${STRING.source})|(${WORD.source})`, "g"); }

const SLASHED = parts(String.raw`\/\/[^\n]*|\/\*[^*]*(?:\*(?!\/)[^*]*)*(?:\*\/|$)`);
const HASHED = parts("#[^\\n]*"), DASHED = parts("--[^\\n]*");

function kindOf(found) {
  if (found[1]) return "comment";
  if (found[2]) return "string";
  if (/\d/.test(found[3][0])) return "number";
  return KEYWORDS.has(found[3]) || KEYWORDS.has(found[3].toLowerCase()) && found[3] === found[3].toUpperCase() ? "keyword" : null;
}

export function coloured(text, language) {
  const name = language.toLowerCase();
  if (PLAIN.has(name) || text.length > MAX_CHARS) return [text];
  const made = [];
  let from = 0;
  for (const found of text.matchAll(HASH.has(name) ? HASHED : DASH.has(name) ? DASHED : SLASHED)) {
    const kind = kindOf(found);
    if (!kind) continue;
    made.push(text.slice(from, found.index), make("span", { className: `code-${kind}`, textContent: found[0] }));
    from = found.index + found[0].length;
  }
  return [...made, text.slice(from)];
}

// The list of conversations: choose, rename, delete, find, export and import.
import { UNTITLED } from "/chat/conversation.js";
import { $, button, download, make } from "/chat/elements.js";
import { allHeads } from "/chat/store.js";
import { exported, imported } from "/chat/transfer.js";

let acts = null, current = null;

// `given`: open(id), rename(id), remove(id), tell(text, isBad).
export function beginList(given) {
  acts = given;
  $("find").addEventListener("input", filter);
  $("export").addEventListener("click", () => save());
  $("import").addEventListener("click", () => $("import-file").click());
  $("import-file").addEventListener("change", load);
  $("menu").addEventListener("click", () => toggle($("menu").ariaExpanded !== "true"));
}

export function toggle(isOpen) {
  $("menu").ariaExpanded = String(isOpen);
  document.body.classList.toggle("with-list", isOpen);
}

async function save(ids = null) {
  const day = new Date().toISOString().slice(0, 10);
  download(`stemma-conversations-${day}.json`, await exported(ids));
}

async function load() {
  const [file] = $("import-file").files;
  $("import-file").value = "";
  if (!file) return;
  try {
    const ids = await imported(file);
    await showList(current);
    if (ids.length) await acts.open(ids[0]);
    acts.tell(`${ids.length} ${ids.length === 1 ? "conversation" : "conversations"} imported`);
  } catch (error) { acts.tell(`${file.name} can't be imported: ${error.message}`, true); }
}

function entry(head) {
  const title = head.title || UNTITLED;
  const link = make("a", { href: `#${head.id}`, textContent: title });
  if (head.id === current) link.ariaCurrent = "page";
  const more = make("details", { className: "more" }, make("summary", { textContent: "…", ariaLabel: `More for ${title}` }),
    button("Rename", () => acts.rename(head.id)), button("Export", () => save([head.id])),
    button("Delete", () => acts.remove(head.id)));
  return make("li", {}, link, more);
}

export async function showList(id) {
  current = id;
  const heads = (await allHeads()).sort((a, b) => b.changed - a.changed);
  $("conversations").replaceChildren(...heads.map(entry));
  filter();
}

function filter() {
  const wanted = $("find").value.trim().toLowerCase();
  for (const item of $("conversations").children)
    item.hidden = !item.firstChild.textContent.toLowerCase().includes(wanted);
}

// The tree as the server has it now, and the same as a list for who can't see the picture.
import { $, button, make, number } from "/dashboard/elements.js";
import { get, keyOf } from "/dashboard/http.js";
import { Tree } from "/dashboard/tree.js";

const MAX_BRANCHES = 50, EVERY_MS = 15_000;
const tree = new Tree($("tree"), (text) => { $("node").textContent = text; }, showBranches);
window.stemmaTree = tree;

// The chosen node and its branches, each a button.
function showBranches(chosen) {
  const node = tree.nodes[chosen], list = $("branches"), hadFocus = list.contains(document.activeElement);
  const item = (label, to) => make("li", {}, button(label, () => { tree.choose(to); tree.zoom(to); }));
  $("chosen").textContent = tree.sentence(chosen);
  const entries = node.children.slice(0, MAX_BRANCHES).map((c) => item(tree.sentence(c), c));
  if (node.parent >= 0) entries.unshift(item(`Back to ${JSON.stringify(tree.nodes[node.parent].label)}`, node.parent));
  list.replaceChildren(...entries);
  const left = node.children.length - MAX_BRANCHES;
  $("branches-left").textContent = left > 0 ? `${number(left)} smaller branches are left out.` : "";
  if (hadFocus) list.querySelector("button")?.focus();
}

async function read() {
  try {
    const data = await get("/admin/tree", keyOf("admin"));
    const { view } = tree;
    tree.set(data);
    if (view.to - view.from < 1) { tree.view = view; tree.draw(); }
    const shown = data.parent.length;
    $("tree-size").textContent = `${number(data.num_nodes)} nodes` + (shown < data.num_nodes ? `, the first ${number(shown)} are drawn` : "");
  } catch (problem) { $("tree-size").textContent = problem.message; }
}

export function beginTree() {
  $("redraw").addEventListener("click", read);
  setInterval(() => { if (!document.hidden && tree.view.to - tree.view.from === 1) read(); }, EVERY_MS);
  read();
}

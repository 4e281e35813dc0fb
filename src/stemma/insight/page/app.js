import { Charts } from "/dashboard/charts.js";
import { explanationNodes, quoted } from "/dashboard/explained.js";
import { ask, dropKey, follow, Refused, setKey } from "/dashboard/feed.js";
import { span, Tree } from "/dashboard/tree.js";

const $ = (id) => document.getElementById(id);
const MAX_ROWS = 50, TREE_EVERY_MS = 15000, RETRY_MS = 2000;
const number = (n) => n.toLocaleString("en", { maximumFractionDigits: 0 });
const percent = (part, whole) => `${(100 * part / Math.max(1, whole)).toFixed(1)} %`;
const charts = new Charts();
const tree = new Tree($("tree"), (text) => { $("node").textContent = text; }, listTree);
const ended = [];
let before = null, last = 0, hasBegun = false;
window.stemmaTree = tree;

function cells(row, values) {
  for (const value of values) {
    const cell = row.insertCell();
    cell.append(value);
  }
}

function figures(shown) {
  const engine = shown.engine, hit = Object.values(engine.cached_tokens_by_tier).reduce((a, b) => a + b, 0);
  const rate = (name) => before === null ? 0 : (engine[name] - before.engine[name]) / Math.max(0.1, shown.time - before.time);
  const values = {
    "hit ratio": percent(hit, engine.num_prompt_tokens), "running": number(engine.num_running),
    "waiting": number(engine.num_waiting), "prompt tokens/s": number(rate("num_prompt_tokens")),
    "generated tokens/s": number(rate("num_generated_tokens")), "tokens not computed": number(hit),
    "evicted blocks": number(engine.num_evicted_blocks), "back within a minute": number(engine.num_regretted_blocks),
  };
  const dropped = Object.entries(engine.transfer?.dropped_writes ?? {}).filter(([, count]) => count > 0);
  if (dropped.length)
    values["blocks not written"] = dropped.map(([reason, count]) => `${number(count)} ${reason.replaceAll("_", " ")}`).join(", ");
  const list = $("figures");
  for (const [name, value] of Object.entries(values)) {
    let box = list.querySelector(`[data-name="${name}"]`);
    if (!box) {
      box = document.createElement("div");
      box.dataset.name = name;
      box.append(Object.assign(document.createElement("dt"), { textContent: name }), document.createElement("dd"));
      list.append(box);
    }
    box.querySelector("dd").textContent = value;
  }
}

function requests(shown) {
  const under = document.createElement("tbody");
  for (const one of shown.under_way.slice(0, MAX_ROWS))
    cells(under.insertRow(), [one.request.slice(0, 30), one.tenant || "-", span(one.age_s), number(one.prompt_tokens),
      one.cached_tokens === null ? "waits" : percent(one.cached_tokens, one.prompt_tokens), number(one.generated_tokens)]);
  $("under-way").tBodies[0].replaceWith(under);
  if (!shown.ended.length) return;
  ended.push(...shown.ended);
  ended.splice(0, Math.max(0, ended.length - MAX_ROWS));
  const focused = document.activeElement?.dataset?.request;
  const rows = document.createElement("tbody");
  for (const one of ended.toReversed()) {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: one.request.slice(0, 30) });
    button.dataset.request = one.request;
    button.addEventListener("click", () => explain(one.request));
    cells(rows.insertRow(), [button, one.tenant || "-", one.outcome, number(one.prompt_tokens),
      one.cached_tokens === null ? "-" : percent(one.cached_tokens, one.prompt_tokens), one.miss ?? "-",
      one.first_token_s === null ? "-" : span(one.first_token_s), span(one.total_s)]);
  }
  $("ended").tBodies[0].replaceWith(rows);
  if (focused) rows.querySelector(`[data-request="${CSS.escape(focused)}"]`)?.focus();
}

function budgets(shown) {
  const rows = document.createElement("tbody");
  for (const one of shown.budgets)
    cells(rows.insertRow(), [one.name, number(one.held), number(one.limit), number(one.num_refused), number(one.num_refused_shares)]);
  $("budgets").tBodies[0].replaceWith(rows);
}

function tenants(shown) {
  $("tenants-part").hidden = shown.tenants.length === 0;
  const rows = document.createElement("tbody");
  for (const one of shown.tenants)
    cells(rows.insertRow(), [one.name, number(one.requests), number(one.prompt_tokens), percent(one.cached_tokens, one.prompt_tokens)]);
  $("tenants").tBodies[0].replaceWith(rows);
}

async function explain(request) {
  const body = $("why-body");
  body.replaceChildren();
  try {
    const found = await ask(`/admin/explain?request=${encodeURIComponent(request)}`);
    body.append(...explanationNodes(found));
  } catch (problem) { body.textContent = problem.message; }
  $("why-title").textContent = `Why ${request.slice(0, 40)} missed`;
  $("why").showModal();
}

async function divergences() {
  const part = $("divergences");
  try {
    const found = await ask("/admin/divergences");
    if (!found.divergences.length) { part.textContent = "No prompt parted from a cached one."; return; }
    const list = document.createElement("ol");
    for (const one of found.divergences) {
      const item = document.createElement("li");
      item.append(one.advice);
      if (one.example.cached !== null) item.append(...quoted("cached", one.example.common, one.example.cached));
      item.append(...quoted("a request", one.example.common, one.example.yours));
      list.append(item);
    }
    part.replaceChildren(list);
  } catch (problem) { part.textContent = problem.message; }
}

// The picture as a list, for who can't see it: the chosen node and its branches, each a button.
function listTree(chosen) {
  const node = tree.nodes[chosen], list = $("branches"), hadFocus = list.contains(document.activeElement);
  const item = (label, to) => {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: label });
    button.addEventListener("click", () => { tree.choose(to); tree.zoom(to); });
    const entry = document.createElement("li");
    entry.append(button);
    return entry;
  };
  $("chosen").textContent = tree.sentence(chosen);
  const entries = node.children.slice(0, MAX_ROWS).map((c) => item(tree.sentence(c), c));
  if (node.parent >= 0) entries.unshift(item(`Back to ${JSON.stringify(tree.nodes[node.parent].label)}`, node.parent));
  list.replaceChildren(...entries);
  const left = node.children.length - MAX_ROWS;
  $("branches-left").textContent = left > 0 ? `${number(left)} smaller branches are left out.` : "";
  if (hadFocus) list.querySelector("button")?.focus();
}

async function readTree() {
  try {
    const data = await ask("/admin/tree");
    const view = tree.view;
    tree.set(data);
    if (view.to - view.from < 1) { tree.view = view; tree.draw(); }
    const shown = data.parent.length;
    $("tree-size").textContent = `${number(data.num_nodes)} nodes` + (shown < data.num_nodes ? `, the first ${number(shown)} are drawn` : "");
  } catch (problem) { $("tree-size").textContent = problem.message; }
}

function begin() {
  hasBegun = true;
  charts.load();
  readTree();
  divergences();
  setInterval(() => { if (!document.hidden && tree.view.to - tree.view.from === 1) readTree(); }, TREE_EVERY_MS);
}

function take(shown) {
  $("login").hidden = true;
  $("main").hidden = false;
  if (!hasBegun) begin();
  if (before !== null && shown.started_at !== before.started_at) { before = null; ended.length = 0; }
  $("model").textContent = shown.model;
  document.title = `Stemma ${shown.model}`;
  $("state").textContent = shown.failure ?? "live";
  $("state").classList.toggle("bad", shown.failure !== null);
  figures(shown);
  requests(shown);
  budgets(shown);
  tenants(shown);
  charts.take(shown);
  before = shown;
  last = shown.last_number;
}

async function run() {
  for (;;) {
    try {
      await follow(`/admin/live?since=${last}`, take);
      $("state").textContent = "the server ended the stream; trying again";
    } catch (problem) {
      if (problem instanceof Refused) {
        dropKey();
        $("login").hidden = false;
        $("main").hidden = true;
        $("refusal").textContent = problem.message;
        $("state").textContent = "asks for the admin key";
        $("key").focus();
        return;
      }
      $("state").textContent = `${problem.message}; trying again`;
    }
    $("state").classList.add("bad");
    await new Promise((done) => setTimeout(done, RETRY_MS));
  }
}

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey($("key").value);
  $("key").value = "";
  $("refusal").textContent = "";
  run();
});
$("redraw").addEventListener("click", readTree);
$("again").addEventListener("click", divergences);
run();

// The operator's page of one server.
import { Charts } from "/dashboard/charts.js";
import { $, bar, make, megabytes, number, percent, rowsOf, span } from "/dashboard/elements.js";
import { quoted } from "/dashboard/explained.js";
import { figures, showRefused, speedRows, sums, total, uptime } from "/dashboard/glance.js";
import { get, keyOf } from "/dashboard/http.js";
import { beginRequests, forgetRequests, showRequests } from "/dashboard/requests.js";
import { beginTree } from "/dashboard/tree_list.js";
import { tell, watch } from "/dashboard/watch.js";

const ADVISE_MS = 60_000;
const charts = new Charts();
let before = null, last = 0, hasBegun = false;

// Why the server isn't well, and how badly: the worst first.
function troubles({ failure, engine, load, lately: { minute } }) {
  const errors = sums(minute, "ended").find(([outcome]) => outcome === "error")?.at(-1) ?? 0;
  const dropped = Object.entries(engine.transfer?.dropped_writes ?? {}).filter(([, count]) => count > 0);
  const lost = Object.values(engine.transfer?.lost_blocks ?? {}).reduce((a, b) => a + b, 0);
  return [
    failure && [`The engine has failed: ${failure}`, true],
    errors && [`${number(errors)} of ${number(total(minute, "ended"))} requests of the last minute failed.`, true],
    load.num_waiting > load.num_seats && [`More requests wait (${number(load.num_waiting)}) than have seats (${number(load.num_seats)}).`, true],
    engine.num_policy_failures && [`The eviction policy failed ${number(engine.num_policy_failures)} times; LRU ranked instead.`, true],
    lost && [`Lower tiers promised ${number(lost)} blocks and didn't deliver them.`, false],
    dropped.length && [`Blocks that weren't written to lower tiers: ${
      dropped.map(([reason, count]) => `${number(count)} ${reason.replaceAll("_", " ")}`).join(", ")}.`, false],
  ].filter(Boolean);
}

function showHealth(shown) {
  const found = troubles(shown), { engine, load } = shown, { hour } = shown.lately;
  const isBad = found.some(([, bad]) => bad);
  const words = isBad ? found[0][0] : `Healthy, ${uptime(shown.time - shown.started_at)}.`;
  if ($("health").textContent !== words) $("health").textContent = words;
  $("health").classList.toggle("bad", isBad);
  $("troubles").replaceChildren(...found.slice(isBad ? 1 : 0).map(([text]) => make("li", { textContent: text })));
  const rate = (name) => (before === null ? 0 : (engine[name] - before.engine[name]) / Math.max(0.1, shown.time - before.time));
  const ends = Object.fromEntries(sums(hour, "ended"));
  figures($("figures"), {
    "running": `${number(engine.num_running)} of ${number(load.num_seats)}`, "waiting": number(engine.num_waiting),
    "KV in use": percent(load.kv_in_use, 1), "ended in an hour": number(total(hour, "ended")),
    "failed in an hour": number(ends.error ?? 0),
    "tokens/s in, out": `${number(rate("num_prompt_tokens"))}, ${number(rate("num_generated_tokens"))}`,
  });
}

// What a token of each tier saved: computing it takes so long, loading it so long.
function savedEach({ engine, load, block_size }, tier) {
  const loading = (engine.transfer?.tiers?.[tier]?.load_s_per_block ?? 0) / block_size;
  const ofBlock = engine.transfer?.compute_s_per_block; // measured apart, of short prompts too
  const computing = load.prefill_s_per_token ?? (ofBlock ? ofBlock / block_size : null);
  return computing === null ? null : Math.max(0, computing - loading);
}

function showSavings(shown) {
  const { hour } = shown.lately, prompt = total(hour, "prompt"), cached = Object.fromEntries(sums(hour, "cached"));
  const since = Object.entries(shown.engine.cached_tokens_by_tier).filter(([, count]) => count > 0);
  const all = total(hour, "cached"), computed = Math.max(0, prompt - all);
  const seconds = (tier) => (savedEach(shown, tier) === null ? null : savedEach(shown, tier) * (cached[tier] ?? 0));
  const row = (tier, now, saved, whole) => [tier === "all" ? tier : `from ${tier}`, number(now), saved === null ? "-" : span(saved), number(whole)];
  const rows = since.map(([tier, count]) => row(tier, cached[tier] ?? 0, seconds(tier), count));
  const sum = since.reduce((so, [tier]) => (so === null || seconds(tier) === null ? null : so + seconds(tier)), 0);
  rows.push(row("all", all, sum, since.reduce((so, [, count]) => so + count, 0)));
  $("saved").tBodies[0].replaceChildren(...rowsOf(rows));
  $("saved-bar").replaceChildren(bar([...Object.entries(cached), ["computed", computed]], Math.max(1, prompt)));
  $("saved-words").textContent = prompt ? `${percent(all, prompt)} of ${number(prompt)} prompt tokens of the last hour${
    sum === null ? "" : `, about ${span(sum)} of computing saved`}.` : "No prompt in the last hour.";
  $("saved-note").hidden = sum !== null;
}

// What the KV of a tier's blocks takes there: less than on the device where they are packed.
function heldIn([tier, { num_blocks, stored_bytes, block_bytes }]) {
  return stored_bytes ? [`${tier}: ${megabytes(num_blocks * block_bytes)} of KV in ${megabytes(stored_bytes)}`] : [];
}

function showTables(shown) {
  $("held").textContent = Object.entries(shown.engine.transfer?.tiers ?? {}).flatMap(heldIn).join("; ");
  $("budgets").tBodies[0].replaceChildren(...rowsOf(shown.budgets.map((one) => [one.name, number(one.held), number(one.limit),
    number(one.num_refused), number(one.num_refused_shares)])));
  $("tenants-part").hidden = shown.tenants.length === 0;
  $("tenants").tBodies[0].replaceChildren(...rowsOf(shown.tenants.map((one) => [one.name, number(one.requests),
    number(one.prompt_tokens), percent(one.cached_tokens, one.prompt_tokens)])));
}

async function divergences() {
  const part = $("divergences");
  try {
    const found = await get("/admin/divergences", keyOf("admin"));
    if (!found.divergences.length) { part.textContent = "No prompt parted from a cached one."; return; }
    part.replaceChildren(make("ol", {}, found.divergences.map(({ advice, example }) => make("li", {}, advice,
      example.cached === null ? [] : quoted("cached", example.common, example.cached),
      quoted("a request", example.common, example.yours)))));
  } catch (problem) { part.textContent = problem.status === 404 ? LACKS_LAB : problem.message; }
}

const LACKS_LAB = "This needs the package stemma-lab.";

// The first that changes something, else that nothing has to change; all of it below.
async function advise() {
  try {
    const { advice } = await get("/admin/advice", keyOf("admin"));
    const first = advice.find((one) => one.setting || one.topic === "prompts") ?? advice[0];
    const line = (one) => [one.text, one.setting ? make("strong", { textContent: ` Setting: ${one.setting}` }) : ""];
    $("advice").replaceChildren(...line(first));
    $("all-advice").replaceChildren(...advice.map((one) => make("li", {}, line(one))));
  } catch (problem) {
    $("advice").textContent = problem.status === 404 ? LACKS_LAB : problem.message;
  }
}

async function readReports() {
  await advise(); // one at a time: each replays the last prompts
  await divergences();
}

function begin() {
  hasBegun = true;
  charts.load();
  beginTree();
  beginRequests();
  readReports();
  setInterval(() => { if (!document.hidden) advise(); }, ADVISE_MS);
}

function take(shown) {
  if (!hasBegun) begin();
  if (before !== null && shown.started_at !== before.started_at) { before = null; forgetRequests(); }
  $("model").textContent = shown.model;
  document.title = `Stemma ${shown.model}`;
  tell("live");
  showHealth(shown);
  $("speed").tBodies[0].replaceChildren(...speedRows(shown.lately, { first_token: "first token", token: "each token" }));
  showSavings(shown);
  showRefused($("refused-kinds"), shown.lately);
  showRequests(shown);
  showTables(shown);
  charts.take(shown);
  before = shown;
  last = shown.last_number;
}

$("again").addEventListener("click", readReports);
watch(() => `/admin/live?since=${last}`, take);

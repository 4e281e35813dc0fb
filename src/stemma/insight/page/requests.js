// Requests under way, those that ended with the way to their explanations, and those that were refused.
import { $, make, number, percent, rowsOf, span } from "/dashboard/elements.js";
import { explanationNodes } from "/dashboard/explained.js";
import { showRefusals } from "/dashboard/glance.js";
import { get, keyOf } from "/dashboard/http.js";

const MAX_ROWS = 50, LINK = "#request=";
let ended = [], numRefused = null, wasFollowed = false;

export function forgetRequests() { ended = []; numRefused = null; }

const linkTo = (request) => make("a", { href: LINK + encodeURIComponent(request), textContent: request.slice(0, 30) });
const reused = (one, otherwise) => (one.cached_tokens === null ? otherwise : percent(one.cached_tokens, one.prompt_tokens));

export function showRequests(shown) {
  const under = shown.under_way.slice(0, MAX_ROWS).map((one) => [one.request.slice(0, 30), one.tenant || "-",
    span(one.age_s), number(one.prompt_tokens), reused(one, "waits"), number(one.generated_tokens)]);
  $("under-way").tBodies[0].replaceChildren(...rowsOf(under));
  if (shown.lately.totals.refused !== numRefused) readRefusals(shown.lately.totals.refused);
  if (!shown.ended.length) return;
  ended = [...ended, ...shown.ended].slice(-MAX_ROWS);
  const focused = document.activeElement?.closest("#ended a")?.hash;
  $("ended").tBodies[0].replaceChildren(...rowsOf(ended.toReversed().map((one) => [linkTo(one.request), one.tenant || "-",
    one.outcome, number(one.prompt_tokens), reused(one, "-"), one.miss ?? "-",
    one.first_token_s === null ? "-" : span(one.first_token_s), span(one.total_s)])));
  if (focused) [...$("ended").querySelectorAll("a")].find((link) => link.hash === focused)?.focus();
}

async function readRefusals(count) {
  numRefused = count;
  try {
    const { refusals } = await get("/admin/refusals", keyOf("admin"));
    showRefusals($("refused").tBodies[0], refusals);
    $("refused-none").textContent = refusals.length ? "" : "None since the start.";
  } catch (problem) { numRefused = null; $("refused-none").textContent = problem.message; }
}

async function explain(request) {
  $("why-title").textContent = `What ${request.slice(0, 40)} reused, and why not the rest`;
  const found = await get(`/admin/explain?request=${encodeURIComponent(request)}`, keyOf("admin"))
    .then(explanationNodes, (problem) => [make("p", { textContent: problem.message })]);
  $("why-body").replaceChildren(...found);
  if (!$("why").open) $("why").showModal();
}

// The address names the explanation that is open: a link leads to it, the browser's Back from it.
function follow() {
  if (location.hash.startsWith(LINK)) explain(decodeURIComponent(location.hash.slice(LINK.length)));
  else $("why").close();
}

export function beginRequests() {
  addEventListener("hashchange", () => { wasFollowed = true; follow(); });
  $("why").addEventListener("close", () => {
    if (!location.hash.startsWith(LINK)) return;
    if (wasFollowed) history.back();
    else history.replaceState(null, "", location.pathname);
  });
  follow();
}

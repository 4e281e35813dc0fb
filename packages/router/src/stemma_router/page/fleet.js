// The operator's page of a fleet: what the router knows of each server, and what became of it.
import { $, make, number, percent, rowsOf, span } from "/dashboard/elements.js";
import { clock, figures, showRefusals, showRefused, speedRows, sums, total, uptime } from "/dashboard/glance.js";
import { tell, watch } from "/dashboard/watch.js";

const ASKED = ["healthy", "half_open"], FAILED = ["unsent", "failed", "late", "lost", "broken"];
const OLD_S = 10; // a check comes every two seconds
const CAUSES = { in_a_row: "failures in a row", often: "half of the latest failed", probe: "the request that tried it failed", slow: "slow" };
const words = (name) => name.replaceAll("_", " ");
const count = (server, kinds) => kinds.reduce((sum, kind) => sum + (server.outcomes[kind] ?? 0), 0);

const serversOf = (shown) => shown.fleets.flatMap(({ role, servers }) => servers.map((one) => ({ role, ...one })));
// The windows of all fleets in one; times of one fleet alone can't be added, so each is shown by its role.
const inAll = (shown, window, what) => shown.fleets.reduce((sum, { lately }) => sum + total(lately[window], what), 0);
const tries = (shown, window, kinds) => shown.fleets.reduce((sum, { lately }) => sum + sums(lately[window], "tries")
  .filter(([kind]) => kinds.includes(kind)).reduce((so, [, n]) => so + n, 0), 0);

function troubles(shown) {
  const servers = serversOf(shown), away = servers.filter((one) => !ASKED.includes(one.standing));
  const failed = tries(shown, "minute", FAILED);
  return [
    away.length === servers.length && ["No server can be asked.", true],
    away.length && [`${number(away.length)} of ${number(servers.length)} servers can't be asked: ${
      away.map((one) => `${one.url} is ${words(one.standing)}`).join(", ")}.`, true],
    failed && [`${number(failed)} tries of the last minute failed; those without a first byte went to other servers.`, false],
  ].filter(Boolean);
}

function showHealth(shown) {
  const found = troubles(shown), servers = serversOf(shown), isBad = found.some(([, bad]) => bad);
  const said = isBad ? found[0][0] : `Healthy: ${number(servers.length)} ${servers.length === 1 ? "server" : "servers"}, ${
    uptime(shown.time - shown.started_at)}.`;
  if ($("health").textContent !== said) $("health").textContent = said;
  $("health").classList.toggle("bad", isBad);
  $("troubles").replaceChildren(...found.slice(isBad ? 1 : 0).map(([text]) => make("li", { textContent: text })));
  figures($("figures"), {
    "under way": number(servers.reduce((sum, one) => sum + one.requests, 0)),
    "waiting there": number(servers.reduce((sum, one) => sum + (one.told?.waiting ?? 0), 0)),
    "answered in an hour": number(tries(shown, "hour", ["answered"])),
    "failed in an hour": number(tries(shown, "hour", FAILED)),
    "sent again": number(servers.reduce((sum, one) => sum + one.retries, 0)),
    "broken streams": number(shown.num_broken_streams),
  });
}

function showHits(shown) {
  const row = (label, what) => [label, ...["minute", "hour"].map((window) => {
    const whole = inAll(shown, window, "prompt"), part = inAll(shown, window, what);
    return what === "prompt" ? number(whole) : whole ? percent(part, whole) : "-";
  })];
  $("saved").tBodies[0].replaceChildren(...rowsOf([row("asked for", "prompt"), row("hits predicted", "predicted"),
    row("hits delivered", "delivered")]));
  const prompt = inAll(shown, "hour", "prompt");
  $("saved-words").textContent = prompt ? `Servers had ${percent(inAll(shown, "hour", "delivered"), prompt)} of the prompt tokens of the last hour; ${
    percent(inAll(shown, "hour", "predicted"), prompt)} were expected.` : "No prompt in the last hour.";
}

function stateOf({ standing, ejected_for_s, age_s }) {
  const rest = standing === "ejected" ? `, ${span(ejected_for_s)} more` : "";
  const isBad = !ASKED.includes(standing) || age_s === null || age_s > OLD_S;
  return make("span", { className: isBad ? "bad" : "", textContent: words(standing) + rest });
}

const spanOr = (seconds, otherwise) => (seconds === null || seconds === undefined ? otherwise : span(seconds));

function ejectionsOf({ ejections }) {
  const found = Object.entries(ejections).filter(([, n]) => n > 0);
  return found.map(([cause, n]) => `${number(n)}: ${CAUSES[cause] ?? words(cause)}`).join("; ") || "0";
}

function showServers(shown) {
  const isMixed = shown.fleets.length > 1;
  const hits = (one, tokens) => (one.prompt_tokens ? percent(tokens, one.prompt_tokens) : "-");
  const focused = document.activeElement?.closest("#servers a")?.href;
  $("servers").tBodies[0].replaceChildren(...rowsOf(serversOf(shown).map((one) => [
    make("span", {}, make("a", { href: `${one.url}/dashboard`, textContent: one.url.replace("http://", "") }), isMixed ? ` ${one.role}` : ""),
    stateOf(one), spanOr(one.age_s, "never"), one.events ? spanOr(one.events.last_event_s, "never") : "-", number(one.requests),
    one.told ? `${number(one.told.running)}, ${number(one.told.waiting)}` : "-", one.told ? percent(one.told.kv_in_use, 1) : "-",
    spanOr(one.first_byte_s, "-"), hits(one, one.predicted_tokens), hits(one, one.delivered_tokens),
    `${number(count(one, ["answered"]))}, ${number(count(one, FAILED))}`, ejectionsOf(one)])));
  if (focused) [...$("servers").querySelectorAll("a")].find((link) => link.href === focused)?.focus();
}

const MAX_EVENTS = 100;

function showEvents(shown) {
  const events = shown.fleets.flatMap((fleet) => fleet.events).sort((a, b) => b.at - a.at).slice(0, MAX_EVENTS);
  $("events").tBodies[0].replaceChildren(...rowsOf(events.map((one) => [clock(one.at), one.url, one.what,
    make("span", { className: "message", textContent: one.why })])));
}

function advice(shown) {
  const servers = serversOf(shown), down = servers.filter((one) => one.standing === "down");
  const found = down.map(({ url, age_s }) => (age_s === null ? `${url} never answered a check: is the address right?`
    : `${url} is down: look at its log, start it again, or take it from the list.`));
  found.push(...shown.warnings.filter((text) => !down.some(({ url }) => text.startsWith(`${url}: `))));
  if (servers.length > 1 && !servers.some((one) => one.events))
    found.push("No server's KV events are followed: what they hold is guessed (--server URL,events=ADDRESS).");
  return found.length ? found : ["Nothing: servers agree, and what they hold is known."];
}

function take(shown) {
  tell("live");
  showHealth(shown);
  const timed = shown.fleets.flatMap(({ role, lately }) => (shown.fleets.length > 1
    ? [[lately, { first_byte: `${role}: first byte`, whole: `${role}: whole answer` }]] : [[lately, { first_byte: "first byte", whole: "whole answer" }]]));
  $("speed").tBodies[0].replaceChildren(...timed.flatMap(([lately, names]) => speedRows(lately, names)));
  showHits(shown);
  showRefused($("refused-kinds"), shown.lately);
  $("advice").replaceChildren(...advice(shown).map((text) => make("li", { textContent: text })));
  showServers(shown);
  showEvents(shown);
  showRefusals($("refused").tBodies[0], shown.refusals);
}

watch(() => "/admin/live", take);

// The first screen of both operator's pages: what happened in the last minute and in the last hour.
import { $, make, number, rowsOf, span } from "./elements.js";

// The rows of `lately` that count `what`, without that word: each some words and a number.
export const sums = (window, what) => window.sums.filter(([word]) => word === what).map(([, ...rest]) => rest);
export const total = (window, what) => sums(window, what).reduce((sum, row) => sum + row.at(-1), 0);

// Nodes that are there stay, so that what a reader has chosen isn't lost each second.
export function figures(list, values) {
  for (const [name, value] of Object.entries(values)) {
    let box = list.querySelector(`[data-name="${name}"]`);
    if (!box) {
      box = make("div", {}, make("dt", { textContent: name }), make("dd"));
      box.dataset.name = name;
      list.append(box);
    }
    const shown = box.querySelector("dd");
    if (shown.textContent !== value) shown.textContent = value;
  }
}

// `names`: what is timed -> how the page calls it.
export function speedRows({ minute, hour }, names) {
  const cell = (window, name, which) => (window.times[name] ? span(window.times[name][which]) : "-");
  const row = (name, label, which) => [`${label}, ${which}`, cell(minute, name, which), cell(hour, name, which)];
  return rowsOf(Object.entries(names).flatMap(([name, label]) => [row(name, label, "p50"), row(name, label, "p95")]));
}

const MAX_REASONS = 5;

// Who was refused and why, those first that were most often.
export function showRefused(list, { minute, hour }) {
  const rows = sums(hour, "refused"), left = rows.length - MAX_REASONS;
  const item = ([who, reason, count]) => make("li", {}, `${number(count)} × ${reason.replaceAll("_", " ")}${who ? ` (${who})` : ""}`);
  const more = left > 0 ? [make("li", {}, `and ${left} other kinds`)] : [];
  list.replaceChildren(...rows.slice(0, MAX_REASONS).map(item), ...more);
  $("refused-words").textContent = rows.length ? `${number(total(hour, "refused"))} in the last hour, ${
    number(total(minute, "refused"))} in the last minute` : "Nobody in the last hour.";
}

const MAX_SHOWN = 50;
export const clock = (at) => new Date(1000 * at).toLocaleTimeString();

// Refused requests one by one, the newest first.
export function showRefusals(body, refusals) {
  body.replaceChildren(...rowsOf(refusals.slice(0, MAX_SHOWN).map((one) => [clock(one.at), one.reason.replaceAll("_", " "),
    make("span", { className: "message", textContent: one.message }), one.tenant || one.client.slice(0, 30) || "-",
    one.route, number(one.status), one.x_request_id])));
}

export function uptime(seconds) { return `up ${span(Math.max(0, seconds))}`; }

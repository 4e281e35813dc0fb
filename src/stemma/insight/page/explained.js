// An explanation as the server gives it, in words; the chat and the dashboard show it alike.
import { make, number } from "./elements.js";

// Two texts that begin alike: what differs is marked.
export function quoted(title, common, text) {
  const shared = text.startsWith(common) ? common : "";
  const mark = make("mark", { textContent: text.slice(shared.length) });
  return [make("strong", { textContent: title }), make("pre", { tabIndex: 0 }, shared, mark)];
}

export function explanationNodes(found) {
  const tiers = Object.entries(found.cached_tokens_by_tier ?? {}).map(([tier, count]) => `${number(count)} from ${tier}`);
  const where = [...tiers, `${number(found.computed_tokens)} computed`].join(", ");
  const made = [
    make("p", { textContent: `${number(found.prompt_tokens)} prompt tokens: ${where}.` }),
    make("p", { textContent: found.reason === null ? "Nothing missed." : `${found.reason}: ${found.detail ?? ""}` }),
  ];
  const place = found.parts_at, changed = found.changed;
  if (changed) made.push(make("p", { textContent: `What changed: ${changed.part}. ${changed.detail ?? ""}` }));
  if (!place) return made;
  made.push(make("p", { textContent: `At token ${number(place.token)} of ${number(place.of)}:` }));
  if (place.cached !== null) made.push(...quoted("cached", place.common, place.cached));
  return [...made, ...quoted("this request", place.common, place.yours)];
}

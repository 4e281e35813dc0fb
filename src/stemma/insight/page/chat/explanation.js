// Why a turn's prompt was not reused in whole: what the server noted of it.
import { explanation } from "/chat/api.js";
import { $, make, number } from "/chat/elements.js";

// Two texts that begin alike: what differs is marked.
function quoted(title, common, text) {
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

// The operator's explanation says more; who may not see it gets the one that came with the answer.
async function nodesFor(message) {
  try { return explanationNodes(await explanation(message.answerId)); }
  catch (error) {
    const own = message.usage?.stemma?.explanation;
    const text = `What came with the answer; an operator sees more (${error.message}).`;
    const note = make("p", { className: "note", textContent: text });
    return own ? [...explanationNodes(own), note] : [make("p", { textContent: error.message })];
  }
}

export async function explain(message) {
  $("why-body").replaceChildren(...(await nodesFor(message)));
  $("why").showModal();
}

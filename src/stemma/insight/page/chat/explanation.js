// Why a turn's prompt was not reused in whole: what the server noted of it.
import { explanation } from "/chat/api.js";
import { $, make } from "/chat/elements.js";
import { explanationNodes } from "/chat/explained.js";

// The operator's explanation says more; who may not see it gets the one that came with the answer.
async function nodesFor(message) {
  const link = make("a", { href: `/dashboard#request=${encodeURIComponent(message.answerId)}`, textContent: "On the dashboard" });
  try { return [...explanationNodes(await explanation(message.answerId)), make("p", {}, link)]; }
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

// What a turn reused: a bar of the prompt's tokens by tier, and the same in words.
import { bar, make, number, span } from "/chat/elements.js";
import { recall, remember } from "/chat/store.js";

const MIN_TOKENS = 256; // fewer say nothing of how fast a prompt is computed

// A prompt's tokens a second: the fastest that this browser saw of the model, so that savings aren't overstated.
function speedOf(model, computed, seconds) {
  const speeds = recall("prompt-speeds", {});
  const seen = computed >= MIN_TOKENS && seconds > 0 ? computed / seconds : 0;
  if (seen > (speeds[model] ?? 0)) remember("prompt-speeds", { ...speeds, [model]: seen });
  return Math.max(seen, speeds[model] ?? 0);
}

function savedWords(message, cached, computed) {
  const own = message.usage.stemma ?? {};
  const speed = speedOf(message.model ?? "", computed, (message.firstTokenS ?? 0) - (own.queue_wait_s ?? 0));
  return cached && speed ? `, about ${span(cached / speed)} saved` : "";
}

export function reuseNodes(message) {
  const { usage } = message, own = usage.stemma ?? {}, total = Math.max(1, usage.prompt_tokens);
  const tiers = Object.entries(own.cached_tokens_by_tier ?? {}).filter(([, count]) => count > 0);
  const cached = tiers.reduce((sum, [, count]) => sum + count, 0), computed = usage.prompt_tokens - cached;
  const where = tiers.map(([tier, count]) => `${number(count)} from ${tier}`).join(", ");
  const share = `${(100 * cached / total).toFixed(0)} %`;
  const saved = savedWords(message, cached, computed);
  const parts = where ? `${share}: ${where}` : share;
  const words = `${number(cached)} of ${number(usage.prompt_tokens)} prompt tokens reused (${parts})${saved}`;
  return [
    bar([...tiers, ["computed", computed]], total),
    make("p", { className: "reuse", textContent: `${words}. ${own.miss_detail ?? ""}` }),
  ];
}

export function speedWords({ usage, firstTokenS, seconds, model }) {
  const words = [];
  if (firstTokenS !== undefined) words.push(`first token ${span(firstTokenS)}`);
  if (usage && seconds > 0 && usage.completion_tokens > 1)
    words.push(`${number(usage.completion_tokens)} tokens, ${((usage.completion_tokens - 1) / seconds).toFixed(1)} a second`);
  if (model) words.push(model);
  return words.join(" · ");
}

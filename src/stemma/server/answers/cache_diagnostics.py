"""What changed since an earlier prompt, in the words of Anthropic's and OpenAI's APIs."""

from __future__ import annotations

from typing import Any

from stemma.engine.api import CacheReport
from stemma.server.observe.prompt_parts import Changed, Difference

_ANTHROPIC = {
    Changed.MODEL: "model_changed",
    Changed.TOOLS_REORDERED: "tools_changed",
    Changed.TOOLS: "tools_changed",
    Changed.SYSTEM: "system_changed",
    Changed.MESSAGES: "messages_changed",
}
_OPENAI = {
    Changed.MODEL: "model_changed",
    Changed.TOOLS_REORDERED: "tools_changed",
    Changed.TOOLS: "tools_changed",
    Changed.SYSTEM: "input_changed",
    Changed.SETTINGS: "reasoning_effort_changed",
    Changed.MESSAGES: "input_changed",
}


def cache_miss_reason(found: Difference | None) -> dict[str, Any] | None:
    """Return Anthropic's ``diagnostics`` of a request that names an earlier one; None: nothing changed.

    `found`: None, the earlier one isn't known.
    """
    if found is None:
        return {"cache_miss_reason": {"type": "previous_message_not_found"}}
    if found.changed is Changed.NOTHING:
        return None
    kind = _ANTHROPIC.get(found.changed)
    if kind is None:
        return {"cache_miss_reason": {"type": "unavailable"}}
    return {
        "cache_miss_reason": {
            "type": kind,
            "cache_missed_input_tokens": found.num_missed_tokens,
            **_detail(found),
        }
    }


def prompt_cache_diagnostics(found: Difference | None, cache: CacheReport) -> dict[str, Any]:
    """Return OpenAI's ``prompt_cache_diagnostics`` of a request that names an earlier one.

    `found`: None, the earlier one isn't known. `cache`: what was reused in truth.
    """
    if found is None:
        return {"type": "comparison_response_not_found"}
    if found.changed is Changed.NOTHING:
        # Nothing changed, so what isn't cached was evicted: OpenAI has no word for that, `stemma` says it.
        is_hit = cache.num_cached_tokens + 1 >= found.num_common_tokens
        return {"type": "cache_hit" if is_hit else "unavailable"}
    return {
        "type": "cache_miss",
        "reason": _OPENAI[found.changed],
        "cache_missed_tokens": found.num_missed_tokens,
        "comparison_reusable_tokens": found.num_earlier_tokens,
        **_detail(found),
    }


def _detail(found: Difference) -> dict[str, str]:
    """Return which part it is, beyond what the vendors tell."""
    text = " ".join(filter(None, (found.changed.value, found.detail)))
    return {"stemma_detail": text}

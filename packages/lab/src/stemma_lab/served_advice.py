"""Advice on a running server, by its counters and by where its prompts part."""

from __future__ import annotations

from typing import Any

from stemma_lab.advice import Advice

_MIN_REQUESTS = 100
"""Requests of a running server; fewer say little."""
_LOW_HITS = 0.02
_HIGH_REGRET = 0.1


def from_server(stats: dict[str, Any], divergences: dict[str, Any]) -> list[Advice]:
    """Return advice from a server's counters (``/admin/stats``, ``/admin/divergences``)."""
    num_prompt = int(stats["num_prompt_tokens"])
    num_cached = sum(int(count) for count in stats["cached_tokens_by_tier"].values())
    hits = num_cached / max(1, num_prompt)
    num_requests = int(divergences["num_requests"])
    if num_requests < _MIN_REQUESTS:
        text = f"{num_requests} requests are too few to advise on; ask again after {_MIN_REQUESTS}."
        return [Advice("worth", text, None, hits, None)]
    evicted, regretted = int(stats["num_evicted_blocks"]), int(stats.get("num_regretted_blocks", 0))
    found = [_worth(hits, evicted), _memory(hits, evicted, regretted, stats)]
    for one in divergences["divergences"][:3]:
        if one.get("saved_tokens"):
            after = hits + int(one["saved_tokens"]) / max(1, int(divergences["num_prompt_tokens"]))
            found.append(
                Advice("prompts", str(one["advice"]), None, hits, min(1.0, after), one.get("saved_s"))
            )
    return found


def _worth(hits: float, num_evicted: int) -> Advice:
    if hits >= _LOW_HITS:
        text = f"The cache is worth it: {hits:.1%} of prompt tokens came from it."
        return Advice("worth", text, None, hits, hits)
    if num_evicted:
        text = (
            f"Only {hits:.1%} of prompt tokens came from the cache, which had to evict. Record the traffic "
            "(--record-trace) and ask `stemma advise TRACE` whether more memory would change that."
        )
        return Advice("worth", text, "record_trace", hits, None)
    text = (
        f"Only {hits:.1%} of prompt tokens came from the cache, and nothing was evicted: prompts don't "
        "repeat. Switch the cache off, or look at what they part at."
    )
    return Advice("worth", text, "enable_prefix_cache = false", hits, 0.0)


def _memory(hits: float, num_evicted: int, num_regretted: int, stats: dict[str, Any]) -> Advice:
    if not num_evicted:
        return Advice("memory", "Memory is enough: nothing was evicted from the device.", None, hits, hits)
    share = num_regretted / num_evicted
    if share < _HIGH_REGRET:
        text = f"Memory is nearly enough: {share:.1%} of evicted blocks were needed again within a minute."
        return Advice("memory", text, None, hits, None)
    has_lower = bool((stats.get("transfer") or {}).get("tiers"))
    text = (
        f"More memory would help: {share:.1%} of the {num_evicted:,} evicted device blocks were needed again "
        "within a minute. How much it would bring, `stemma advise` says of a recorded trace."
    )
    return Advice(
        "memory", text, "kv_cache_memory" if has_lower else "host_cache, kv_cache_memory", hits, None
    )

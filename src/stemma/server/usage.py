"""Token counts of a response: OpenAI's, DeepSeek's names for hits and misses, and our own detail."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stemma.engine.api import CacheReport, RequestOutput
from stemma.server.explain import explanation_of
from stemma.server.generation import Collected


class UsageMeter:
    """Sums what the engine reports over the prompts of one HTTP request."""

    def __init__(self) -> None:
        self._cache: dict[int, CacheReport] = {}
        self._num_generated: dict[int, int] = {}
        self._queue_wait_s = 0.0

    @classmethod
    def of(cls, results: Iterable[Collected]) -> UsageMeter:
        """Return the meter of a request that is complete."""
        meter = cls()
        for index, result in enumerate(results):
            meter._note(index, result.cache, result.num_generated_tokens, result.queue_wait_s)
        return meter

    def seen(self, index: int, output: RequestOutput) -> None:
        """Note an output of prompt `index`."""
        self._note(index, output.cache, output.num_generated_tokens, output.queue_wait_s)

    def _note(self, index: int, cache: CacheReport, num_generated: int, queue_wait_s: float) -> None:
        self._cache[index] = cache
        self._num_generated[index] = num_generated
        self._queue_wait_s = max(self._queue_wait_s, queue_wait_s)

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's ``usage`` object with ``prompt_cache_*`` and ``stemma`` added."""
        reports = self._cache.values()
        num_prompt = sum(report.num_prompt_tokens for report in reports)
        num_cached = sum(report.num_cached_tokens for report in reports)
        num_generated = sum(self._num_generated.values())
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": num_cached},
            "prompt_cache_hit_tokens": num_cached,
            "prompt_cache_miss_tokens": num_prompt - num_cached,
            "stemma": self._detail(),
        }

    def _detail(self) -> dict[str, Any]:
        by_tier: dict[str, int] = {}
        for report in self._cache.values():
            for tier, count in report.cached_by_tier.items():
                by_tier[tier.value] = by_tier.get(tier.value, 0) + count
        missed = next((report for report in self._cache.values() if report.miss_reason), None)
        return {
            "cached_tokens_by_tier": by_tier,
            "miss_reason": missed.miss_reason if missed else None,
            "miss_detail": missed.miss_detail if missed else None,
            "queue_wait_s": round(self._queue_wait_s, 6),
            **(explanation_of(missed) if missed else {}),
        }


def cache_detail(cache: CacheReport, queue_wait_s: float) -> dict[str, Any]:
    """Return the ``stemma`` object for APIs that have no usage: one prompt, counts included."""
    return {
        "cached_tokens": cache.num_cached_tokens,
        "cached_tokens_by_tier": {tier.value: count for tier, count in cache.cached_by_tier.items()},
        "miss_reason": cache.miss_reason,
        "miss_detail": cache.miss_detail,
        "queue_wait_s": round(queue_wait_s, 6),
        **explanation_of(cache),
    }

"""Token counts of a response: OpenAI's, DeepSeek's names for hits and misses, and our own detail."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from stemma import __version__
from stemma.engine.api import CacheReport, DraftCount, RequestOutput
from stemma.server.observe.collected import Collected
from stemma.server.observe.explain import explanation_of

SYSTEM_FINGERPRINT = f"stemma-{__version__}"
"""The fingerprint in OpenAI's answers: equal where equal requests give equal answers. Ours depend on the
model, which the answer names, and on the version."""


class UsageMeter:
    """Sums what the engine reports over the prompts of one HTTP request."""

    def __init__(self) -> None:
        self._cache: dict[int, CacheReport] = {}
        self._num_generated: dict[int, int] = {}
        self._drafts: dict[int, Mapping[str, DraftCount]] = {}
        self._queue_wait_s = 0.0
        self._notes: dict[str, Any] = {}

    @classmethod
    def of(cls, results: Iterable[Collected]) -> UsageMeter:
        """Return the meter of a request that is complete."""
        meter = cls()
        for index, result in enumerate(results):
            meter._note(index, result)
        return meter

    def seen(self, index: int, output: RequestOutput) -> None:
        """Note an output of prompt `index`."""
        self._note(index, output)

    def _note(self, index: int, news: Collected | RequestOutput) -> None:
        self._cache[index] = news.cache
        self._num_generated[index] = news.num_generated_tokens
        self._drafts[index] = news.drafts
        if isinstance(news, Collected):
            for name, note in news.notes.items():
                known = self._notes.get(name)
                self._notes[name] = [*known, *note] if isinstance(known, list) else note
        self._queue_wait_s = max(self._queue_wait_s, news.queue_wait_s)

    def counts(self) -> dict[str, int]:
        """Return the counts so far, for a chunk in the middle of a stream."""
        num_prompt = sum(report.num_prompt_tokens for report in self._cache.values())
        num_generated = sum(self._num_generated.values())
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
        }

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's ``usage`` object with ``prompt_cache_*`` and ``stemma`` added."""
        counts = self.counts()
        num_cached = sum(report.num_cached_tokens for report in self._cache.values())
        return {
            **counts,
            "prompt_tokens_details": {"cached_tokens": num_cached},
            "prompt_cache_hit_tokens": num_cached,
            "prompt_cache_miss_tokens": counts["prompt_tokens"] - num_cached,
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
            **_public(sum(report.num_public_tokens for report in self._cache.values())),
            **_exact(sum(report.num_exact_history_tokens for report in self._cache.values())),
            **_prepared(sum(report.num_prepared_tokens for report in self._cache.values())),
            **({"drafts": drafts} if (drafts := self._draft_detail()) else {}),
            **(explanation_of(missed) if missed else {}),
            **self._notes,
        }

    def _draft_detail(self) -> dict[str, dict[str, int]]:
        """Return the draft tokens that were verified, by source; empty if there were none."""
        total: dict[str, DraftCount] = {}
        for drafts in self._drafts.values():
            for source, count in drafts.items():
                known = total.get(source, DraftCount())
                total[source] = known.plus(count.num_proposed, count.num_accepted)
        return {
            source: {"drafted_tokens": count.num_proposed, "accepted_tokens": count.num_accepted}
            for source, count in sorted(total.items())
        }


def _public(num_tokens: int) -> dict[str, int]:
    return {"public_tokens": num_tokens} if num_tokens else {}


def _exact(num_tokens: int) -> dict[str, int]:
    return {"exact_history_tokens": num_tokens} if num_tokens else {}


def _prepared(num_tokens: int) -> dict[str, int]:
    return {"prepared_tokens": num_tokens} if num_tokens else {}


def history_detail(cache: CacheReport) -> dict[str, int]:
    """Return the members of a ``stemma`` object that count tokens which are as they were generated, and those
    that idle time prepared."""
    return _exact(cache.num_exact_history_tokens) | _prepared(cache.num_prepared_tokens)


def cache_detail(cache: CacheReport, queue_wait_s: float) -> dict[str, Any]:
    """Return the ``stemma`` object for APIs that have no usage: one prompt, counts included."""
    return {
        "cached_tokens": cache.num_cached_tokens,
        "cached_tokens_by_tier": {tier.value: count for tier, count in cache.cached_by_tier.items()},
        "miss_reason": cache.miss_reason,
        "miss_detail": cache.miss_detail,
        "queue_wait_s": round(queue_wait_s, 6),
        **_public(cache.num_public_tokens),
        **history_detail(cache),
        **explanation_of(cache),
    }


def cached_header(cache: CacheReport) -> dict[str, str]:
    """Return the header that says what was reused, for shapes that have no place for it."""
    return {"x-stemma-cached-tokens": str(cache.num_cached_tokens)}

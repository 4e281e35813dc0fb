"""Counts of requests: the cache report of each, the totals, the recorded trace."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from stemma.engine.api import CacheReport
from stemma.engine.core.request import RequestState, SequenceState
from stemma.engine.trace_log import FinishedRequest, TraceLog
from stemma.model.vision.prompt import PromptImages
from stemma.prefix.eviction.policy import Conclusion
from stemma.prefix.explain import Miss, MissReason
from stemma.prefix.image_ids import FIRST_IMAGE_ID
from stemma.prefix.keys import Namespace
from stemma.types import FinishReason, Tier, TokenArray

logger = logging.getLogger(__name__)


class Tally:
    """Counts a request when it starts, and only then. Not thread-safe: one owner, the step loop."""

    def __init__(
        self, clock: Callable[[], float], trace_log: TraceLog | None, *, logs_hits: bool = False
    ) -> None:
        """`clock` is that of `RequestState.arrival`, seconds; `trace_log` None records nothing.

        `logs_hits`: log what the cache gave to each batch of prompts, and to all so far.
        """
        self._logs_hits = logs_hits
        self._batch: list[CacheReport] = []
        self._clock = clock
        self._trace_log = trace_log
        self.num_prompt_tokens = 0
        """Prompt tokens of requests that started."""
        self.num_generated_tokens = 0
        self.cached_by_tier: Counter[Tier] = Counter()
        self.misses_by_reason: Counter[str] = Counter()

    def load(self, sequence: SequenceState) -> None:
        """A sequence got its blocks, and waits for lower tiers now."""
        if sequence.state.cache is None:
            sequence.state.loading_since = self._clock()

    def start(self, sequence: SequenceState) -> None:
        """Report what the cache gave; only for the first start, never for a resumption or a sibling."""
        state, lease = sequence.state, sequence.lease
        assert lease is not None
        if state.cache is not None or state.request.is_preparation:
            return
        miss, head = lease.miss, lease.namespace.head
        if miss is not None and state.request.images is not None:
            miss = at_image(miss, state.request.images, lease.num_cached_tokens)
        state.cache = CacheReport(
            num_prompt_tokens=len(state.request.prompt_token_ids),
            cached_by_tier=dict(lease.cached_by_tier),
            num_public_tokens=0 if head is None else min(head.num_tokens, lease.num_cached_tokens),
            miss_reason=miss.reason.value if miss else None,
            miss_detail=miss.detail if miss else None,
            parting=miss.parting if miss else None,
            num_tokens_of_others=miss.num_tokens_of_others if miss else 0,
        )
        now = self._clock()
        state.queue_wait_s = now - state.arrival
        if state.loading_since is not None:
            state.load_s = now - state.loading_since
        if state.request.is_continuation:
            return
        if self._logs_hits:
            self._batch.append(state.cache)
        self.num_prompt_tokens += state.cache.num_prompt_tokens
        self.cached_by_tier.update(lease.cached_by_tier)
        if miss is not None:
            self.misses_by_reason[miss.reason.value] += 1

    def draw(self, state: RequestState, num_tokens: int) -> None:
        """Count tokens that were generated."""
        self.num_generated_tokens += num_tokens
        if state.first_token_s is None and num_tokens:
            state.first_token_s = self._clock() - state.arrival

    def end_batch(self) -> None:
        """Log what the prompts that one call of the scheduler started were given, if that is wanted."""
        if self._batch:
            for line in reporter_lines(self._batch, self.num_prompt_tokens, self.cached_by_tier):
                logger.info(line)
            self._batch.clear()

    def finish(self, state: RequestState, reason: FinishReason) -> None:
        """Record a finished request in the trace; of several answers the first.

        `reason`: why the last of its answers ended.
        """
        if self._trace_log is not None and state.cache is not None:
            request, first = state.request, state.sequences[0]
            self._trace_log.record(
                FinishedRequest(
                    state.arrival,
                    request.namespace,
                    request.prompt_token_ids,
                    first.tokens[len(request.prompt_token_ids) :].copy(),
                    dict(state.cache.cached_by_tier),
                    request.session,
                    reason,
                    state.queue_wait_s,
                    self._clock() - state.arrival,
                    request.retention.rest,
                    request.roles,
                    state.first_token_s,
                )
            )

    def conclude(self, namespace: Namespace, tokens: TokenArray, conclusion: Conclusion) -> None:
        """Record who goes on after an answer; `tokens`: its prompt, then itself."""
        if self._trace_log is not None:
            self._trace_log.conclude(namespace, tokens, conclusion)

    def close(self) -> None:
        """Close the trace."""
        if self._trace_log is not None:
            self._trace_log.close()


def at_image(miss: Miss, images: PromptImages, num_cached_tokens: int) -> Miss:
    """Return the miss with the name of the image at which the prompt parts from what is cached."""
    at = num_cached_tokens if miss.parting is None else miss.parting.num_common_tokens
    image = images.image_at(at)
    if image is None or miss.reason not in (MissReason.DIVERGED, MissReason.EXTENDS):
        return miss
    theirs = () if miss.parting is None else miss.parting.cached_token_ids
    if miss.reason is MissReason.EXTENDS:
        what = f"{image.name} begins there"
    elif any(token_id >= FIRST_IMAGE_ID for token_id in theirs):
        what = f"{image.name} differs"
    else:
        what = f"{image.name} stands where they have none"
    return replace(miss, detail=f"{miss.detail.rstrip('.')}: {what}.")


def reporter_lines(
    batch: Sequence[CacheReport], num_prompt_tokens: int, cached_by_tier: Mapping[Tier, int]
) -> tuple[str, str]:
    """Return the two lines that MindIE logs for each batch of prompts: of the batch, and of all so far.

    `local` is the device tier, `remote` all tiers below it.
    """
    num_tokens = sum(report.num_prompt_tokens for report in batch)
    cached = sum(report.num_cached_tokens for report in batch)
    local = sum(report.cached_by_tier.get(Tier.DEVICE, 0) for report in batch)
    total = sum(cached_by_tier.values())
    total_local = cached_by_tier.get(Tier.DEVICE, 0)
    return (
        f"Prefix Cache Reporter: #batchsize: {len(batch)}, #batched-tokens: {num_tokens}, "
        f"#local cached-tokens: {local}, #local cached hit rate: {_percent(local, num_tokens)}, "
        f"#remote cached-tokens: {cached - local}, "
        f"#remote cached hit rate: {_percent(cached - local, num_tokens)}, "
        f"#cached hit rate: {_percent(cached, num_tokens)}",
        f"Prefix Cache Global Reporter: #total prefill tokens: {num_prompt_tokens}, "
        f"#total local matched tokens: {total_local}, "
        f"#total local cached hit rate: {_percent(total_local, num_prompt_tokens)}, "
        f"#total remote matched tokens: {total - total_local}, "
        f"#total remote cached hit rate: {_percent(total - total_local, num_prompt_tokens)}, "
        f"#total cached hit rate: {_percent(total, num_prompt_tokens)}",
    )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(1, whole):.2f}%"

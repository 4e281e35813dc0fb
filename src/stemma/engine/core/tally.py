"""What requests were given and what they made: each one's cache report, the totals, the recorded trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from stemma.engine.api import CacheReport
from stemma.engine.core.request import RequestState, SequenceState
from stemma.engine.trace_log import TraceLog
from stemma.types import Tier


class Tally:
    """Counts a request when it starts, and only then. Not thread-safe: one owner, the step loop."""

    def __init__(self, clock: Callable[[], float], trace_log: TraceLog | None) -> None:
        """`clock` is that of `RequestState.arrival`, seconds; `trace_log` None records nothing."""
        self._clock = clock
        self._trace_log = trace_log
        self.num_prompt_tokens = 0
        """Of requests that started."""
        self.num_generated_tokens = 0
        self.cached_by_tier: Counter[Tier] = Counter()
        self.misses_by_reason: Counter[str] = Counter()

    def start(self, sequence: SequenceState) -> None:
        """Report what the cache gave; only for the first start, never for a resumption or a sibling."""
        state, lease = sequence.state, sequence.lease
        assert lease is not None
        if state.cache is not None:
            return
        miss = lease.miss
        state.cache = CacheReport(
            num_prompt_tokens=len(state.request.prompt_token_ids),
            cached_by_tier=dict(lease.cached_by_tier),
            miss_reason=miss.reason.value if miss else None,
            miss_detail=miss.detail if miss else None,
            parting=miss.parting if miss else None,
        )
        state.queue_wait_s = self._clock() - state.arrival
        if state.request.is_continuation:
            return
        self.num_prompt_tokens += state.cache.num_prompt_tokens
        self.cached_by_tier.update(lease.cached_by_tier)
        if miss is not None:
            self.misses_by_reason[miss.reason.value] += 1

    def finish(self, state: RequestState) -> None:
        """Note a request that is over in the trace; of several answers the first."""
        if self._trace_log is not None and state.cache is not None:
            request, tokens = state.request, state.sequences[0].tokens
            num_prompt = len(request.prompt_token_ids)
            self._trace_log.record(
                state.arrival,
                request.namespace,
                request.prompt_token_ids,
                tokens[num_prompt:],
                state.cache.num_cached_tokens,
            )

    def close(self) -> None:
        """Close the trace."""
        if self._trace_log is not None:
            self._trace_log.close()

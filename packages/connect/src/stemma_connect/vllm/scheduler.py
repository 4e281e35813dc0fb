"""The half of the connector in vLLM's scheduler: names blocks, says what to load, and what became full."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from stemma.memory.tiers.device_block import DeviceBlock
from stemma.prefix.keys import ChainRoots, KeySpace, Namespace
from stemma.types import BlockKey, Tier, as_tokens
from stemma_connect.vllm.lookup import Lookup
from stemma_connect.vllm.work import LoadWork, StepWork


class VllmRequest(Protocol):
    """The part of vLLM's `Request` that is read."""

    request_id: str
    num_computed_tokens: int
    """Before the step that is being scheduled."""
    num_prompt_tokens: int
    all_token_ids: Sequence[int]
    """Prompt and accepted output."""
    cache_salt: str | None
    lora_request: Any
    mm_features: Any
    prompt_embeds: Any


@dataclass(slots=True)
class _Tracked:
    request: VllmRequest
    roots: ChainRoots
    keys: list[BlockKey] = field(default_factory=list)
    """Keys of the leading full blocks, as far as they were needed."""
    num_sent: int = 0
    """Leading blocks that were sent to the worker to be saved, or to be counted as used."""
    num_computed: int = 0
    """Tokens whose KV vLLM's present blocks of this request hold once the steps planned so far have run."""
    first_found: int = 0
    """Number of the first block that was last looked for."""
    tiers: tuple[Tier, ...] = ()
    """Tiers of the blocks found from there on."""
    loading: frozenset[int] = frozenset()
    """vLLM's blocks that are being loaded."""
    may_load: bool = True
    """False after a load failed: the next try could fail the same way, for ever."""


class SchedulerSide:
    """Tracks vLLM's requests. Not thread-safe: vLLM's scheduler owns it."""

    def __init__(self, space: KeySpace, lookup: Lookup, *, loads: bool = True, saves: bool = True) -> None:
        """`loads`, `saves`: what vLLM's `kv_role` allows."""
        self._space = space
        self._lookup = lookup
        self._loads = loads
        self._saves = saves
        self._requests: dict[str, _Tracked] = {}
        self._work = StepWork()
        """Collected for the next step."""

    # -- before a request is scheduled ----------------------------------------------------------------

    def num_new_matched(self, request: VllmRequest, num_computed: int) -> int | None:
        """Return how many tokens behind the first `num_computed` the tiers have; None: ask again later.

        Whole blocks only, maybe up to the last token: vLLM computes that one again itself.
        """
        tracked = self._track(request)
        if tracked is None or not self._loads or not tracked.may_load:
            return 0
        size = self._space.block_size
        first, total = num_computed // size, len(request.all_token_ids) // size
        if num_computed % size or first >= total:
            return 0
        keys = self._keys(tracked, total)
        found = self._lookup.find(request.request_id, self._parent(tracked, first), keys[first:total])
        if found is None:
            return None
        tracked.first_found, tracked.tiers = first, found
        return len(found) * size

    def allocated(self, request: VllmRequest, block_ids: Sequence[int], num_external: int) -> None:
        """A request got its blocks; `num_external` tokens are to be loaded, as `num_new_matched` said."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        tracked.num_computed = 0
        if num_external == 0:
            self._work.settled.append(request.request_id)
            return
        size = self._space.block_size
        count = num_external // size
        first = tracked.first_found
        wanted = list(block_ids[first : first + count])
        tracked.loading = frozenset(wanted)
        self._work.loads.append(LoadWork(request.request_id, tracked.keys[first : first + count], wanted))

    def sources(self, request: VllmRequest, num_external: int) -> Counter[Tier]:
        """Return how many of the tokens to load come from which tier."""
        tracked = self._requests.get(request.request_id)
        found = tracked.tiers if tracked is not None else ()
        size = self._space.block_size
        return Counter({tier: count * size for tier, count in Counter(found[: num_external // size]).items()})

    # -- a step ---------------------------------------------------------------------------------------

    def plan_step(
        self,
        num_scheduled: Mapping[str, int],
        started: Iterable[str],
        block_ids_of: Callable[[str], Sequence[int]],
    ) -> StepWork:
        """Return the work of the step that vLLM has just scheduled.

        `num_scheduled`: tokens by request, `started`: requests that enter or resume with this step.
        """
        work, self._work = self._work, StepWork()
        starting = set(started)
        for request_id, count in num_scheduled.items():
            work.num_tokens += count
            tracked = self._requests.get(request_id)
            if tracked is None:
                continue
            request = tracked.request
            before = request.num_computed_tokens
            work.num_prompt_tokens += max(0, min(count, request.num_prompt_tokens - before))
            tracked.num_computed = before + count
            tracked.loading = frozenset()
            if not self._saves:
                continue
            if request_id in starting:
                there = before // self._space.block_size
                blocks = self._blocks(tracked, 0, there, block_ids_of(request_id))
                work.hits += blocks
                tracked.num_sent = max(tracked.num_sent, len(blocks))
            self._send_full(tracked, partial(block_ids_of, request_id), work)
        return work

    def finished(self, request: VllmRequest, block_ids: Sequence[int]) -> bool:
        """A request has ended; return whether vLLM shall keep its blocks until the next step saved them."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return False
        self._work.settled.append(request.request_id)
        before = len(self._work.saves)
        if self._saves:
            self._send_full(tracked, lambda: block_ids, self._work)
        if len(self._work.saves) == before:
            return False
        self._work.handed_over.append(request.request_id)
        return True

    def loads_failed(self, block_ids: Iterable[int]) -> None:
        """Some blocks could not be loaded: their requests compute what is missing."""
        failed = set(block_ids)
        for tracked in self._requests.values():
            if not tracked.loading.isdisjoint(failed):
                tracked.may_load, tracked.loading = False, frozenset()

    def clear(self) -> bool:
        """Drop what host and disk hold."""
        return self._lookup.clear()

    # -- names ----------------------------------------------------------------------------------------

    def _track(self, request: VllmRequest) -> _Tracked | None:
        """Return the record of a request; None if its KV depends on more than tokens and salt."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            if request.lora_request is not None or request.mm_features or request.prompt_embeds is not None:
                return None
            namespace = Namespace(salt=request.cache_salt or "")
            tracked = _Tracked(request, self._space.roots(namespace))
            self._requests[request.request_id] = tracked
        return tracked

    def _keys(self, tracked: _Tracked, count: int) -> list[BlockKey]:
        """Return the keys of at least the first `count` blocks, whose tokens are known."""
        have, size = len(tracked.keys), self._space.block_size
        if have < count:
            tokens = as_tokens(list(tracked.request.all_token_ids[have * size : count * size]))
            tracked.keys += tracked.roots.extend(have, self._parent(tracked, have), tokens)
        return tracked.keys

    def _parent(self, tracked: _Tracked, block: int) -> BlockKey:
        return tracked.keys[block - 1] if block and tracked.keys else tracked.roots.first

    def _send_full(self, tracked: _Tracked, block_ids: Callable[[], Sequence[int]], work: StepWork) -> None:
        """Send the blocks that hold the KV of accepted tokens and weren't sent yet.

        The KV of the last accepted output token isn't computed yet, or may be a rejected draft's. Everything
        before it is: drafts were verified against it.
        """
        request = tracked.request
        known = len(request.all_token_ids)
        if known > request.num_prompt_tokens:
            known -= 1
        full = min(known, tracked.num_computed) // self._space.block_size
        if full > tracked.num_sent:
            work.saves += self._blocks(tracked, tracked.num_sent, full, block_ids())
            tracked.num_sent = full

    def _blocks(self, tracked: _Tracked, first: int, end: int, block_ids: Sequence[int]) -> list[DeviceBlock]:
        end = min(end, len(block_ids))
        keys = self._keys(tracked, end)
        return [
            DeviceBlock(
                block_ids[i],
                keys[i],
                keys[i - 1] if i else tracked.roots.first,
                self._space.block_size,
            )
            for i in range(first, end)
        ]

"""Which tokens of which sequences the next step computes.

Decodes come first, oldest first, then prefill chunks of running sequences, then waiting sequences, all
within a budget of tokens per step: a long prompt never stops the others (vLLM's chunked prefill, MindIE's
SplitFuse). When blocks run out, the youngest running sequence is preempted: it frees its blocks, which stay
cached as long as there is room, and resumes later from what is left of them.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np

from stemma.config.settings import MAX_SEATS, SchedulerSettings
from stemma.engine.api import DraftCount, GenerationRequest
from stemma.engine.core.adapter_seats import AdapterSeats
from stemma.engine.core.ordering import MAX_MATCHED, order_waiting
from stemma.engine.core.request import Scheduled, SequenceState, Status
from stemma.engine.core.seats import Seats, StepTokens
from stemma.errors import GenerationFailed, PromptTooLong, StemmaError
from stemma.memory.cache.lease import Lease
from stemma.memory.cache.prefix_cache import PrefixCache
from stemma.prefix.keys import Namespace, session_number
from stemma.types import TokenArray


class DraftGuesser(Protocol):
    """Guesses what follows; the engine verifies the guess in the step that would compute one token anyway.

    `drafts.drafter.Drafter` implements it. Sequences are told apart by `key`.
    """

    @property
    def counts(self) -> Mapping[str, DraftCount]:
        """Draft tokens by source."""

    def propose(
        self,
        key: Hashable,
        namespace: Namespace,
        tokens: TokenArray,
        max_tokens: int,
        forced: Sequence[int] = (),
    ) -> tuple[int, ...]:
        """Return up to `max_tokens` tokens to follow `tokens`; empty where it doesn't pay.

        `forced`: the tokens that are sure to follow.
        """

    def begin_step(self, num_sequences: int, *, may_be_forced: bool = False) -> bool:
        """Return whether to ask for drafts in a step that decodes `num_sequences`.

        `may_be_forced`: a grammar may force tokens of one of them.
        """

    def observe(
        self, key: Hashable, tokens: TokenArray, draft: Sequence[int], drawn: Sequence[int]
    ) -> str | None:
        """Learn from a verified draft: ``drawn[j]`` was drawn after `tokens` and ``draft[:j]``.

        Return the name of its source, if that is known.
        """

    def observe_step(
        self, num_rows: int, num_context_tokens: int, num_tokens: int, duration_s: float
    ) -> None:
        """Learn what a step of decodes costs: its rows, the tokens attended to, the tokens it gave."""

    def finish(self, key: Hashable, namespace: Namespace, tokens: TokenArray, num_known: int) -> None:
        """Drop the state of a sequence that ended; its `num_known` leading tokens came from the cache."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of the rows of a step that have logits: each takes as many floats as the vocabulary has ids."""

    max_draft_tokens: int = 1 << 20
    """Draft tokens, all sequences together."""
    max_scored_rows: int = 1
    """Prompt positions whose logits are computed for log-probabilities."""
    max_seats: int = MAX_SEATS
    """Running sequences, where the settings name no number."""


class DraftingModel(Protocol):
    """Drafts by the model itself, offered to the drafter. `prediction.ModelDrafts` implements it."""

    def offer(self, decoding: Sequence[SequenceState], max_tokens: int) -> None:
        """Offer the drafter guesses of up to `max_tokens` for each of these sequences, where they pay."""

    def keep(self, item: Scheduled, sequence: SequenceState) -> None:
        """Keep the hidden state that the step that ran last left for `sequence`."""


class Scheduler:
    """Waiting, loading and running sequences. Not thread-safe: one owner, the step loop."""

    def __init__(
        self,
        settings: SchedulerSettings,
        cache: PrefixCache,
        *,
        drafter: DraftGuesser | None = None,
        model_drafts: DraftingModel | None = None,
        limits: StepLimits | None = None,
        max_adapters: int = 1,
        on_start: Callable[[SequenceState], None] = lambda _sequence: None,
        on_load: Callable[[SequenceState], None] = lambda _sequence: None,
    ) -> None:
        """`on_start` is told of each admission, the first and those after preemptions; `on_load` before it,
        where blocks are loaded from lower tiers.

        `limits`: of rows with logits in a step; None: those of `StepLimits`. `max_adapters`: in a step.
        """
        self._settings = settings
        self._limits = limits or StepLimits()
        self.seats = Seats(settings.max_num_seqs, self._limits.max_seats)
        """How many sequences may run at once."""
        self.step_tokens = StepTokens(settings.max_batch_tokens)
        """How many tokens a step takes while others wait."""
        self._cache = cache
        self._drafter = drafter
        self.may_draft = False
        """Whether the plan returned last asked for drafts: then it, and the next, need tokens on the host."""
        self._owes_drafts = False
        """Whether a plan was given up because a step is in flight, which the drafts wait for."""
        self._max_adapters = max_adapters
        self._model_drafts = model_drafts
        self._num_recomputed = 0 if model_drafts is None or cache.states is not None else 1
        """Tokens of each prefix hit computed again for the hidden state that the model's own drafts go on
        from. None where checkpoints have it."""
        self._on_start = on_start
        self._on_load = on_load
        self._cleared_for: tuple[SequenceState | None, int] = (None, 0)
        """For whom all that was cached was evicted last, and its tokens with KV then."""
        self._waiting: dict[tuple[int, int], SequenceState] = {}
        """In order of arrival, so that a step looks at the oldest alone, however long the queue."""
        self._returned: dict[tuple[int, int], SequenceState] = {}
        """Waiting too, before all others: preempted sequences, and siblings that found no room."""
        self._loading: list[SequenceState] = []
        self._running: list[SequenceState] = []
        self._arrived: list[SequenceState] = []
        """Queued since the last step: where they aren't admitted at once, lower tiers look ahead for them."""
        self._num_queued = 0
        self._no_room: tuple[int, int] | None = None
        """Blocks available and sequences queued so far when the head of the queue last found no room."""
        self.num_preemptions = 0
        self.num_transient_holds = 0
        """Leases that an operator's command holds for now: blocks that will be free soon."""
        self.failed: list[tuple[str, StemmaError]] = []
        """Requests to fail, with the reason: a lower tier couldn't deliver and settings forbid to compute, or
        nothing but pins is left to wait for. Whoever calls `schedule` empties this."""

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue, those that wait for a lower tier included."""
        return len(self._waiting) + len(self._returned) + len(self._loading)

    @property
    def num_running(self) -> int:
        """Sequences that take part in steps."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether any sequence isn't finished."""
        return bool(self._running or self._waiting or self._returned or self._loading)

    def add(self, sequence: SequenceState) -> None:
        """Queue a sequence."""
        sequence.status = Status.WAITING
        if self._cache.must_probe:
            self._prefetch(sequence)
        else:
            self._arrived.append(sequence)
        is_new = not (sequence.was_preempted or sequence.index)
        (self._waiting if is_new else self._returned)[sequence.age] = sequence
        self._num_queued += 1

    @property
    def has_seat(self) -> bool:
        """Whether one more sequence may run."""
        return len(self._running) + len(self._loading) < self.seats.limit

    def fork(self, parent: SequenceState, child: SequenceState) -> bool:
        """Let `child` continue where `parent` is, sharing its blocks; False if there is no room."""
        assert parent.lease is not None
        lease = self._cache.fork(parent.lease, parent.num_computed) if self.has_seat else None
        if lease is None:
            return False
        child.start(lease)
        child.num_computed = parent.num_computed
        child.status = Status.RUNNING
        insort(self._running, child, key=lambda s: s.age)
        return True

    def remove(self, sequence: SequenceState) -> None:
        """Remove a sequence in any state, and free its blocks."""
        if sequence.status is Status.WAITING:
            self._leave_queue(sequence)
            sequence.status = Status.FINISHED
        elif sequence.status in (Status.RUNNING, Status.LOADING):
            (self._running if sequence.status is Status.RUNNING else self._loading).remove(sequence)
            self._free(sequence, Status.FINISHED)
        else:
            sequence.status = Status.FINISHED

    def schedule(self, *, is_ahead: bool = False) -> list[Scheduled]:
        """Return the work of the next step, in no particular order of rows; empty if there is none.

        `is_ahead`: a step is in flight. Then no sequence is preempted and nothing is drafted: if either is
        needed, no work is returned until that step has ended. A plan may be dropped instead of being run.
        """
        self._finish_loads()
        plan: list[Scheduled] = []
        num_before = self.num_preemptions
        decoding = [s for s in self._running if s.num_unlaunched == 1]
        budget = self._budget(len(decoding))
        if is_ahead:
            decoding = [s for s in decoding if not self._ends_in_flight(s)]
        self.may_draft = self._may_draft(decoding)
        if is_ahead and decoding and (self.may_draft or not self._can_decode_ahead(decoding)):
            self._owes_drafts = self.may_draft
            return []
        draft_room = self._limits.max_draft_tokens if self.may_draft else 0
        if self._model_drafts is not None and decoding and draft_room:
            most_offered = min(draft_room, budget - len(decoding))
            self._model_drafts.offer(decoding[:draft_room], most_offered)
        for i, sequence in enumerate(decoding):
            if budget == 0 or sequence.status is not Status.RUNNING:
                continue
            # A draft may not take the row of a sequence behind it.
            most_drafted = min(budget - (len(decoding) - i), draft_room)
            item = self._schedule_decode(sequence, most_drafted)
            if item is not None:
                plan.append(item)
                budget -= item.num_tokens
                draft_room -= len(item.draft)
        for sequence in self._running:
            if sequence.num_unlaunched > 1 and budget:
                budget -= self._add_chunk(plan, sequence, budget)
        if not plan and len(self._running) > 1 and not is_ahead:
            self._preempt(self._running[-1])  # each waits for pages that the others hold
        elif not plan and self._running and self._nothing_frees() and not self._cache.is_plain:
            alone = self._running[0]
            if self._makes_all_room(alone):
                self._preempt(alone)
                self._cache.evict_all()
            else:
                self.failed.append((alone.state.request.request_id, self._no_room_beside_pins(alone)))
        if (
            budget
            and (self._waiting or self._returned)
            and self.has_seat
            and self.num_preemptions == num_before
        ):
            self._admit(plan, budget)
        for sequence in self._arrived:
            if sequence.status is Status.WAITING:
                self._prefetch(sequence)
        self._arrived.clear()
        self._cache.end_rests()
        return plan

    def _budget(self, num_decoding: int) -> int:
        """Return the number of tokens that the next step takes."""
        if self.num_running + self.num_waiting > 1:
            return self.step_tokens.limit(num_decoding)
        prepares = any(one.state.request.is_preparation for one in (*self._running, *self._waiting.values()))
        return self.step_tokens.idle_limit if prepares else self._settings.max_batch_tokens

    def wait_for_load(self, timeout_s: float) -> None:
        """Block until a load from a lower tier ends, if there is no work before that."""
        futures: list[Future[Any]] = [*self._cache.loads()]
        waiting = (*self._returned.values(), *self._waiting.values())
        futures += [s.prefetch.probe for s in waiting if s.prefetch]
        futures = [future for future in futures if not future.done()]
        if futures:
            wait(futures, timeout=timeout_s, return_when=FIRST_COMPLETED)

    def land(self, item: Scheduled) -> None:
        """Take over the recurrent state that a step left; `sequence.num_computed` is up to date."""
        sequence = item.sequence
        assert sequence.lease is not None
        if not self._cache.land_state(sequence.lease, item.end, sequence.num_computed):
            sequence.num_computed = item.start

    def commit(self, item: Scheduled) -> None:
        """Enter in the cache what a step computed of an item; `sequence.num_computed` is up to date."""
        lease = item.sequence.lease
        assert lease is not None
        # The partial tail of a finished prefill enters too: an identical prompt may be waiting for it.
        is_prefill = item.num_tokens - len(item.draft) > 1
        self._cache.commit(lease, item.sequence.num_computed, tail=is_prefill and item.num_logits > 0)

    def _prefetch(self, sequence: SequenceState) -> None:
        if sequence.max_cached is not None:
            return
        sequence.prefetch = self._cache.prefetch(sequence.state.request.namespace, sequence.tokens)

    def _ends_in_flight(self, sequence: SequenceState) -> bool:
        """Return whether the token that the step in flight draws reaches the length limit."""
        if sequence.in_flight is None or not sequence.in_flight.num_logits:
            return False
        return sequence.num_output + 1 >= sequence.state.ending.max_tokens

    def _can_decode_ahead(self, decoding: Sequence[SequenceState]) -> bool:
        """Make room for a token each; return False if there is none."""
        return all(s.lease and self._cache.extend(s.lease, s.num_launched + 1) for s in decoding)

    def _may_draft(self, decoding: Sequence[SequenceState]) -> bool:
        """Return whether rows are cheap enough in this step for drafts to pay.

        Beside prompts they aren't: such a step is bound by arithmetic, and each row costs what a prompt
        token does.
        """
        owed, self._owes_drafts = self._owes_drafts, False
        if self._drafter is None or not decoding or len(decoding) < len(self._running):
            return False
        if (self._waiting or self._returned) and self.has_seat and self._no_room is None:
            return False
        may_be_forced = any(s.sampling.has_grammar for s in decoding)
        return owed or self._drafter.begin_step(len(decoding), may_be_forced=may_be_forced)

    def _schedule_decode(self, sequence: SequenceState, most_drafted: int) -> Scheduled | None:
        lease = sequence.lease
        assert lease is not None
        if sequence.in_flight is not None:
            source_row = sequence.in_flight.drawn_logits.start if sequence.in_flight.num_logits else None
            return Scheduled(sequence, sequence.num_launched, 1, 1, source_row=source_row)
        draft: tuple[int, ...] = ()
        start = sequence.num_computed
        if self._drafter is not None:
            if (most := min(most_drafted, sequence.num_left - 1)) > 0:
                namespace = sequence.state.request.namespace
                forced = sequence.sampling.forced()
                draft = self._drafter.propose(sequence.age, namespace, sequence.tokens, most, forced)
                draft = draft[: sequence.sampling.num_valid(draft)]
            if draft and not self._has_room(lease, start, sequence.num_tokens + len(draft), len(draft)):
                draft = ()
        while not draft and not self._has_room(lease, start, sequence.num_tokens):
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return None
        return Scheduled(sequence, start, 1 + len(draft), 1 + len(draft), draft)

    def _has_room(self, lease: Lease, start: int, end: int, num_drafts: int = 0) -> bool:
        """Make room for KV and states of a step over tokens [start, end); False if there is none."""
        if not self._cache.extend(lease, end):
            return False
        return self._cache.plan_state(lease, start, end, num_drafts=num_drafts)

    def _add_chunk(self, plan: list[Scheduled], sequence: SequenceState, budget: int) -> int:
        """Plan the next tokens of a prompt; return how many of the budget they take.

        0 where the step has no room for more logits or pages; all of it where an image that one step
        computes finds no room in what is left: nobody overtakes it then.
        """
        start, num_missing = sequence.num_launched, sequence.num_unlaunched
        num_tokens = self._within_scored(plan, sequence, min(num_missing, budget))
        images, least = sequence.state.request.images, 0
        if images is not None:
            least = images.whole_end(start) - start
            num_tokens = images.last_cut(start, start + num_tokens) - start
        if num_tokens < least:
            has_scored = sequence.scores is not None and any(item.scored for item in plan)
            if has_scored or sum(item.num_tokens for item in plan) + least > self._settings.max_batch_tokens:
                return budget
            num_tokens = least
        assert sequence.lease is not None
        while num_tokens and not self._cache.plan_state(sequence.lease, start, start + num_tokens):
            num_tokens //= 2  # fewer need fewer pages; none until another sequence ends
            if images is not None:
                num_tokens = images.last_cut(start, start + num_tokens) - start
        if num_tokens:
            scores = sequence.scores
            scored = range(0) if scores is None else scores.wanted(start, start + num_tokens)
            plan.append(Scheduled(sequence, start, num_tokens, int(num_tokens == num_missing), scored=scored))
        return min(num_tokens, budget)

    def _within_scored(self, plan: Sequence[Scheduled], sequence: SequenceState, num_tokens: int) -> int:
        """Return how many of a prompt's next tokens the step has room for the logits of."""
        if sequence.scores is None:
            return num_tokens
        start = sequence.num_launched
        room = max(0, self._limits.max_scored_rows - sum(len(item.scored) for item in plan))
        scored = sequence.scores.wanted(start, start + num_tokens)
        return num_tokens if len(scored) <= room else scored.start + room - start

    def _preempt(self, sequence: SequenceState) -> None:
        assert sequence.in_flight is None
        self._running.remove(sequence)
        self._free(sequence, Status.WAITING)
        sequence.was_preempted = True
        self.add(sequence)
        self.num_preemptions += 1
        self.seats.note_preemption(len(self._running) + len(self._loading))

    def _free(self, sequence: SequenceState, status: Status) -> None:
        assert sequence.lease is not None
        num_complete = max(sequence.num_computed, sequence.lease.num_cached_tokens)
        if status is Status.FINISHED and sequence.state.request.is_continuation:
            self._cache.rest(sequence.lease, num_complete)
        else:
            self._cache.free(sequence.lease, num_complete)
        sequence.stop(status)

    def _admit(self, plan: list[Scheduled], budget: int) -> None:
        """Start waiting sequences as far as seats, blocks and budget allow.

        Nobody overtakes a sequence that found no room, or it would never find any.
        """
        if self._running and self._no_room is not None:
            num_available, num_queued = self._no_room
            if self._cache.num_available <= num_available and self._num_queued == num_queued:
                return
        self._no_room = None
        prefilling = [s for s in self._running if s.num_missing > 1] + self._loading
        oldest = (*self._returned.values(), *islice(self._waiting.values(), MAX_MATCHED))
        order = order_waiting(oldest, self._settings, self._num_cached)
        adapters = AdapterSeats(self._max_adapters, (*self._running, *self._loading), self._settings.ageing_s)
        adapters.look_at(oldest)
        for sequence in order[:MAX_MATCHED]:
            if not budget or not self.has_seat:
                return
            if not adapters.admits(sequence):
                continue
            if sequence.prefetch is not None and not sequence.prefetch.probe.done():
                continue
            if self._is_being_computed(sequence, prefilling):
                continue
            request = sequence.state.request
            lease = self._cache.reserve(
                request.namespace,
                sequence.tokens,
                retention=request.retention,
                session=self._session_of(request),
                max_cached=sequence.max_cached,
                is_use=not request.is_preparation,
            )
            if lease is None:
                if self._waits_for_nothing(plan) and self._makes_all_room(sequence):
                    self._cache.evict_all()
                elif self._waits_for_nothing(plan):
                    self.failed.append((request.request_id, self._no_room_beside_pins(sequence)))
                    continue
                self._no_room = (self._cache.num_available, self._num_queued)
                return
            self._leave_queue(sequence)
            sequence.start(lease, num_recomputed=self._num_recomputed)
            adapters.take(sequence)
            if lease.pending is not None:
                sequence.status = Status.LOADING
                self._on_load(sequence)
                self._loading.append(sequence)
                prefilling.append(sequence)
                continue
            self._run(sequence)
            budget -= self._add_chunk(plan, sequence, budget)
            if sequence.num_missing >= self._cache.block_size:  # else nobody waits for it: the rest is cached
                prefilling.append(sequence)

    def _session_of(self, request: GenerationRequest) -> int:
        """Return the number of its session, 0 if it isn't one turn: of several answers one goes on."""
        is_turn = request.params.n == 1 and not request.is_continuation
        return session_number(request.namespace, request.session) if is_turn else 0

    def _waits_for_nothing(self, plan: Sequence[Scheduled]) -> bool:
        """Return whether no block will become free by itself: what isn't available is pinned for good."""
        return not plan and not self._running and self._nothing_frees()

    def _nothing_frees(self) -> bool:
        """Return whether loads, steps under way and commands hold nothing that they will free."""
        is_busy = bool(self._loading or self._cache.has_loads_of_freed)
        return not (is_busy or self._cache.has_fence or self.num_transient_holds)

    def _makes_all_room(self, sequence: SequenceState) -> bool:
        """Return whether a sequence may find room if all that is cached goes; again only if it came further.

        Its own blocks may lie so scattered that no state or page fits between them.
        """
        before, come_so_far = self._cleared_for
        if self._cache.is_plain or (before is sequence and sequence.num_computed <= come_so_far):
            return False
        self._cleared_for = (sequence, sequence.num_computed)
        return True

    def _no_room_beside_pins(self, sequence: SequenceState) -> StemmaError:
        room = self._cache.num_available * self._cache.block_size
        message = (
            f"{sequence.num_tokens} tokens don't fit beside the pinned prefixes, which leave room for "
            f"{room}; unpin some, or give the KV cache more memory"
        )
        return GenerationFailed(message) if sequence.num_output else PromptTooLong(message, param="prompt")

    def _leave_queue(self, sequence: SequenceState) -> None:
        if self._returned.pop(sequence.age, None) is None:
            del self._waiting[sequence.age]
        _drop_prefetch(sequence)

    def _run(self, sequence: SequenceState) -> None:
        sequence.status = Status.RUNNING
        insort(self._running, sequence, key=lambda s: s.age)
        self._on_start(sequence)

    def _finish_loads(self) -> None:
        for sequence in list(self._loading):
            lease = sequence.lease
            assert lease is not None
            if lease.has_loaded:
                self._cache.finish_load(lease)
                if lease.load_error is not None:
                    error = GenerationFailed(lease.load_error)
                    self.failed.append((sequence.state.request.request_id, error))
                    continue
                if lease.pending is not None:
                    continue  # a state within what arrived is loaded
                self._loading.remove(sequence)
                sequence.start(lease, num_recomputed=self._num_recomputed)
                self._run(sequence)

    def _num_cached(self, sequence: SequenceState) -> int:
        """Return the cached prefix of a waiting sequence, matched again only if the cache changed."""
        if sequence.match_version != self._cache.version:
            sequence.match_tokens = self._cache.match(sequence.state.request.namespace, sequence.tokens)
            sequence.match_version = self._cache.version
        return sequence.match_tokens

    def _is_being_computed(self, sequence: SequenceState, prefilling: Sequence[SequenceState]) -> bool:
        """Return whether a running prefill will soon give at least a block more than is cached.

        Waiting for it is never slower than computing the same tokens beside it. The one that computes never
        waits for anybody, so this can't deadlock.
        """
        if not self._cache.enabled or sequence.max_cached is not None:
            return False
        for other in prefilling:
            shared = other.state.request.namespace.num_shared_with(sequence.state.request.namespace)
            if shared == 0:
                continue
            common = sequence.common_with.get(other.state.order)
            if common is None:
                common = _common_prefix(sequence.tokens[:-1], other.tokens)
                sequence.common_with[other.state.order] = common
            if shared is not None:
                common = min(common, shared)
            if common - self._num_cached(sequence) >= self._cache.block_size:
                return True
        return False


def _drop_prefetch(sequence: SequenceState) -> None:
    if sequence.prefetch is not None:
        sequence.prefetch.stop()
        sequence.prefetch = None


def _common_prefix(one: TokenArray, other: TokenArray) -> int:
    """Return how many leading tokens are equal."""
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length

"""The core of the step loop: takes requests, runs steps, returns their results. Synchronous."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from stemma.budgets import Budget
from stemma.config.settings import SchedulerSettings
from stemma.engine.api import DraftCount, EngineLoad, EngineStats, GenerationRequest, Prepared, PromptProgress
from stemma.engine.budget.working_memory import MemoryPlan
from stemma.engine.core.overlap import Flight, StepsAhead, WorkQueue, can_fly
from stemma.engine.core.preparing import Preparation, preparation_of, prepared_by
from stemma.engine.core.request import (
    Limits,
    RequestState,
    Scheduled,
    SequenceNews,
    SequenceState,
    Status,
)
from stemma.engine.core.returns import ReturnLoads
from stemma.engine.core.runner import Runner
from stemma.engine.core.scheduler import DraftGuesser, DraftingModel, Scheduler, StepLimits
from stemma.engine.core.step_rows import Drawn, StepRows
from stemma.engine.core.tally import Tally
from stemma.engine.core.tree_drawing import draw_tree
from stemma.engine.core.validation import CheckedRequest, RequestValidator
from stemma.engine.drafts.source import num_accepted
from stemma.engine.sampling.grammar import Grammar
from stemma.engine.sampling.grammar_compiler import GrammarCompiler
from stemma.engine.sampling.prompt_logprobs import num_scored_rows
from stemma.engine.sampling.sampler import Sampler
from stemma.engine.sampling.state import SamplingState
from stemma.engine.trace_log import TraceLog
from stemma.errors import GenerationFailed, InvalidRequest, Overloaded, StemmaError
from stemma.memory.cache.prefix_cache import PrefixCache
from stemma.memory.device.accelerator import accelerator_of
from stemma.model.opened.draw_rules import Choose
from stemma.model.text.tokenizer import Tokenizer
from stemma.native.process_memory import available_bytes
from stemma.prefix.eviction.policy import Conclusion
from stemma.prefix.keys import Namespace
from stemma.types import FinishReason, TokenArray

logger = logging.getLogger(__name__)
_LOAD_WAIT_S = 0.05
_CHARS_PER_TOKEN = 4
_COPY_AGAIN_S = 0.01
"""After which idle time looks again whether there is room for blocks on their way down."""
_MOST_TOUCHED_BYTES = 1 << 30
_TOUCHED_FRACTION = 1 / 16
"""Share of the memory free at the start whose KV idle time touches ahead of need, a gigabyte at most."""


def _touched_ahead_bytes() -> int:
    """Return how much memory is asked for ahead of its use."""
    return min(_MOST_TOUCHED_BYTES, int(_TOUCHED_FRACTION * available_bytes()))


class Engine:
    """Requests in, tokens out. Not thread-safe: one owner, the step loop."""

    def __init__(
        self,
        runner: Runner,
        cache: PrefixCache,
        limits: Limits,
        settings: SchedulerSettings,
        *,
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
        drafter: DraftGuesser | None = None,
        model_drafts: DraftingModel | None = None,
        trace_log: TraceLog | None = None,
        queue: WorkQueue | None = None,
        memory: MemoryPlan | None = None,
        grammars: GrammarCompiler | None = None,
        max_adapters: int = 1,
        generates: bool = True,
        choose: Choose | None = None,
        load_ahead_bandwidth: int = 0,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """`queue`: runs steps beside the host, so that they overlap; None: steps run in turn.

        `memory`: keeps the process below a limit; None: no limit. `grammars`: None refuses requests for
        structured output. `max_adapters`: in a step. `generates`: False refuses requests for answers.
        `choose`: how the device draws; `load_ahead_bandwidth`: bytes a second that idle time may load ahead
        of turns, 0: nothing. `on_close` is called once the cache is closed."""
        self.cache = cache
        self.limits = limits
        self.runner = runner
        self._settings = settings
        self.vocab_size = vocab_size
        self._clock = clock
        self._drafter = drafter
        self._model_drafts = model_drafts
        self._validator = RequestValidator(
            limits, vocab_size, grammars, generates=generates, sees=runner.sees
        )
        self._on_close = on_close
        self._tally = Tally(clock, trace_log, logs_hits=settings.log_hits)
        self._sampler = Sampler(choose)
        self._scheduler = Scheduler(
            settings,
            cache,
            drafter=drafter,
            model_drafts=model_drafts,
            limits=_step_limits(vocab_size, memory),
            max_adapters=max_adapters,
            on_start=self._tally.start,
            on_load=self._tally.load,
        )
        self._ahead = None if queue is None else StepsAhead(queue, cache, clock, self._sampler)
        self._heap_guard = None if memory is None else memory.guard
        self._requests: dict[str, RequestState] = {}
        self._preparation: Preparation | None = None
        block_bytes = runner.kv.layout.block_bytes
        self._returns = ReturnLoads(cache, load_ahead_bandwidth, block_bytes, clock)
        self._num_arrived, self._num_touched_ahead = 0, _touched_ahead_bytes() // block_bytes
        self._device = accelerator_of(runner.kv.device)
        self._on_launch: Callable[[bool], None] = lambda _: None

    def tell_launches(self, on_launch: Callable[[bool], None]) -> None:
        """Have `on_launch` called within each `step` that computes or waits outside Python, before.

        It is told whether the step is pure decode, and may be called again in the same step.
        """
        self._on_launch = self.runner.on_launch = on_launch

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything, now or once a load ends."""
        return self._scheduler.has_work or (self._ahead is not None and self._ahead.flight is not None)

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue."""
        return self._scheduler.num_waiting

    def checked(self, request: GenerationRequest) -> CheckedRequest:
        """Return what `add` takes. Any thread; raises InvalidRequest, PromptTooLong and what `compiled` does.

        That a request can be served is checked here alone, once.
        """
        return self._validator.checked(request)

    def compiled(self, request: GenerationRequest) -> tuple[CheckedRequest, Sequence[Grammar]]:
        """Do the same; return its grammars as well, which stay compiled while the caller holds them.

        Raises RateLimited or Overloaded if there is no room for them.
        """
        checked = self._validator.checked(request)
        own = self._validator.grammar_of(checked)
        return checked, [*self._validator.grammars_of_calls(checked), *([] if own is None else [own])]

    @property
    def grammar_budget(self) -> Budget | None:
        """The bound of compiled grammars; None: there is no structured output."""
        return self._validator.grammar_budget

    def add(self, request: CheckedRequest) -> None:
        """Queue a request; what idle time prepares ends. Raises InvalidRequest if its id is in use, and
        Overloaded."""
        self.end_preparation()
        if request.request_id in self._requests:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
        if self._scheduler.num_waiting >= self._settings.max_waiting and not request.is_continuation:
            raise Overloaded(f"{self._scheduler.num_waiting} requests are waiting already")
        self._returns.arrived(request.namespace, request.prompt_token_ids)
        self._start(request)

    def _start(self, request: GenerationRequest) -> None:
        self._returns.stop()
        state = RequestState(request, self.limits.ending(request), self._clock(), self._num_arrived)
        self._num_arrived += 1
        self._requests[request.request_id] = state
        self._scheduler.add(self._new_sequence(state))

    def progress(self, request: GenerationRequest) -> PromptProgress:
        """Return how far the prompt of a queued request has come. Any thread: it may be a step behind."""
        num_tokens = len(request.prompt_token_ids)
        state = self._requests.get(request.request_id)
        if state is None or state.cache is None:
            return PromptProgress(num_tokens)
        num_computed = state.sequences[0].num_computed
        return PromptProgress(num_tokens, state.cache.num_cached_tokens, min(num_tokens, num_computed))

    def prepare(self, request: CheckedRequest, max_tokens: int, on_end: Callable[[Prepared], None]) -> None:
        """Compute up to `max_tokens` of what isn't cached of a prompt, unless there is anything else to do.

        It runs in the steps that follow, in short ones, alone: `add` ends it. `on_end` is told how far it
        came, in this call or in a later one.
        """
        self._returns.stop()
        if self.has_work:
            on_end(Prepared(was_cut=True))
        elif (wanted := preparation_of(self.cache, request, max_tokens)) is None:
            on_end(Prepared())
        else:
            self._preparation = Preparation(request.request_id, on_end)
            self._start(wanted)

    def end_preparation(self) -> None:
        """End what `prepare` began, if it still runs. What was computed stays cached."""
        if self._preparation is not None:
            self._end(self._preparation.request_id, FinishReason.ABORT, None)

    def abort(self, request_id: str) -> list[SequenceNews]:
        """End a request wherever it is and free its blocks; unknown ids are ignored."""
        return self._end(request_id, FinishReason.ABORT, None)

    def stop_sequence(self, request_id: str, index: int) -> None:
        """End one sequence whose text met a stop string; ignored if it is over already."""
        state = self._requests.get(request_id)
        if state is not None and state.sequences[index].status is not Status.FINISHED:
            self._finish(state.sequences[index], FinishReason.STOP)

    def step(self) -> list[SequenceNews]:
        """Run one step and return what it did. An error in it ends its requests, not the loop.

        Raises DeviceLost where nothing more can be computed by this process.

        Where steps overlap: launch one, and return what the step launched by the call before this did.
        """
        if self._heap_guard is not None:
            self._heap_guard.check()
        with self._device.scope():
            try:
                news = self._step_in_turn() if self._ahead is None else self._step_ahead(self._ahead)
            except Exception as error:
                self._device.require_alive(error)
                raise
        return [one for one in news if not one.state.request.is_preparation]

    def use_idle_time(self) -> float | None:
        """Do a few milliseconds of what would hold up a later step; return when to call again.

        That is in so many seconds, or (None) not before a command came. The blocks that come into use next
        get their memory; blocks that wait to be continued wait no longer; those of turns that are due are
        loaded from the tiers below; those that found no room on their way down go there.
        """
        self.cache.end_rests()
        if self.cache.touch_ahead(self._num_touched_ahead):
            return 0.0
        if self.has_work:
            return None
        next_s = self._returns.work()
        if not self.cache.copy_waiting():
            return next_s
        return _COPY_AGAIN_S if next_s is None else min(next_s, _COPY_AGAIN_S)

    def _step_in_turn(self) -> list[SequenceNews]:
        """Schedule a step and run it to its end."""
        start_s = self._clock()
        rows, news = self._schedule(is_ahead=False)
        return news + self._run_or_wait(rows, start_s, may_wait=not news)

    def _step_ahead(self, ahead: StepsAhead) -> list[SequenceNews]:
        """Launch a step that can run behind the one in flight, then collect that one.

        A plan that needs the host in between runs in turn: at once if nothing is in flight, else it is
        dropped and scheduled again by the next call.
        """
        start_s, flight = self._clock(), ahead.flight
        rows, news = self._schedule(is_ahead=flight is not None)
        if rows.items and can_fly(rows, may_draft=self._scheduler.may_draft):
            news += self._launch(ahead, rows)
        elif flight is None:
            return news + self._run_or_wait(rows, start_s, may_wait=not news)
        if flight is None:
            return news
        self._on_launch(flight.rows.is_decode)
        return news + self._collect(ahead, flight)

    def _schedule(self, *, is_ahead: bool) -> tuple[StepRows, list[SequenceNews]]:
        """Return the next step, and the news of requests that the scheduler had to fail."""
        plan = self._scheduler.schedule(is_ahead=is_ahead)
        self._tally.end_batch()
        failed, self._scheduler.failed = self._scheduler.failed, []
        news = [n for i, error in failed for n in self._end(i, FinishReason.ERROR, error)]
        if news:
            plan = [item for item in plan if item.sequence.status is Status.RUNNING]
        return StepRows(plan), news

    def _run_or_wait(self, rows: StepRows, start_s: float, *, may_wait: bool) -> list[SequenceNews]:
        if rows.items:
            return self._take_turn(rows, start_s)
        if may_wait:
            self._on_launch(False)
            self._scheduler.wait_for_load(_LOAD_WAIT_S)
        return []

    def _take_turn(self, rows: StepRows, start_s: float) -> list[SequenceNews]:
        """Run a step to its end."""
        started = self._clock()
        try:
            drawn = self._draw(rows, self.runner.forward(rows))
        except Exception as error:
            logger.exception("a step of %d sequences failed", len(rows.items))
            return self._fail(rows, error)
        self._observe_prefill(rows, self._clock() - started)
        accepted = [self._accept(one) for one in drawn]
        self._time_decodes(rows, accepted, self._clock() - start_s)
        return accepted

    def _launch(self, ahead: StepsAhead, rows: StepRows) -> list[SequenceNews]:
        """Launch a step; it is in flight afterwards. If that fails, return the news of its requests."""
        try:
            ahead.launch(self.runner, rows)
        except Exception as error:
            logger.exception("a step of %d sequences could not be launched", len(rows.items))
            return self._fail(rows, error)
        return []

    def _collect(self, ahead: StepsAhead, flight: Flight) -> list[SequenceNews]:
        """Wait for a step in flight and return what it did. Another one may be in flight behind it."""
        try:
            sampled, seconds = ahead.land(flight)
        except Exception as error:
            logger.exception("a step of %d sequences failed", len(flight.rows.items))
            return self._fail(flight.rows, error)
        self._observe_prefill(flight.rows, seconds)
        drawn: list[Drawn] = []
        for item in flight.rows.items:
            sequence = item.sequence
            if item.is_void:
                continue
            if sequence.in_flight is item:
                sequence.in_flight = None
            sequence.num_computed = item.end
            if item.num_logits:
                drawn.append(one := Drawn(item, sequence, item.drawn_logits))
                one.take(sampled)
            else:
                self._scheduler.commit(item)
        accepted = [self._accept(one) for one in drawn]
        self._time_decodes(flight.rows, accepted, seconds)
        return accepted

    def _fail(self, rows: StepRows, error: Exception) -> list[SequenceNews]:
        """End the requests of a step that failed. Raises DeviceLost."""
        self._device.require_alive(error)
        failed = dict.fromkeys(item.sequence.state.request.request_id for item in rows.items)
        failure = GenerationFailed(describe_error(error))
        return [n for i in failed for n in self._end(i, FinishReason.ERROR, failure)]

    def close(self) -> None:
        """Write what is queued for the lower tiers, and close them."""
        if self._ahead is not None:
            try:
                self._ahead.close()
            except Exception:
                logger.exception("the step under way could not be ended")
        self._returns.stop()
        self.cache.close()
        self._on_close()
        self._tally.close()

    def conclude(self, namespace: Namespace, tokens: TokenArray, conclusion: Conclusion) -> None:
        """Tell the cache and the trace who goes on after an answer; `tokens`: its prompt, then itself."""
        self.cache.conclude(namespace, tokens, conclusion)
        self._returns.conclude(namespace, tokens, conclusion)
        self._tally.conclude(namespace, tokens, conclusion)

    def draw_tree(self, tokenizer: Tokenizer, max_tokens: int = 24) -> str:
        """Return the prefix index as an indented drawing, with about `max_tokens` tokens of text an edge."""
        if self.cache.index is None:
            return "(the prefix cache is disabled)"
        return draw_tree(
            self.cache.index,
            lambda tokens: tokenizer.decode(tokens.tolist(), skip_special_tokens=False),
            max_tokens * _CHARS_PER_TOKEN,
        )

    def stats(self) -> EngineStats:
        """Return counters and gauges."""
        cache = self.cache.stats()
        is_preparing = self._preparation is not None  # then there is nothing else
        drafts = {} if self._drafter is None else dict(self._drafter.counts)
        images = self.runner.image_stats()
        return EngineStats(
            num_running=0 if is_preparing else self._scheduler.num_running,
            num_waiting=0 if is_preparing else self._scheduler.num_waiting,
            num_preemptions=self._scheduler.num_preemptions,
            num_prompt_tokens=self._tally.num_prompt_tokens,
            num_generated_tokens=self._tally.num_generated_tokens,
            cached_tokens_by_tier=dict(self._tally.cached_by_tier),
            num_blocks=cache.num_blocks,
            num_free_blocks=cache.num_free_blocks,
            num_cached_blocks=cache.num_cached_blocks,
            num_evicted_blocks=cache.num_evicted_blocks,
            num_policy_failures=cache.num_policy_failures,
            num_regretted_blocks=cache.num_regretted_blocks,
            num_blocks_ahead=cache.num_blocks_ahead,
            num_used_ahead=cache.num_used_ahead,
            num_wasted_ahead=cache.num_wasted_ahead,
            num_checkpoints=cache.num_checkpoints,
            num_evicted_checkpoints=cache.num_evicted_checkpoints,
            transfer=self.cache.below.stats(),
            misses_by_reason=dict(self._tally.misses_by_reason),
            num_draft_tokens=sum(count.num_proposed for count in drafts.values()),
            num_accepted_draft_tokens=sum(count.num_accepted for count in drafts.values()),
            drafts_by_source=drafts,
            num_encoded_images=images.num_encoded,
            num_reused_images=images.num_reused,
            image_cache_bytes=images.cached_bytes,
            prefill_s_per_token=self._scheduler.step_tokens.token_s,
        )

    def load(self) -> EngineLoad:
        """Return how busy it is now. From any thread: it reads single numbers."""
        scheduler, cache = self._scheduler, self.cache.stats()
        is_preparing = self._preparation is not None
        num_available = cache.num_free_blocks + cache.num_evictable_blocks
        return EngineLoad(
            num_seats=scheduler.seats.limit,
            num_running=0 if is_preparing else scheduler.num_running,
            num_waiting=0 if is_preparing else scheduler.num_waiting,
            kv_in_use=min(1.0, max(0.0, 1.0 - num_available / max(1, cache.num_blocks))),
            prefill_s_per_token=scheduler.step_tokens.token_s,
            row_s=scheduler.seats.row_s or None,
        )

    def check(self) -> None:
        """Raise IntegrityError if blocks and their holders don't agree (slow)."""
        self.cache.check()

    def begin_transient_hold(self) -> None:
        """An operator's command took a lease, which it will free soon."""
        self._scheduler.num_transient_holds += 1

    def end_transient_hold(self) -> None:
        """It was freed, or became a pin."""
        self._scheduler.num_transient_holds -= 1

    def fail_all(self, error: str) -> list[SequenceNews]:
        """End every request with an error, the last resort of the loop. Never raises.

        If something can't be ended, `has_work` stays true or `check` fails afterwards.
        """
        if self._ahead is not None:
            try:
                self._ahead.ground()
            except Exception:
                logger.exception("the step under way could not be ended")
        news: list[SequenceNews] = []
        failure = GenerationFailed(error)
        for request_id, state in list(self._requests.items()):
            try:
                news += self._end(request_id, FinishReason.ERROR, failure)
            except Exception:
                logger.exception("request %s could not be ended", request_id)
                self._requests.pop(request_id, None)
                news += [
                    SequenceNews(state, index, finish_reason=FinishReason.ERROR, error=failure)
                    for index in range(state.request.params.n)
                ]
        return news

    def _observe_prefill(self, rows: StepRows, seconds: float) -> None:
        """Report to the scheduler what a step's tokens cost, and to the lower tiers what computing does.

        The latter from steps that are nearly all prefill.
        """
        self._scheduler.step_tokens.note_step(rows.num_rows, seconds)
        if rows.num_prefill and rows.num_prefill >= 0.9 * rows.num_rows:
            self.cache.observe_prefill(rows.num_prefill, seconds)

    def _new_sequence(self, state: RequestState) -> SequenceState:
        request, index = state.request, len(state.sequences)
        grammar = self._validator.grammar_of(request)
        sampling = SamplingState(
            request.params,
            request.vocabulary_ids,
            self.vocab_size,
            index=index,
            ending=state.ending,
            grammar=None if grammar is None else grammar.start(),
            calls=self._validator.grammars_of_calls(request),
        )
        sequence = SequenceState(state, index, sampling)
        state.sequences.append(sequence)
        return sequence

    def _draw(self, rows: StepRows, logits: torch.Tensor) -> list[Drawn]:
        """Draw the next tokens of all in one call, then commit what was computed and fork siblings.

        A commit copies blocks to lower tiers. On a device that computes beside the host, the step is over
        only once what it drew was read, so nothing is committed before.
        """
        for item in rows.items:
            sequence, scored = item.sequence, item.scored_logits
            sequence.num_computed = item.end - len(item.draft)
            if not item.draft:
                self._scheduler.land(item)
            if scored and sequence.scores is not None:
                sequence.scores.add(logits[scored.start : scored.stop])
            if (pooled := sequence.state.pooled) is not None:
                hidden = self.runner.hidden if pooled.pooling.needs_hidden else None
                pooled.add(
                    item.start,
                    None if hidden is None else hidden[item.first_row : item.rows.stop],
                    logits[item.drawn_logits.start] if item.num_logits else None,
                )
        drawn = rows.drawn(self._siblings)
        drafts = [d.item.draft for d in drawn] if any(d.item.draft for d in drawn) else None
        states = [d.sequence.sampling for d in drawn]
        sampled = self._sampler.sample(rows.drawn_from(logits, drawn), states, drafts)
        for one in drawn:
            one.take(sampled)
        for item in rows.items:
            if not item.num_logits:
                self._keep_hidden(item, item.sequence)
                self._scheduler.commit(item)
        return [one for one in drawn if one.sequence is one.item.sequence or self._fork(one)]

    def _siblings(self, sequence: SequenceState) -> list[SequenceState]:
        """Create the other answers of a request whose prompt was computed just now."""
        state = sequence.state
        return [self._new_sequence(state) for _ in range(len(state.sequences), state.request.params.n)]

    def _fork(self, one: Drawn) -> bool:
        """Let a sibling share the blocks of its prompt; False if there is no room.

        It is queued then, will hit, and draws the same token: that depends on its position alone.
        """
        if self._scheduler.fork(one.item.sequence, one.sequence):
            return True
        self._scheduler.add(one.sequence)
        return False

    def _accept(self, one: Drawn) -> SequenceNews:
        """Append what was drawn, end the sequence if that ends it, and commit what was computed."""
        sequence, draft = one.sequence, one.item.draft
        if not sequence.state.ending.max_tokens:
            self._finish(sequence, FinishReason.LENGTH)
            return SequenceNews(sequence.state, sequence.index, finish_reason=FinishReason.LENGTH)
        num_held = num_accepted(draft, one.token_ids)
        source: str | None = None
        if draft and self._drafter is not None:
            source = self._drafter.observe(sequence.age, sequence.tokens, draft, one.token_ids)
        drawn = one.token_ids[: num_held + 1]
        num_taken, reason = sequence.state.ending.cut(drawn, sequence.num_output)
        sequence.extend(drawn[:num_taken])
        sequence.num_computed += min(num_held, num_taken)
        self._keep_hidden(one.item, sequence)
        self._tally.draw(sequence.state, num_taken)
        if reason is not None:
            self._finish(sequence, reason)
        elif sequence is one.item.sequence:
            self._scheduler.commit(one.item)
            if draft:
                self._scheduler.land(one.item)
        return SequenceNews(
            sequence.state,
            sequence.index,
            tuple(one.token_ids[:num_taken]),
            tuple(one.logprobs[:num_taken]),
            reason,
            draft=None if source is None else (source, DraftCount(len(draft), num_held)),
        )

    def _keep_hidden(self, item: Scheduled, sequence: SequenceState) -> None:
        if self._model_drafts is not None:
            self._model_drafts.keep(item, sequence)

    def _time_decodes(self, rows: StepRows, news: Sequence[SequenceNews], duration_s: float) -> None:
        """Report the duration of a decode-only step to the seats and the drafter."""
        if not rows.is_decode:
            return
        num_rows, num_context = rows.num_rows, rows.num_context
        self._scheduler.seats.note_step(num_rows, num_context, duration_s)
        if self._drafter is not None:
            num_tokens = sum(len(n.token_ids) for n in news)
            self._drafter.observe_step(num_rows, num_context, num_tokens, duration_s)

    def _remove(self, sequence: SequenceState) -> None:
        """Remove a sequence from the scheduler; its output becomes a source of drafts for others."""
        if self._drafter is not None and sequence.num_output:
            request, cache = sequence.state.request, sequence.state.cache
            num_known = len(request.prompt_token_ids)
            if sequence.index == 0 and cache is not None:
                num_known = cache.num_cached_tokens
            self._drafter.finish(sequence.age, request.namespace, sequence.tokens, num_known)
        prepared = prepared_by(sequence)
        self._scheduler.remove(sequence)
        if sequence.state.request.is_preparation and self._preparation is not None:
            ended, self._preparation = self._preparation, None
            ended.on_end(prepared)

    def _finish(self, sequence: SequenceState, reason: FinishReason) -> None:
        self._remove(sequence)
        self._scheduler.seats.note_end()
        state = sequence.state
        state.num_unfinished -= 1
        if state.num_unfinished == 0:
            del self._requests[state.request.request_id]
            self._tally.finish(state, reason)

    def _end(self, request_id: str, reason: FinishReason, error: StemmaError | None) -> list[SequenceNews]:
        """Finish every sequence of a request that hasn't ended, including those that don't exist yet."""
        state = self._requests.pop(request_id, None)
        if state is None:
            return []
        news: list[SequenceNews] = []
        for index in range(state.request.params.n):
            if index < len(state.sequences):
                sequence = state.sequences[index]
                if sequence.status is Status.FINISHED:
                    continue
                self._remove(sequence)
            news.append(SequenceNews(state, index, finish_reason=reason, error=error))
        self._tally.finish(state, reason)
        return [] if state.request.is_preparation else news


def describe_error(error: BaseException) -> str:
    """Return a one-line description for clients."""
    return f"{type(error).__name__}: {error}"


def _step_limits(vocab_size: int, memory: MemoryPlan | None) -> StepLimits:
    """Return the limits of a step; without a plan of memory there is no limit of drafts."""
    # Nothing is drafted beside prompts: their positions may take the rows kept for drafts.
    if memory is None:
        return StepLimits(max_scored_rows=num_scored_rows(vocab_size, None))
    scored = num_scored_rows(vocab_size, memory.max_draft_tokens)
    return StepLimits(memory.max_draft_tokens, scored, memory.max_seats)

"""From tokens to what clients see: text, stop strings, finish reasons.

Runs behind the step loop: for the offline `LLM` right after each step, in the server on a thread of its own.
The step loop ends sequences by their tokens; only stop strings are found here, and reported back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from stemma.engine.api import CacheReport, DraftCount, RequestOutput, SequenceDelta
from stemma.engine.core.request import RequestState, SequenceNews
from stemma.engine.output.detokenizer import make_detokenizer
from stemma.engine.output.stopping import StopChecker
from stemma.errors import GenerationFailed, StemmaError
from stemma.model.tokenizer import Tokenizer
from stemma.types import FinishReason

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stopped:
    """A sequence that a stop string ended: the step loop must end it."""

    request_id: str
    index: int


@dataclass(slots=True)
class _Answers:
    """The sequences of one request that have had tokens."""

    checkers: dict[int, StopChecker] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    num_tokens: int = 0
    drafts: dict[str, DraftCount] = field(default_factory=dict)


class OutputProcessor:
    """Follows every request from its first token to its last. Not thread-safe: one owner."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._answers: dict[str, _Answers] = {}

    @property
    def num_open(self) -> int:
        """Requests between their first and their last output."""
        return len(self._answers)

    def process(self, news: Iterable[SequenceNews]) -> tuple[list[RequestOutput], list[Stopped]]:
        """Return one output for each request that has news, and the sequences to stop.

        A request whose text can't be made ends with an error; the caller must abort it.
        """
        grouped: dict[str, list[SequenceNews]] = {}
        for item in news:
            grouped.setdefault(item.state.request.request_id, []).append(item)
        outputs: list[RequestOutput] = []
        stopped: list[Stopped] = []
        for request_id, items in grouped.items():
            try:
                output = self._process_request(request_id, items, stopped)
            except Exception as error:
                logger.exception("the output of request %s failed", request_id)
                output = self._failed(items[0].state, error)
            if output is not None:
                outputs.append(output)
        return outputs, stopped

    def _process_request(
        self, request_id: str, items: list[SequenceNews], stopped: list[Stopped]
    ) -> RequestOutput | None:
        state = items[0].state
        if state.is_answered:
            return None  # the step loop went on until it learnt of the stop string
        answers = self._answers.setdefault(request_id, _Answers())
        deltas: list[SequenceDelta] = []
        error: StemmaError | None = None
        for item in items:
            if item.index in answers.finished:
                continue
            if item.draft is not None:
                source, count = item.draft
                known = answers.drafts.get(source, DraftCount())
                answers.drafts[source] = known.plus(count.num_proposed, count.num_accepted)
            delta = self._delta(answers, item)
            deltas.append(delta)
            error = error or item.error
            if delta.finish_reason is not None:
                answers.finished.add(item.index)
                del answers.checkers[item.index]
                if item.finish_reason is None:
                    stopped.append(Stopped(request_id, item.index))
        if not deltas:
            return None
        is_finished = len(answers.finished) == state.request.params.n
        if is_finished:
            state.is_answered = True
            del self._answers[request_id]
        return RequestOutput(
            request_id=request_id,
            deltas=tuple(deltas),
            cache=state.cache or CacheReport(len(state.request.prompt_token_ids)),
            finished=is_finished,
            num_generated_tokens=answers.num_tokens,
            queue_wait_s=state.queue_wait_s,
            load_s=state.load_s,
            drafts=dict(answers.drafts),
            error=None if error is None else str(error),
            error_type=GenerationFailed if error is None else type(error),
            prompt_logprobs=None if state.scores is None else state.scores.result,
        )

    def _failed(self, state: RequestState, error: Exception) -> RequestOutput:
        """Return the last output of a request whose text can't be made."""
        state.is_answered = True
        answers = self._answers.pop(state.request.request_id, None) or _Answers()
        num_sequences = state.request.params.n
        return RequestOutput(
            request_id=state.request.request_id,
            deltas=tuple(
                SequenceDelta(index, (), "", finish_reason=FinishReason.ERROR)
                for index in range(num_sequences)
                if index not in answers.finished
            ),
            cache=state.cache or CacheReport(len(state.request.prompt_token_ids)),
            finished=True,
            num_generated_tokens=answers.num_tokens,
            queue_wait_s=state.queue_wait_s,
            load_s=state.load_s,
            error=f"{type(error).__name__}: {error}",
        )

    def _delta(self, answers: _Answers, item: SequenceNews) -> SequenceDelta:
        checker = answers.checkers.get(item.index)
        if checker is None:
            checker = answers.checkers[item.index] = self._checker(item.state)
        text, num_taken = "", 0
        finish_reason, stop_reason = None, None
        for token_id in item.token_ids:
            progress = checker.append(token_id)
            text += progress.text
            num_taken += 1
            finish_reason, stop_reason = progress.finish_reason, progress.stop_reason
            if finish_reason is not None:
                break
        if finish_reason is None and item.finish_reason is not None:
            finish_reason = item.finish_reason
            text += checker.flush()
        answers.num_tokens += num_taken
        wants_logprobs = item.state.request.params.logprobs is not None
        return SequenceDelta(
            index=item.index,
            token_ids=item.token_ids[:num_taken],
            text=text,
            logprobs=tuple(p for p in item.logprobs[:num_taken] if p is not None) if wants_logprobs else None,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )

    def _checker(self, state: RequestState) -> StopChecker:
        params = state.request.params
        detokenizer = make_detokenizer(self._tokenizer, skip_special_tokens=params.skip_special_tokens)
        return StopChecker(params, detokenizer, state.ending)

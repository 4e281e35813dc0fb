"""From tokens to what clients see: text, stop strings, finish reasons.

Runs behind the step loop: for the offline `LLM` right after each step, in the server on a thread of its own.
The step loop ends sequences by their tokens; only stop strings are found here, and reported back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from stemma.engine.api import CacheReport, DraftCount, RequestOutput, SequenceDelta
from stemma.engine.core.request import RequestState, SequenceNews
from stemma.engine.output.detokenizer import make_detokenizer
from stemma.engine.output.stopping import StopChecker
from stemma.errors import GenerationFailed, StemmaError
from stemma.model.text.tokenizer import Tokenizer
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
        for part in _parts(items, state.request.shows_steps):
            index, last = part[0].index, part[-1]
            if index in answers.finished:
                continue
            for item in part:
                if item.draft is not None:
                    source, count = item.draft
                    known = answers.drafts.get(source, DraftCount())
                    answers.drafts[source] = known.plus(count.num_proposed, count.num_accepted)
            delta = self._delta(answers, part)
            deltas.append(delta)
            error = error or last.error
            if delta.finish_reason is not None:
                answers.finished.add(index)
                del answers.checkers[index]
                if last.finish_reason is None:
                    stopped.append(Stopped(request_id, index))
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
            pooled=None if state.pooled is None else state.pooled.result,
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

    def _delta(self, answers: _Answers, part: Sequence[SequenceNews]) -> SequenceDelta:
        """Return what a client sees of `part`: news of one sequence in order; the last may end it."""
        first, last = part[0], part[-1]
        params = first.state.request.params
        checker = answers.checkers.get(first.index)
        if checker is None:
            checker = answers.checkers[first.index] = self._checker(first.state)
        token_ids = first.token_ids
        if len(part) > 1:
            token_ids = tuple(one for item in part for one in item.token_ids)
        num_taken = len(token_ids)
        finish_reason, stop_reason = None, None
        # Where there are no stop strings, none but the last token can end the sequence: the step loop knew.
        num_plain = 0 if params.stop else num_taken - (last.finish_reason is not None)
        text = checker.extend(token_ids[:num_plain]) if num_plain > 0 else ""
        if num_plain < num_taken:
            for number, token_id in enumerate(token_ids[max(0, num_plain) :], 1 + max(0, num_plain)):
                progress = checker.append(token_id)
                text += progress.text
                finish_reason, stop_reason = progress.finish_reason, progress.stop_reason
                if finish_reason is not None:
                    num_taken = number
                    break
        if finish_reason is None and last.finish_reason is not None:
            finish_reason = last.finish_reason
            text += checker.flush()
        answers.num_tokens += num_taken
        logprobs = None
        if params.logprobs is not None:
            known = [one for item in part for one in item.logprobs]
            logprobs = tuple(one for one in known[:num_taken] if one is not None)
        return SequenceDelta(first.index, token_ids[:num_taken], text, logprobs, finish_reason, stop_reason)

    def _checker(self, state: RequestState) -> StopChecker:
        params = state.request.params
        detokenizer = make_detokenizer(
            self._tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            prompt=state.request.prompt_token_ids,
        )
        return StopChecker(params, detokenizer, state.ending)


def _parts(items: Sequence[SequenceNews], shows_steps: bool) -> Iterable[Sequence[SequenceNews]]:
    """Return the news that become one delta each: all of a sequence, or with `shows_steps` each by itself."""
    if len(items) == 1:
        return (items,)
    if shows_steps:
        return [[item] for item in items]
    by_index: dict[int, list[SequenceNews]] = {}
    for item in items:
        by_index.setdefault(item.index, []).append(item)
    return by_index.values()

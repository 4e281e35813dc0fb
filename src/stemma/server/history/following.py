"""As an answer ends its ids are kept and the cache learns who goes on; reports say what history knows.

The engine knows token ids alone. What happened to an answer's text before it came back is known here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np

from stemma.engine.api import CacheReport, GenerationRequest
from stemma.engine.client import EngineClient
from stemma.model.text.tokenizer import Tokenizer
from stemma.prefix.eviction.policy import Conclusion, Ending
from stemma.prefix.explain import MissReason
from stemma.prefix.image_ids import FIRST_IMAGE_ID, are_images
from stemma.server.history.answers import WrittenAnswers
from stemma.server.history.joining import History, Parted
from stemma.server.observe.collected import Collected, CollectedSequence, TurnObserver
from stemma.types import FinishReason, TokenArray, as_tokens

_REACH_TOKENS = 4
"""A prompt parts from an answer at most so many tokens behind the place where their texts part."""


ToolsOf = Callable[[str], tuple[str, ...]]
"""Finds the names of the tools that an answer with this text calls."""


class AnswerKeeper(TurnObserver):
    """Keeps the answers to one request."""

    def __init__(self, written: WrittenAnswers, history: History, end_ids: Collection[int]) -> None:
        """`end_ids`: ids that end answers."""
        self._written = written
        self._history = history
        self._end_ids = end_ids
        self._is_kept = False

    async def finished(self, so_far: Collected) -> None:
        """Keep them: the next turn may come as soon as the client has the last."""
        self._keep(so_far)

    def ended(self, so_far: Collected, outcome: str) -> None:
        """Keep those that had ended where others were cut off."""
        self._keep(so_far)

    def _keep(self, so_far: Collected) -> None:
        if not self._is_kept:
            self._is_kept = True
            for sequence in so_far.sequences:
                self._note(sequence)

    def _note(self, sequence: CollectedSequence) -> None:
        token_ids = sequence.token_ids
        if sequence.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH) or not token_ids:
            return
        ends = {*self._end_ids, sequence.stop_reason}
        if sequence.finish_reason is FinishReason.STOP and token_ids[-1] in ends:
            token_ids = token_ids[:-1]
        if token_ids:
            self._written.keep(self._history.answer(token_ids))


class Concluder(TurnObserver):
    """Tells of the first answer to one request."""

    def __init__(self, engine: EngineClient, request: GenerationRequest, tools_of: ToolsOf | None) -> None:
        """`tools_of`: None where no conversation is known, so that nobody can tell who goes on."""
        self._engine, self._request, self._tools_of = engine, request, tools_of
        has_answer = request.beam is None and request.pooling is None
        self._is_on = has_answer and request.params.n == 1

    async def finished(self, so_far: Collected) -> None:
        """Tell the cache how it ended."""
        if not self._is_on or not so_far.sequences:
            return
        [answer] = so_far.sequences
        if answer.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            tokens = np.concatenate((self._request.prompt_token_ids, as_tokens(answer.token_ids)))
            self._engine.conclude(self._request.namespace, tokens, self._conclusion(answer))

    def _conclusion(self, answer: CollectedSequence) -> Conclusion:
        num_tokens = len(answer.token_ids)
        if answer.finish_reason is not FinishReason.STOP or self._tools_of is None:
            return Conclusion(num_output_tokens=num_tokens)
        tools = self._tools_of(answer.text)
        return Conclusion(Ending.TOOL if tools else Ending.TURN, num_tokens, tools)


class HistoryReport:
    """Puts into one request's cache report what its history knows."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: GenerationRequest,
        history: History | None,
        num_prepared: Callable[[CacheReport], int],
    ) -> None:
        """`num_prepared` returns how many of its cached tokens idle time computed; it is asked once."""
        self._ask_prepared: Callable[[CacheReport], int] | None = num_prepared
        self._num_prepared = 0
        self._tokenizer = tokenizer
        self._request = request
        self._history = history

    def of(self, cache: CacheReport) -> CacheReport:
        """Return the report with the tokens that are as they were generated, and why it parts from them."""
        if self._ask_prepared is not None:
            self._num_prepared, self._ask_prepared = self._ask_prepared(cache), None
        if self._num_prepared:
            detail = " ".join(filter(None, (cache.miss_detail, self._why_prepared())))
            cache = replace(cache, num_prepared_tokens=self._num_prepared, miss_detail=detail)
        if self._history is not None and self._history.num_exact_tokens:
            num_exact = min(self._history.num_exact_tokens, cache.num_prompt_tokens)
            cache = replace(cache, num_exact_history_tokens=num_exact)
        if cache.miss_reason != MissReason.DIVERGED:
            return cache
        sentence = self._why_parted(cache)
        if not sentence:
            return cache
        at, total = cache.num_cached_tokens, cache.num_prompt_tokens
        detail = f"The first {at} of {total} prompt tokens are cached; {sentence}"
        return replace(cache, miss_detail=detail)

    def _why_prepared(self) -> str:
        parted = () if self._history is None else self._history.parted
        left_out = [one for one in parted if one.num_thinking_tokens]
        sentence = f"Idle time prepared {self._num_prepared} of the cached tokens"
        if not left_out:
            return f"{sentence}."
        last = left_out[-1]
        return (
            f"{sentence}: the template left out {last.num_thinking_tokens} tokens of thinking at position "
            f"{last.begin}."
        )

    def _why_parted(self, cache: CacheReport) -> str:
        """Return the end of the sentence, or nothing if the history doesn't explain the miss."""
        parting = cache.parting
        at = cache.num_cached_tokens if parting is None else parting.num_common_tokens
        parted = None if self._history is None else _nearest(self._history.parted, at)
        if parted is not None and parted.num_thinking_tokens:
            number = parted.num_thinking_tokens
            return f"the template left out {number} tokens of thinking at position {parted.begin}."
        prompt = self._request.prompt_token_ids
        if parting is not None and self._is_same_text(prompt, at, parting.cached_token_ids):
            return f"the same text is cached with other token ids: it was re-tokenized at position {at}."
        if parted is not None:
            return (
                f"the answer written at position {parted.begin} comes back with other text, re-tokenized at "
                f"position {parted.begin + parted.num_agreed}."
            )
        return ""

    def _is_same_text(self, prompt: TokenArray, at: int, cached: Sequence[int]) -> bool:
        """Whether the prompt goes on from token `at` with the text of other ids, as far as that goes."""
        mine_at = prompt[at : at + len(cached)]
        if not cached or max(cached) >= FIRST_IMAGE_ID or are_images(mine_at).any():
            return False
        mine = self._text(mine_at.tolist())
        other = self._text(cached)
        length = min(len(mine), len(other))
        first = len(self._text(cached[:1]))
        return length > first and mine[:length] == other[:length]

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False).rstrip("\ufffd")


def _nearest(parted: Sequence[Parted], at: int) -> Parted | None:
    """Return the place within which a prompt parts from what is cached at token `at`."""
    return next(
        (one for one in parted if one.begin <= at <= one.begin + one.num_agreed + _REACH_TOKENS), None
    )

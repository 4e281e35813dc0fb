"""One request on its way through the engine: its answer is kept, and its cache report says more than that.

The engine knows token ids alone. What happened to an answer's text before it came back is known here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stemma.engine.api import CacheReport, GenerationRequest, RequestOutput, SequenceDelta
from stemma.model.tokenizer import Tokenizer
from stemma.prefix.explain import MissReason
from stemma.prefix.image_ids import FIRST_IMAGE_ID, are_images
from stemma.server.history.answers import WrittenAnswers
from stemma.server.history.joining import History, Parted
from stemma.server.history.next_turn import NextTurn
from stemma.types import FinishReason, TokenArray

if TYPE_CHECKING:
    from collections.abc import Sequence

_REACH_TOKENS = 4
"""A prompt parts from an answer at most so many tokens behind the place where their texts part."""


@dataclass(frozen=True, slots=True)
class RenderedRequest(GenerationRequest):
    """A request whose prompt was rendered, and whose answer may come back in a later one."""

    history: History | None = None
    """None: exact history is off for it."""
    next_turn: NextTurn | None = None
    """None: what follows its answer can't be known."""
    tools_of: Callable[[str], tuple[str, ...]] | None = None
    """Names of the tools that an answer with this text calls; None: it has none to call."""

    @classmethod
    def of(
        cls,
        request: GenerationRequest,
        history: History | None,
        next_turn: NextTurn | None = None,
        tools_of: Callable[[str], tuple[str, ...]] | None = None,
    ) -> RenderedRequest:
        """Return `request` with its history."""
        fields = {name: getattr(request, name) for name in GenerationRequest.__dataclass_fields__}
        return cls(**fields, history=history, next_turn=next_turn, tools_of=tools_of)

    def tools_called(self, text: str) -> tuple[str, ...]:
        """Return the names of the tools that a whole answer calls."""
        return () if self.tools_of is None else self.tools_of(text)


class Follower:
    """Follows one request: `told` per output."""

    def __init__(
        self,
        written: WrittenAnswers | None,
        tokenizer: Tokenizer,
        end_ids: Collection[int],
        request: GenerationRequest,
        num_prepared: Callable[[CacheReport], int],
    ) -> None:
        """`end_ids`: ids that end answers. `written`: None if nothing is kept.

        `num_prepared` returns how many of its cached tokens idle time computed; it is asked once.
        """
        self._ask_prepared: Callable[[CacheReport], int] | None = num_prepared
        self._num_prepared = 0
        self._written = written
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._request = request
        self._history = request.history if isinstance(request, RenderedRequest) else None
        self._token_ids: dict[int, list[int]] = {}
        self._before: CacheReport | None = None
        self._after: CacheReport | None = None

    def told(self, output: RequestOutput) -> RequestOutput:
        """Note an output; return it with a report that knows of the history."""
        if self._history is not None and self._written is not None and self._request.beam is None:
            for delta in output.deltas:
                self._note(self._written, self._history, delta)
        if self._after is None or output.cache is not self._before:
            self._before, self._after = output.cache, self._report(output.cache)
        return output if self._after is self._before else replace(output, cache=self._after)

    def _note(self, written: WrittenAnswers, history: History, delta: SequenceDelta) -> None:
        token_ids = self._token_ids.setdefault(delta.index, [])
        token_ids.extend(delta.token_ids)
        if delta.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH) or not token_ids:
            return
        ends = {*self._end_ids, delta.stop_reason}
        if delta.finish_reason is FinishReason.STOP and token_ids[-1] in ends:
            token_ids.pop()
        if token_ids:
            written.keep(history.answer(token_ids))

    def _report(self, cache: CacheReport) -> CacheReport:
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

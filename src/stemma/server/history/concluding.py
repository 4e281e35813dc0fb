"""Telling the cache who goes on after an answer: a tool, or somebody who reads it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from stemma.engine.api import GenerationRequest
from stemma.engine.client import EngineClient
from stemma.prefix.eviction.policy import Conclusion, Ending
from stemma.server.observe.collected import Collected, CollectedSequence, TurnObserver
from stemma.types import FinishReason, as_tokens

ToolsOf = Callable[[str], tuple[str, ...]]
"""Finds the names of the tools that an answer with this text calls."""


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

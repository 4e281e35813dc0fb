"""Telling the cache who goes on after an answer: a tool, or somebody who reads it."""

from __future__ import annotations

import numpy as np

from stemma.engine.api import GenerationRequest, RequestOutput
from stemma.engine.client import EngineClient
from stemma.prefix.eviction.policy import Conclusion, Ending
from stemma.server.history.following import RenderedRequest
from stemma.types import FinishReason, as_tokens


class Concluder:
    """Follows the first answer of one request: `seen` per output."""

    def __init__(self, engine: EngineClient, request: GenerationRequest) -> None:
        self._engine, self._request = engine, request
        has_answer = request.beam is None and request.pooling is None
        self._is_on = has_answer and request.params.n == 1
        self._token_ids: list[int] = []
        self._texts: list[str] = []

    def seen(self, output: RequestOutput) -> None:
        """Note an output; the last one tells the cache."""
        if not self._is_on:
            return
        reason = None
        for delta in output.deltas:
            self._token_ids.extend(delta.token_ids)
            self._texts.append(delta.text)
            reason = delta.finish_reason or reason
        if not output.finished or reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        tokens = np.concatenate((self._request.prompt_token_ids, as_tokens(self._token_ids)))
        self._engine.conclude(self._request.namespace, tokens, self._conclusion(reason))

    def _conclusion(self, reason: FinishReason) -> Conclusion:
        request, num_tokens = self._request, len(self._token_ids)
        if reason is not FinishReason.STOP or not isinstance(request, RenderedRequest):
            return Conclusion(num_output_tokens=num_tokens)
        tools = request.tools_called("".join(self._texts))
        return Conclusion(Ending.TOOL if tools else Ending.TURN, num_tokens, tools)

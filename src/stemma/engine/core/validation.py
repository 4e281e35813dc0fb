"""Checks for requests that an engine can never serve, made before one is queued."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import NewType

import numpy as np

from stemma.budgets import Budget
from stemma.engine.api import GenerationRequest
from stemma.engine.core.request import Limits
from stemma.engine.pooling import Pooling
from stemma.engine.sampling.grammar import Grammar, GrammarSpec
from stemma.engine.sampling.grammar_compiler import GrammarCompiler
from stemma.engine.sampling.prompt_logprobs import MAX_REPORTED_VALUES
from stemma.errors import InvalidRequest, PromptTooLong
from stemma.model.vision.prompt import PromptImages
from stemma.prefix.image_ids import are_images

logger = logging.getLogger(__name__)
NO_IMAGES = "this model reads no images: only text parts are supported"
CheckedRequest = NewType("CheckedRequest", GenerationRequest)
"""A request that passed `RequestValidator.checked`, which alone makes these."""


class RequestValidator:
    """Checks requests against model, KV cache and grammars. Thread-safe."""

    def __init__(
        self,
        limits: Limits,
        vocab_size: int,
        grammars: GrammarCompiler | None,
        *,
        generates: bool = True,
        sees: bool = False,
    ) -> None:
        """`grammars`: None refuses requests for structured output. `generates`: False, for all answers.

        `sees`: whether the model reads images.
        """
        self._sees = sees
        self._generates = generates
        self._limits = limits
        self._vocab_size = vocab_size
        self._grammars = grammars

    @property
    def grammar_budget(self) -> Budget | None:
        """The bound of compiled grammars."""
        return None if self._grammars is None else self._grammars.budget

    def checked(self, request: GenerationRequest) -> CheckedRequest:
        """Return the request. Raises InvalidRequest or PromptTooLong if it can never be served."""
        if request.beam is not None:
            raise InvalidRequest("an engine doesn't search; use run_beam_search", param="use_beam_search")
        if request.pooling is not None:
            self._check_pooling(request, request.pooling)
        elif not self._generates:
            raise InvalidRequest(
                "this model generates no text; it serves /v1/embeddings, /rerank and /score", param="model"
            )
        num_tokens = len(request.prompt_token_ids)
        if num_tokens == 0:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if num_tokens >= self._limits.max_tokens:
            raise PromptTooLong.of(f"{num_tokens} tokens", self._limits.max_tokens, param="prompt")
        if request.images is not None:
            self._check_images(request, request.images)
        known_ids = request.vocabulary_ids
        lowest, highest = int(known_ids.min()), int(known_ids.max())
        if lowest < 0 or highest >= self._vocab_size:
            raise InvalidRequest(
                f"token ids must be in [0, {self._vocab_size}), got {lowest if lowest < 0 else highest}",
                param="prompt",
            )
        num_top = request.params.prompt_logprobs
        if num_top is not None and num_tokens * (num_top + 1) > MAX_REPORTED_VALUES:
            raise InvalidRequest(
                f"{num_top + 1} log-probabilities for each of {num_tokens} prompt tokens are more than "
                f"{MAX_REPORTED_VALUES}; ask for fewer",
                param="prompt_logprobs",
            )
        thinking = request.params.thinking
        forced = () if thinking is None else {*chain(*thinking.forced), *thinking.forced_again}
        if not all(0 <= one < self._vocab_size for one in forced):
            raise InvalidRequest(f"token ids must be in [0, {self._vocab_size})", param="max_thinking_tokens")
        self.grammar_of(request)
        return CheckedRequest(self._with_usable_calls(request))

    def _with_usable_calls(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request without those rules for calls that can't be compiled.

        A model can call such a tool without them, as it could where no engine knows them.
        """
        calls = request.params.calls
        if calls is None:
            return request
        kept = tuple(rule for rule in calls.rules if self._compiles(rule.rest, request.namespace.owner))
        if len(kept) == len(calls.rules):
            return request
        rules = replace(calls, rules=kept) if kept else None
        return replace(request, params=replace(request.params, calls=rules))

    def _compiles(self, spec: GrammarSpec, owner: str) -> bool:
        if self._grammars is None:
            return False
        try:
            self._grammars.compile(spec, owner)
        except InvalidRequest as error:
            logger.warning("calls of a tool stay free: %s", error)
            return False
        return True

    def grammars_of_calls(self, request: GenerationRequest) -> Sequence[Grammar]:
        """Return the grammars of a checked request's rules for calls, found again while somebody holds them.

        Raises RateLimited or Overloaded.
        """
        calls = request.params.calls
        if calls is None or self._grammars is None:
            return ()
        return [self._grammars.compile(rule.rest, request.namespace.owner) for rule in calls.rules]

    def _check_images(self, request: GenerationRequest, images: PromptImages) -> None:
        """Raise InvalidRequest for a model without a vision encoder, or images that aren't where ids say."""
        if not self._sees:
            raise InvalidRequest(NO_IMAGES, param="messages")
        placed = [one.positions for one in images.images]
        where = np.concatenate(placed) if placed else np.empty(0, dtype=np.int64)
        if not np.array_equal(np.flatnonzero(are_images(request.prompt_token_ids)), where):
            raise InvalidRequest("the prompt's ids of images aren't those of its images", param="prompt")

    def _check_pooling(self, request: GenerationRequest, pooling: Pooling) -> None:
        """Raise InvalidRequest for tokens that don't exist, and for answers beside the vector."""
        if request.params.n != 1 or request.params.prompt_logprobs is not None:
            raise InvalidRequest("a prompt gives one vector and nothing beside it", param="n")
        if not all(0 <= one < self._vocab_size for one in pooling.token_ids):
            raise InvalidRequest(f"token ids must be in [0, {self._vocab_size})", param="token_ids")

    def grammar_of(self, request: GenerationRequest) -> Grammar | None:
        """Return the request's grammar, which is found again while somebody holds it, or None.

        Raises InvalidRequest, RateLimited or Overloaded.
        """
        spec = request.params.grammar
        if spec is None:
            return None
        if self._grammars is None:
            raise InvalidRequest("this engine has no structured output", param=spec.param)
        return self._grammars.compile(spec, request.namespace.owner)

"""From a request body to a `GenerationRequest`: the namespace it reads and the hints it leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

from stemma.engine.api import GenerationRequest
from stemma.engine.sampling.params import BeamParams, SamplingParams
from stemma.errors import InvalidRequest
from stemma.model.lora.adapter import Adapter
from stemma.prefix.keys import Namespace
from stemma.server.schemas.openai import KeptTokens, OpenAIRequest
from stemma.types import DEFAULT_PRIORITY, RetentionRange, TokenArray


def generation_request(
    request_id: str,
    tokens: TokenArray,
    params: SamplingParams,
    body: OpenAIRequest,
    adapter: Adapter | None,
    beam: BeamParams | None = None,
) -> GenerationRequest:
    """Return the request: ``cache_salt`` isolates it, ``priority`` and ``cache_ttl_s`` are hints."""
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=tokens,
        params=params,
        namespace=Namespace(salt=body.cache_salt or ""),
        priority=DEFAULT_PRIORITY if body.priority is None else body.priority,
        ttl_s=body.cache_ttl_s,
        retention=ranges_of(body.cache_retention or ()),
        beam=beam,
        adapter=adapter,
    )


@dataclass(frozen=True, slots=True)
class Retention:
    """How long and how firmly a request's blocks should stay: hints for the eviction policy."""

    priority: int
    """0 to 100."""
    ttl_s: float | None
    """After this without use they go first; None: no such time."""


class _Hinted(Protocol):
    """A request body with retention hints; None where it has none."""

    @property
    def priority(self) -> int | None: ...

    @property
    def cache_ttl_s(self) -> float | None: ...


def retained(generation: GenerationRequest, body: _Hinted, default: Retention) -> GenerationRequest:
    """Return the request with the hints of `default`, but for those that the body brings itself."""
    return replace(
        generation,
        priority=default.priority if body.priority is None else generation.priority,
        ttl_s=default.ttl_s if body.cache_ttl_s is None else generation.ttl_s,
    )


def hinted(
    generation: GenerationRequest, body: _Hinted, ranges: Sequence[RetentionRange]
) -> GenerationRequest:
    """Return the request with hints of its leading tokens; what the body says itself holds everywhere."""
    return replace(
        generation,
        retention=tuple(
            RetentionRange(
                one.num_tokens,
                one.priority if body.priority is None else generation.priority,
                one.ttl_s if body.cache_ttl_s is None else generation.ttl_s,
            )
            for one in ranges
        ),
    )


def ranges_of(given: Sequence[KeptTokens]) -> tuple[RetentionRange, ...]:
    """Return the ranges of a request's `cache_retention`. Raises InvalidRequest if they don't ascend."""
    ends = [one.num_tokens for one in given]
    if any(end <= before for before, end in pairwise(ends)):
        raise InvalidRequest("cache_retention: num_tokens must ascend", param="cache_retention")
    return tuple(
        RetentionRange(
            one.num_tokens, DEFAULT_PRIORITY if one.priority is None else one.priority, one.cache_ttl_s
        )
        for one in given
    )

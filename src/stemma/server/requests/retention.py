"""From a request body to a `GenerationRequest`: the namespace it reads and the hints it leaves."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from stemma.engine.api import GenerationRequest
from stemma.engine.sampling.params import BeamParams, SamplingParams
from stemma.errors import InvalidRequest
from stemma.model.lora.adapter import Adapter
from stemma.prefix.keys import Namespace
from stemma.server.schemas.openai import KeptTokens, OpenAIRequest
from stemma.types import NO_HINT, Retention, RetentionHint, RetentionRange, TokenArray


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
        retention=Retention(hint_of(body.priority, body.cache_ttl_s), ranges_of(body.cache_retention or ())),
        beam=beam,
        adapter=adapter,
        session=body.prompt_cache_key or body.session_id or "",
    )


def hint_of(priority: int | None, ttl_s: float | None, default: RetentionHint = NO_HINT) -> RetentionHint:
    """Return the hint that a body, or a part of it, brings; `default` holds where it is silent."""
    return RetentionHint(
        default.priority if priority is None else priority, default.ttl_s if ttl_s is None else ttl_s
    )


def ranges_of(given: Sequence[KeptTokens]) -> tuple[RetentionRange, ...]:
    """Return the ranges of a request's `cache_retention`. Raises InvalidRequest if they don't ascend."""
    ends = [one.num_tokens for one in given]
    if any(end <= before for before, end in pairwise(ends)):
        raise InvalidRequest("cache_retention: num_tokens must ascend", param="cache_retention")
    return tuple(RetentionRange(one.num_tokens, hint_of(one.priority, one.cache_ttl_s)) for one in given)

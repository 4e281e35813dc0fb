"""From a request body to a `GenerationRequest`: the namespace it reads and the hints it leaves."""

from __future__ import annotations

from stemma.engine.api import GenerationRequest
from stemma.engine.sampling.params import BeamParams, SamplingParams
from stemma.prefix.keys import Namespace
from stemma.server.schemas.openai import OpenAIRequest
from stemma.types import DEFAULT_PRIORITY, TokenArray


def generation_request(
    request_id: str,
    tokens: TokenArray,
    params: SamplingParams,
    body: OpenAIRequest,
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
        beam=beam,
    )

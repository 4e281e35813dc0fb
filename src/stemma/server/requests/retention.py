"""From a request body to a `GenerationRequest`: the namespace it reads and the hints it leaves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from stemma.engine.api import GenerationRequest
from stemma.engine.sampling.params import BeamParams, SamplingParams
from stemma.prefix.keys import Namespace
from stemma.server.context import ServerContext
from stemma.server.requests.models import check_model
from stemma.server.schemas.openai import OpenAIRequest
from stemma.types import DEFAULT_PRIORITY, TokenArray


def generation_request(
    context: ServerContext,
    request_id: str,
    tokens: TokenArray,
    params: SamplingParams,
    body: OpenAIRequest,
    beam: BeamParams | None = None,
) -> GenerationRequest:
    """Return the request: ``cache_salt`` isolates it, ``priority`` and ``cache_ttl_s`` are hints.

    Raises UnknownModel if ``model`` names an adapter that was unloaded meanwhile.
    """
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=tokens,
        params=params,
        namespace=Namespace(salt=body.cache_salt or ""),
        priority=DEFAULT_PRIORITY if body.priority is None else body.priority,
        ttl_s=body.cache_ttl_s,
        beam=beam,
        adapter=check_model(context, body.model),
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

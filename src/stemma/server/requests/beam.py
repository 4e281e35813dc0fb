"""From a request's fields to a beam search: what shapes sampling is ignored, what it can't honour refused."""

from __future__ import annotations

from stemma.engine.sampling.params import BeamParams, SamplingParams
from stemma.errors import InvalidRequest
from stemma.server.requests.intake import Intake
from stemma.server.requests.sampling import widen_to_best_of
from stemma.server.schemas.openai import ChatRequest, CompletionRequest
from stemma.server.schemas.tgi import VLLMGenerateRequest


def candidates(
    intake: Intake,
    body: ChatRequest | CompletionRequest | VLLMGenerateRequest,
    params: SamplingParams,
) -> tuple[SamplingParams, BeamParams | None]:
    """Return what the engine is asked for: `best_of` sequences, of which `params.n` count, or a search."""
    beam = _search(body, params.n, body.best_of)
    if beam is not None:
        return params, beam
    return widen_to_best_of(intake, params, body.best_of, stream=bool(body.stream)), None


def _search(
    body: ChatRequest | CompletionRequest | VLLMGenerateRequest, n: int, best_of: int | None
) -> BeamParams | None:
    """Return the search that `body` asks for: `best_of` beams, or `n`; None if it asks for none.

    temperature, top_k, top_p, min_p and seed are ignored, as in vLLM. Raises InvalidRequest for stop
    strings, min_tokens and penalties, which would silently change nothing.
    """
    if not body.use_beam_search:
        return None
    for name, neutral in (
        ("stop", (None, [])),
        ("min_tokens", (None, 0)),
        ("repetition_penalty", (None, 1.0)),
        ("frequency_penalty", (None, 0.0)),
        ("presence_penalty", (None, 0.0)),
    ):
        if getattr(body, name, None) not in neutral:
            raise InvalidRequest(f"{name} can't be used with use_beam_search", param=name)
    if best_of is not None and best_of < n:
        raise InvalidRequest(f"best_of must be at least n = {n}, got {best_of}", param="best_of")
    return BeamParams(n if best_of is None else best_of, body.length_penalty)

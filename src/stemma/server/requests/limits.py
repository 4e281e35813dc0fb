"""The operator's limits of requests, in addition to the model's (`RequestSettings`)."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from stemma.config.settings import RequestSettings, Settings
from stemma.engine.api import GenerationRequest
from stemma.errors import PromptTooLong
from stemma.types import TokenArray

Tokens = TypeVar("Tokens", TokenArray, list[int])


def fit_prompt(limits: RequestSettings, tokens: Tokens, param: str) -> Tokens:
    """Return `tokens`, truncated to the limit if the settings say so; else raise PromptTooLong."""
    most = limits.max_input_tokens
    if most is None or len(tokens) <= most:
        return tokens
    if limits.truncation == "left":
        return tokens[-most:]
    if limits.truncation == "right":
        return tokens[:most]
    raise PromptTooLong.of(f"{len(tokens)} tokens", most, param=param, counts="without output")


def cap_output(limits: RequestSettings, request: GenerationRequest) -> GenerationRequest:
    """Return `request` with no more output than the operator allows."""
    most, wanted = limits.max_output_tokens, request.params.max_tokens
    if most is None or (wanted is not None and wanted <= most):
        return request
    least = min(request.params.min_tokens, most)
    return replace(request, params=replace(request.params, max_tokens=most, min_tokens=least))


def largest_n(settings: Settings) -> int:
    """Return the most sequences that one request may ask for: as many as may, and can, run at once."""
    runnable = settings.engine.scheduler.seats
    return min(runnable, settings.requests.max_n or runnable)

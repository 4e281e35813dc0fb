"""Prompts that idle time prepares: one at a time, alone in the scheduler, until a request comes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from stemma.engine.api import GenerationRequest, Prepared
from stemma.engine.core.request import SequenceState
from stemma.engine.core.validation import CheckedRequest
from stemma.memory.cache.prefix_cache import PrefixCache

MIN_PREPARED_TOKENS = 16
"""Fewer aren't worth a step of their own: the turn computes them beside its new text, at next to no cost."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """The one under way."""

    request_id: str
    on_end: Callable[[Prepared], None]


def preparation_of(cache: PrefixCache, request: CheckedRequest, max_tokens: int) -> GenerationRequest | None:
    """Return what to compute of a prompt: up to `max_tokens` behind what is cached on the device.

    None: it isn't worth a step, or nothing of it is cached, as after a flush. A prompt with images isn't cut.
    """
    tokens = request.prompt_token_ids
    num_cached = cache.match(request.namespace, tokens)
    end = min(len(tokens), num_cached + max_tokens)
    if not num_cached or end - num_cached < MIN_PREPARED_TOKENS:
        return None
    if end < len(tokens) and request.images is not None:
        return None
    return replace(request, prompt_token_ids=tokens[:end], is_preparation=True)


def prepared_by(sequence: SequenceState) -> Prepared:
    """Return how far a sequence came, before its lease is freed."""
    num_cached = 0 if sequence.lease is None else sequence.lease.num_cached_tokens
    num_tokens = max(num_cached, sequence.num_computed)
    return Prepared(num_cached, num_tokens, was_cut=num_tokens < sequence.num_tokens)

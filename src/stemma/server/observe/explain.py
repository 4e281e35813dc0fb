"""Explanations: what a request got from the cache, where it parts from what is cached, and why.

A server keeps a note of its last requests: counts, the reason and a few dozen token ids around the place
where the prompt parts. Text is decoded only when somebody asks, off the event loop and off the step loop.

How the cached sequence goes on may be another client's text. It comes from the request's own namespace,
never from another. In an answer it is quoted only to a tenant (API key), who has namespaces of its own;
where there are no tenants all clients share them, and only the operator sees it (``/admin/explain``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields
from typing import Any

from starlette.requests import Request

from stemma.engine.api import CacheReport
from stemma.errors import InvalidRequest
from stemma.model.text.tokenizer import Tokenizer
from stemma.prefix.explain import MissReason
from stemma.server.observe.explanations import Explanation
from stemma.server.observe.prompt_parts import Difference

_HEADER = "x-stemma-explain"
_ANSWERS = {"": False, "0": False, "false": False, "1": True, "true": True}
InThread = Callable[[Callable[[], dict[str, Any]]], Awaitable[dict[str, Any]]]
"""Runs a function off the event loop."""


@dataclass(frozen=True, slots=True)
class ExplainedReport(CacheReport):
    """A report whose client asked for an explanation."""

    explanation: dict[str, Any] | None = None


def is_asked(request: Request) -> bool:
    """Return whether the header or ``stemma.explain`` asks; raise InvalidRequest for other values."""
    given = request.headers.get(_HEADER, "").strip().lower()
    if given not in _ANSWERS:
        raise InvalidRequest(f"the header {_HEADER} is 1 or 0", param=_HEADER)
    return _ANSWERS[given] or bool(getattr(request.state, "explain", False))


def explanation_of(cache: CacheReport) -> dict[str, Any]:
    """Return the member ``explanation`` of a ``stemma`` object; empty if it wasn't asked for."""
    if isinstance(cache, ExplainedReport) and cache.explanation is not None:
        return {"explanation": cache.explanation}
    return {}


def _changed(difference: Difference | None) -> dict[str, Any] | None:
    if difference is None:
        return None
    return {
        "part": difference.changed.value,
        "detail": difference.detail,
        "missed_tokens": difference.num_missed_tokens,
    }


class Explainer:
    """Puts explanations into words."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        in_thread: InThread,
        *,
        is_exact: bool,
    ) -> None:
        """`is_exact`: clients may see the place of a token."""
        self._tokenizer = tokenizer
        self._in_thread = in_thread
        self._is_exact = is_exact

    async def explained(self, note: Explanation, *, quotes_cached: bool) -> ExplainedReport:
        """Return the report in `note`, one to a client, with an explanation as exact as they may be."""
        told = await self.as_json(note, has_place=self._is_exact, quotes_cached=quotes_cached)
        known = {one.name: getattr(note.cache, one.name) for one in fields(CacheReport) if one.init}
        return ExplainedReport(**known, explanation=told)

    async def as_json(
        self, note: Explanation, *, has_place: bool = True, quotes_cached: bool = True
    ) -> dict[str, Any]:
        """Return an explanation with its texts decoded. It says nothing of other tenants."""
        cache = note.cache
        shown: dict[str, Any] = {
            "request": note.request_id,
            "x_request_id": note.x_request_id,
            "prompt_tokens": cache.num_prompt_tokens,
            "cached_tokens": cache.num_cached_tokens,
            "computed_tokens": cache.num_prompt_tokens - cache.num_cached_tokens,
            "cached_tokens_by_tier": {tier.value: count for tier, count in cache.cached_by_tier.items()},
            "public_tokens": cache.num_public_tokens,
            "exact_history_tokens": cache.num_exact_history_tokens,
            "prepared_tokens": cache.num_prepared_tokens,
            "reason": cache.miss_reason,
            "detail": cache.miss_detail,
            "parts_at": None,
            "changed": _changed(note.difference),
        }
        if has_place and cache.miss_reason not in (None, MissReason.LAST_TOKEN):
            shown["parts_at"] = await self._in_thread(lambda: self._place(note, quotes_cached))
        return shown

    async def for_operator(self, note: Explanation) -> dict[str, Any]:
        """Return all that is known: both texts, and whether another tenant has the prompt cached."""
        shown = await self.as_json(note)
        if note.cache.num_tokens_of_others > note.cache.num_cached_tokens:
            shown["reason"] = MissReason.OTHER_TENANT.value
            shown["detail"] = (
                f"{note.cache.miss_detail} The first {note.cache.num_tokens_of_others} tokens are cached for "
                "another tenant or cache_salt; nothing is shared between two."
            )
        return shown

    def _place(self, note: Explanation, quotes_cached: bool) -> dict[str, Any]:
        def text(token_ids: tuple[int, ...]) -> str:
            return self._tokenizer.decode([*note.before, *token_ids], skip_special_tokens=False)

        parting = note.cache.parting
        return {
            "token": note.num_common_tokens + 1,
            "of": note.cache.num_prompt_tokens,
            "common": text(()),
            "cached": text(parting.cached_token_ids) if parting is not None and quotes_cached else None,
            "yours": text(note.yours),
        }

"""Notes of a server's last requests for explanations: bounded, and without text."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, replace

from stemma.engine.api import CacheReport, GenerationRequest
from stemma.insight.divergence_window import DivergenceWindow
from stemma.prefix.explain import MissReason
from stemma.prefix.index import MAX_FOLLOWING
from stemma.server.observe.collected import Collected, TurnObserver
from stemma.server.observe.prompt_parts import Difference, PromptParts, RecentPrompts

MAX_EXPLANATIONS = 1024
MAX_EXPLANATION_BYTES = 4 << 20
_BYTES_PER_ITEM = 36
"""An int of its own and its place in a tuple."""
_BASE_BYTES = 1024
"""The objects around them, generously."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The record of one request."""

    request_id: str
    cache: CacheReport
    num_common_tokens: int
    """Leading prompt tokens up to the place where it parts."""
    before: tuple[int, ...]
    """Prompt tokens that lead to the place, `MAX_FOLLOWING` at most."""
    yours: tuple[int, ...]
    """Prompt tokens from there on, `MAX_FOLLOWING` at most."""
    x_request_id: str = ""
    """The id of the HTTP request that it came with."""
    difference: Difference | None = None
    """How its conversation differs from the nearest of the last ones, where it parts from what is cached."""

    @classmethod
    def of(cls, request: GenerationRequest, cache: CacheReport, x_request_id: str = "") -> Explanation:
        """Return the note of `request`: O(1), whatever the prompt's length."""
        parting = cache.parting
        at = cache.num_cached_tokens if parting is None else parting.num_common_tokens
        prompt = request.prompt_token_ids
        return cls(
            request_id=request.request_id,
            cache=cache,
            num_common_tokens=at,
            before=tuple(prompt[max(0, at - MAX_FOLLOWING) : at].tolist()),
            yours=tuple(prompt[at : at + MAX_FOLLOWING].tolist()),
            x_request_id=x_request_id,
        )

    @property
    def num_bytes(self) -> int:
        """About how much memory it takes."""
        cached = self.cache.parting.cached_token_ids if self.cache.parting is not None else ()
        num_items = len(self.before) + len(self.yours) + len(cached)
        return _BASE_BYTES + _BYTES_PER_ITEM * num_items + len(self.request_id) + len(self.x_request_id)


class Explanations:
    """The last ones by request id; the oldest are dropped first. Used on the event loop only."""

    def __init__(
        self, max_explanations: int = MAX_EXPLANATIONS, max_bytes: int = MAX_EXPLANATION_BYTES
    ) -> None:
        self._max_explanations = max_explanations
        self._max_bytes = max_bytes
        self._notes: OrderedDict[str, Explanation] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._notes)

    def add(self, note: Explanation) -> None:
        """Keep a note; one of the same request is replaced."""
        old = self._notes.pop(note.request_id, None)
        self.num_bytes += note.num_bytes - (old.num_bytes if old is not None else 0)
        self._notes[note.request_id] = note
        while len(self._notes) > self._max_explanations or self.num_bytes > self._max_bytes:
            self.num_bytes -= self._notes.popitem(last=False)[1].num_bytes

    def find(self, request_id: str) -> Explanation | None:
        """Return the note of a request, or of the newest one with this `x-request-id`.

        Of a completion of several prompts that of the first.
        """
        found = self._notes.get(request_id) or self._notes.get(f"{request_id}-0")
        if found is None:
            found = next(
                (one for one in reversed(self._notes.values()) if one.x_request_id == request_id), None
            )
        return found

    def last(self) -> Explanation | None:
        """Return the newest note."""
        return next(reversed(self._notes.values()), None)


class PartingNote(TurnObserver):
    """Notes of one request where it parts from what is cached."""

    def __init__(
        self,
        explanations: Explanations,
        divergences: DivergenceWindow,
        request: GenerationRequest,
        x_request_id: str,
        recent: RecentPrompts,
        parts: PromptParts | None,
    ) -> None:
        """`parts`: None, it is no conversation."""
        self._explanations = explanations
        self._recent, self._parts = recent, parts
        self._divergences = divergences
        self._request = request
        self._x_request_id = x_request_id

    def began(self, so_far: Collected) -> None:
        """Keep both notes."""
        difference = None
        if self._parts is not None and so_far.exact.miss_reason == MissReason.DIVERGED:
            difference = self._recent.nearest(self._request, self._parts)
        note = Explanation.of(self._request, so_far.exact, self._x_request_id)
        self._explanations.add(replace(note, difference=difference))
        changed = None if difference is None else difference.changed.value
        self._divergences.add(time.monotonic(), self._request, so_far.exact, changed or "")

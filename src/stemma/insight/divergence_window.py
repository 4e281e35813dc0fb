"""The last requests, as much of them as the costliest divergences need: bounded, and without text.

Of each request: when it came, how long its prompt was, how much was cached, why not more, and up to 80 token
ids around the place where it parts from a cached prompt (`RECORD_DTYPE`, 342 bytes). Of the last of these the
whole prompts too, to replay them. Used on the event loop only.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stemma.engine.api import CacheReport, GenerationRequest
from stemma.prefix.explain import MissReason
from stemma.prefix.index import MAX_FOLLOWING
from stemma.prefix.keys import Namespace
from stemma.types import TokenArray

MAX_RECORDS = 16_384
MAX_PROMPTS = 2048
MAX_PROMPT_TOKENS = 2 << 20
"""Tokens of all whole prompts kept: 8 MiB."""
MAX_CONTEXT = 32
"""Tokens kept before and behind the place."""
NO_TOKEN = -1
UNKNOWN = -1
REASONS = tuple(MissReason)

REORDERED = "tools reordered"
CHANGED_LIST = "tools"
CHANGES = ("", REORDERED, CHANGED_LIST)
"""Changed parts that no value's shape tells of."""

RECORD_DTYPE = np.dtype(
    [
        ("at", "<f8"),
        ("prompt", "<i4"),
        ("cached", "<i4"),
        ("place", "<i4"),
        ("reason", "i1"),
        ("changed", "i1"),
        ("before", "<i4", (MAX_CONTEXT,)),
        ("yours", "<i4", (MAX_CONTEXT,)),
        ("theirs", "<i4", (MAX_FOLLOWING,)),
    ]
)
Records = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class WholePrompt:
    """A whole prompt."""

    at: float
    namespace: Namespace
    tokens: TokenArray


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The contents of the window at one moment."""

    records: Records
    """Oldest first."""
    prompts: tuple[WholePrompt, ...]
    """Oldest first."""


class DivergenceWindow:
    """Notes of the last requests; the oldest are dropped first."""

    def __init__(
        self,
        max_records: int = MAX_RECORDS,
        max_prompts: int = MAX_PROMPTS,
        max_prompt_tokens: int = MAX_PROMPT_TOKENS,
    ) -> None:
        self._records: Records = np.zeros(max_records, dtype=RECORD_DTYPE)
        self._num_seen = 0
        self._prompts: deque[WholePrompt] = deque(maxlen=max_prompts)
        self._max_prompt_tokens = max_prompt_tokens
        self.num_prompt_tokens = 0
        """Tokens of the whole prompts kept."""

    def __len__(self) -> int:
        return min(self._num_seen, len(self._records))

    @property
    def num_bytes(self) -> int:
        """Memory of records and prompts."""
        return self._records.nbytes + 4 * self.num_prompt_tokens

    def add(self, now: float, request: GenerationRequest, cache: CacheReport, changed: str = "") -> None:
        """Note a request that has started. O(1); the prompt is not copied.

        `changed`: the part in which its conversation differs from the nearest one, one of `CHANGES`.
        """
        prompt = request.prompt_token_ids
        parting = cache.parting
        place = cache.num_cached_tokens if parting is None else parting.num_common_tokens
        record = self._records[self._num_seen % len(self._records)]
        self._num_seen += 1
        record["at"], record["prompt"], record["cached"] = now, len(prompt), cache.num_cached_tokens
        record["place"] = place
        record["reason"] = UNKNOWN if cache.miss_reason is None else _NUMBERS[cache.miss_reason]
        record["changed"] = CHANGES.index(changed) if changed in CHANGES else 0
        before, yours = prompt[max(0, place - MAX_CONTEXT) : place], prompt[place : place + MAX_CONTEXT]
        for name, ids in (("before", before), ("yours", yours)):
            record[name][: len(ids)] = ids
            record[name][len(ids) :] = NO_TOKEN
        theirs = () if parting is None else parting.cached_token_ids
        record["theirs"][: len(theirs)] = theirs
        record["theirs"][len(theirs) :] = NO_TOKEN
        self._keep(WholePrompt(now, request.namespace, prompt))

    def _keep(self, prompt: WholePrompt) -> None:
        prompts = self._prompts
        while prompts and (
            len(prompts) == prompts.maxlen
            or self.num_prompt_tokens + len(prompt.tokens) > self._max_prompt_tokens
        ):
            self.num_prompt_tokens -= len(prompts.popleft().tokens)
        if len(prompt.tokens) <= self._max_prompt_tokens:
            prompts.append(prompt)
            self.num_prompt_tokens += len(prompt.tokens)

    def snapshot(self) -> Snapshot:
        """Return a copy of the records and the prompts, for any thread."""
        first = self._num_seen % len(self._records)
        if self._num_seen <= len(self._records):
            records = self._records[: self._num_seen].copy()
        else:
            records = np.concatenate((self._records[first:], self._records[:first]))
        return Snapshot(records, tuple(self._prompts))


_NUMBERS = {reason.value: number for number, reason in enumerate(REASONS)}

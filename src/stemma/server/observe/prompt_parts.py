"""What the last prompts were made of, so that a later one can be told what changed since.

Bounded, and without text. Clients name an earlier answer (Anthropic's `previous_message_id`, OpenAI's
`comparison_response_id`), and what is told is exact: parts are compared by digests, prompts by their tokens.
What stands in one tenant or salt is never compared with another's.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Any

import numpy as np
import orjson

from stemma.engine.api import GenerationRequest
from stemma.server.observe.collected import Collected, TurnObserver
from stemma.types import TokenArray

MAX_BYTES = 16 << 20
_BASE_BYTES = 1024
"""The objects around one prompt, generously."""
_BYTES_PER_PART = 96
_MAX_LOOKED_AT = 32
"""Newest prompts among which the nearest is looked for."""
_SYSTEM_ROLES = ("system", "developer")


class Changed(StrEnum):
    """The first part, in the order of prompts, in which two differ."""

    MODEL = "model"
    TOOLS_REORDERED = "tools reordered"
    TOOLS = "tools"
    SYSTEM = "system"
    SETTINGS = "settings"
    """Others that a template writes into prompts: thinking, effort."""
    MESSAGES = "messages"
    """An earlier message differs, or is gone."""
    NOTHING = "nothing"
    """Messages were added, no more."""


@dataclass(frozen=True, slots=True)
class PromptParts:
    """Digests of what one prompt was rendered from."""

    tools: tuple[tuple[str, bytes], ...]
    """Names with digests, in their order."""
    system: bytes
    """Of the system messages before the first other one."""
    messages: tuple[bytes, ...]
    """Of the others."""
    settings: bytes

    @classmethod
    def of(
        cls,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        settings: Mapping[str, Any],
    ) -> PromptParts:
        """Return those of a conversation as a template gets it; for threads: a long one takes a while."""
        num_system = next(
            (number for number, one in enumerate(messages) if one.get("role") not in _SYSTEM_ROLES),
            len(messages),
        )
        return cls(
            tuple((_tool_name(one), _digest(one)) for one in tools or ()),
            _digest(messages[:num_system]),
            tuple(map(_digest, messages[num_system:])),
            _digest(settings),
        )

    @property
    def num_bytes(self) -> int:
        """About how much memory they take."""
        return _BASE_BYTES + _BYTES_PER_PART * (len(self.tools) + len(self.messages))


@dataclass(frozen=True, slots=True)
class Difference:
    """How a prompt differs from an earlier one."""

    changed: Changed
    num_earlier_tokens: int
    """Length of the earlier prompt."""
    num_common_tokens: int
    """Leading tokens that both have."""
    detail: str = ""
    """Names of tools, or the number of the message. Client's words: escape them for terminals."""

    @property
    def num_missed_tokens(self) -> int:
        """Tokens of the earlier prompt that would have been found again, had nothing changed."""
        return self.num_earlier_tokens - self.num_common_tokens


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    salt: str
    adapter: str
    tokens: TokenArray
    parts: PromptParts

    @classmethod
    def of(cls, request: GenerationRequest, parts: PromptParts) -> _Kept:
        namespace = request.namespace
        return cls(namespace.salt, namespace.adapter, request.prompt_token_ids, parts)

    @property
    def num_bytes(self) -> int:
        return self.parts.num_bytes + self.tokens.nbytes


class RecentPrompts:
    """The parts of the last prompts by request id, the oldest dropped first. Used on the event loop only."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self.num_bytes = 0

    def add(self, request: GenerationRequest, parts: PromptParts) -> None:
        """Keep the parts of a request that was answered."""
        kept = _Kept.of(request, parts)
        if kept.num_bytes > self._max_bytes // 4:
            return
        self._kept[request.request_id] = kept
        self.num_bytes += kept.num_bytes
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= self._kept.popitem(last=False)[1].num_bytes

    def since(self, earlier_id: str, request: GenerationRequest, parts: PromptParts) -> Difference | None:
        """Return how a request differs from the one with this id; None: that isn't kept, or is another's."""
        earlier = self._kept.get(earlier_id)
        if earlier is None or earlier.salt != request.namespace.salt:
            return None
        return _difference(
            earlier, _Kept(earlier.salt, request.namespace.adapter, request.prompt_token_ids, parts)
        )

    def nearest(self, request: GenerationRequest, parts: PromptParts) -> Difference | None:
        """Return how it differs from that of the newest ones with which it has most tokens in common."""
        now = _Kept.of(request, parts)
        found: Difference | None = None
        for earlier in islice(reversed(self._kept.values()), _MAX_LOOKED_AT):
            if (earlier.salt, earlier.adapter) != (now.salt, now.adapter):
                continue
            one = _difference(earlier, now)
            if found is None or one.num_common_tokens > found.num_common_tokens:
                found = one
        return found


class PartsKeeper(TurnObserver):
    """Keeps the parts of one prompt once it was answered."""

    def __init__(self, recent: RecentPrompts, request: GenerationRequest, parts: PromptParts) -> None:
        self._recent, self._request, self._parts = recent, request, parts

    async def finished(self, so_far: Collected) -> None:
        """Keep them: the next turn may name this one as soon as its client has the end."""
        self._recent.add(self._request, self._parts)


def _difference(earlier: _Kept, now: _Kept) -> Difference:
    changed, detail = _changed(earlier, now)
    length = min(len(earlier.tokens), len(now.tokens))
    differs = np.flatnonzero(earlier.tokens[:length] != now.tokens[:length])
    num_common = int(differs[0]) if len(differs) else length
    return Difference(changed, len(earlier.tokens), num_common, detail)


def _changed(earlier: _Kept, now: _Kept) -> tuple[Changed, str]:
    before, after = earlier.parts, now.parts
    if earlier.adapter != now.adapter:
        return Changed.MODEL, ""
    if before.tools != after.tools:
        if sorted(before.tools) == sorted(after.tools):
            return Changed.TOOLS_REORDERED, ""
        return Changed.TOOLS, _tools_changed(dict(before.tools), dict(after.tools))
    if before.system != after.system:
        return Changed.SYSTEM, ""
    if before.settings != after.settings:
        return Changed.SETTINGS, ""
    for number, message in enumerate(before.messages):
        if number >= len(after.messages) or after.messages[number] != message:
            return Changed.MESSAGES, f"message {number + 1}"
    return Changed.NOTHING, ""


def _tools_changed(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> str:
    """Return e.g. ``+grep -web_search ~bash``, a few of them."""
    names = [f"+{name}" for name in after if name not in before]
    names += [f"-{name}" for name in before if name not in after]
    names += [f"~{name}" for name in after if name in before and before[name] != after[name]]
    return " ".join(names[:8])


def _tool_name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    return str(function.get("name", ""))[:64] if isinstance(function, Mapping) else ""


def _digest(value: Any) -> bytes:
    data = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS, default=str)
    return hashlib.blake2b(data, digest_size=8).digest()

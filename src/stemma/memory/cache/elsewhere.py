"""Whether a prompt that missed from its first block on is cached for somebody else: for explanations only.

Keys bind adapter, tenant and model, so equal tokens have different keys there and are never shared. What
another tenant has cached is told to the operator alone: a client could test guesses with it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Protocol

from stemma.memory.cache.lease import Lease
from stemma.prefix.explain import Miss, MissReason, cached_for_other_adapter, cached_for_other_model
from stemma.prefix.index import Match, PrefixIndex
from stemma.prefix.keys import Namespace
from stemma.types import TokenArray

_MAX_NAMESPACES = 16
"""The namespaces last used that are asked."""
_UNSHARED = (MissReason.COLD, MissReason.DIVERGED, MissReason.EXTENDS)


class OtherModels(Protocol):
    """Prompts that other models, or other layouts, left in the disk directory."""

    def find(self, namespace: Namespace, tokens: TokenArray) -> tuple[int, str] | None:
        """Return how many leading tokens are there at most, and a phrase that says how they were computed."""


class Elsewhere:
    """The namespaces last used, and the other models. Not thread-safe: one owner, the step loop."""

    def __init__(self, block_size: int, other_models: OtherModels | None) -> None:
        self._block_size = block_size
        self._other_models = other_models
        self._namespaces: OrderedDict[Namespace, None] = OrderedDict()

    def note(self, namespace: Namespace) -> None:
        """Something was cached for `namespace`."""
        self._namespaces[namespace] = None
        self._namespaces.move_to_end(namespace)
        if len(self._namespaces) > _MAX_NAMESPACES:
            self._namespaces.popitem(last=False)

    def explain(self, index: PrefixIndex, lease: Lease, found: Match, miss: Miss) -> Miss:
        """Return a better reason for `miss` if others have a block of the prompt and its own namespace none.

        At most `_MAX_NAMESPACES` matches, and only for prompts that have to be computed from the start.
        """
        if miss.reason not in _UNSHARED or found.num_tokens >= self._block_size:
            return miss
        own, tokens = lease.namespace, lease.tokens[:-1]
        longest: dict[bool, tuple[int, str]] = {}
        for other in self._namespaces:
            if other == own or other.is_public or other.head != own.head:
                continue
            num_tokens = index.match(other, tokens).num_tokens
            is_ours = other.salt == own.salt
            if num_tokens >= self._block_size and num_tokens > longest.get(is_ours, (0, ""))[0]:
                longest[is_ours] = (num_tokens, other.adapter)
        num_of_others = longest.get(False, (0, ""))[0]
        if True in longest:
            better = cached_for_other_adapter(*longest[True])
        elif self._other_models is not None and (left := self._other_models.find(own, tokens)) is not None:
            better = cached_for_other_model(*left)
        else:
            better = miss
        return replace(better, parting=miss.parting, num_tokens_of_others=num_of_others)

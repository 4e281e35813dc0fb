"""Explains why the first token of a prompt that wasn't served from cache missed.

Users of other servers often ask for this ("0 % hit, and no reason given"). The answer is a reason that
programs can count and a sentence that people can read. It needs three facts: how far the prompt matched,
what follows at that point in the cache, and whether the missing block is a *ghost*, a block that was evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum

from stemma.prefix.keys import partial_key
from stemma.types import BlockKey, Tier, TokenArray


class MissReason(StrEnum):
    """Machine-readable reasons, most specific first."""

    DISABLED = "disabled"
    """The prefix cache is off."""
    RECOMPUTED = "recomputed"
    """The request wants what only computing gives: log-probabilities of its prompt."""
    LAST_TOKEN = "last_token"
    """Everything reusable was reused; the last prompt token is always computed."""
    EVICTED = "evicted"
    """The next block was cached once and was evicted to make room."""
    FLUSHED = "flushed"
    """The next block was cached once and was dropped by a flush."""
    LOAD_FAILED = "load_failed"
    """A lower tier has more of it, but the load brought less."""
    LOAD_SLOWER = "load_slower"
    """A lower tier has more of it, but computing it is predicted to be faster."""
    LOAD_NOT_AWAITED = "load_not_awaited"
    """A slow tier has more of it, but requests don't wait for slow tiers (prefetch policy best_effort)."""
    NO_STATE = "no_state"
    """KV of more tokens is cached, but no checkpoint behind them of layers that are recurrent or windowed."""
    NO_ROOM = "no_room"
    """The head of a block could have been reused, but no block was free to copy it to."""
    OTHER_ADAPTER = "other_adapter"
    """The same tokens are cached for another adapter of the model, or for none."""
    MODEL_CHANGED = "model_changed"
    """The same tokens lie on the disk, computed by another model or in another layout."""
    OTHER_TENANT = "other_tenant"
    """The same tokens are cached for another tenant or `cache_salt`. Only the operator is told."""
    DIVERGED = "diverged"
    """Cached sequences go on differently from here."""
    EXTENDS = "extends"
    """The cached sequence ends here; the prompt goes on with new text."""
    COLD = "cold"
    """Nothing cached begins like this prompt."""


@dataclass(frozen=True, slots=True)
class Parting:
    """Where a prompt parts from the nearest cached sequence of its own namespace."""

    num_common_tokens: int
    """Leading tokens that both have."""
    cached_token_ids: tuple[int, ...]
    """How the cached sequence goes on, `index.MAX_FOLLOWING` tokens at most."""


@dataclass(frozen=True, slots=True)
class Miss:
    """The reason and the sentence."""

    reason: MissReason
    detail: str
    parting: Parting | None = None
    """None where no cached sequence goes on differently."""
    num_tokens_of_others: int = 0
    """Leading tokens that another tenant or salt has cached, where that is more. Only for the operator."""


@dataclass(frozen=True, slots=True)
class Ghost:
    """A block that was here."""

    gone_at: float
    """The injected clock, seconds."""
    reason: MissReason
    """EVICTED or FLUSHED."""
    policy: str
    """Name of the eviction policy that chose it."""
    num_tokens: int
    cause: str = ""
    """Reason of the eviction, as the end of a sentence."""


class Ghosts:
    """The last `capacity` blocks that left the index, by key; the oldest are dropped first.

    Keyed by the first 8 bytes of the block key: a collision could only give a wrong explanation. About 250
    bytes per entry.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._ghosts: OrderedDict[bytes, Ghost] = OrderedDict()
        self._num_by_length: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._ghosts)

    def add(self, key: bytes, ghost: Ghost) -> None:
        """Remember that the block named `key` left."""
        self.remove(key)
        self._ghosts[key[:8]] = ghost
        self._num_by_length[ghost.num_tokens] = self._num_by_length.get(ghost.num_tokens, 0) + 1
        if len(self._ghosts) > self._capacity:
            self._drop_length(self._ghosts.popitem(last=False)[1].num_tokens)

    def remove(self, key: bytes) -> Ghost | None:
        """Drop and return the ghost of a block that came back; None if there is none."""
        ghost = self._ghosts.pop(key[:8], None)
        if ghost is not None:
            self._drop_length(ghost.num_tokens)
        return ghost

    def find(self, parent: BlockKey, tokens: TokenArray) -> Ghost | None:
        """Return the ghost that would have served the most of `tokens`, which follow the block `parent`.

        Looks only for blocks of lengths that some ghost has: at most `block_size` hashes.
        """
        for num_tokens in sorted(self._num_by_length, reverse=True):
            if num_tokens <= len(tokens):
                ghost = self._ghosts.get(partial_key(parent, tokens[:num_tokens])[:8])
                if ghost is not None:
                    return ghost
        return None

    def _drop_length(self, num_tokens: int) -> None:
        self._num_by_length[num_tokens] -= 1
        if not self._num_by_length[num_tokens]:
            del self._num_by_length[num_tokens]


@dataclass(frozen=True, slots=True)
class MissFacts:
    """Facts about the point where the match ended."""

    num_prompt_tokens: int
    num_cached_tokens: int
    goes_on: bool
    """Whether cached sequences continue past the matched tokens."""
    ghost: Ghost | None = None
    num_tokens_without_room: int = 0
    """Tokens that matched in part of a block which could not be copied."""


def explain_miss(facts: MissFacts, now: float) -> Miss:
    """Return why token `num_cached_tokens` of the prompt had to be computed."""
    at, total = facts.num_cached_tokens, facts.num_prompt_tokens
    if at >= total - 1:
        return LAST_TOKEN_MISS
    if facts.num_tokens_without_room:
        return Miss(
            MissReason.NO_ROOM,
            f"{facts.num_tokens_without_room} more tokens from position {at} are cached in part of a block, "
            "but no block was free to copy them to.",
        )
    if facts.ghost is not None:
        verb = "flushed" if facts.ghost.reason is MissReason.FLUSHED else "evicted"
        by = f" by policy {facts.ghost.policy}" if verb == "evicted" else ""
        cause = f" {facts.ghost.cause}" if facts.ghost.cause else ""
        return Miss(
            facts.ghost.reason,
            f"The block of {facts.ghost.num_tokens} tokens after position {at} was cached and was {verb}"
            f"{by} {max(0.0, now - facts.ghost.gone_at):.1f} s ago{cause}.",
        )
    if at == 0:
        return Miss(MissReason.COLD, "Nothing in the cache begins like this prompt.")
    if facts.goes_on:
        return Miss(
            MissReason.DIVERGED,
            f"The first {at} of {total} prompt tokens are cached; cached sequences go on differently at "
            f"position {at}.",
        )
    return Miss(
        MissReason.EXTENDS,
        f"The cached sequence ends after {at} of {total} prompt tokens; the rest is new text.",
    )


DISABLED_MISS = Miss(MissReason.DISABLED, "The prefix cache is disabled.")
LAST_TOKEN_MISS = Miss(
    MissReason.LAST_TOKEN, "Everything reusable was reused; only the last prompt token was computed."
)
RECOMPUTED_MISS = Miss(
    MissReason.RECOMPUTED, "Log-probabilities of the prompt were asked for: each token was computed."
)


def no_state(num_with_kv: int, num_cached_tokens: int) -> Miss:
    """Return the miss of a prompt with KV of `num_with_kv` tokens, but a state behind fewer."""
    return Miss(
        MissReason.NO_STATE,
        f"KV of {num_with_kv} tokens is cached, but some layers of this model (recurrent, or with sliding "
        "windows) need what lies right before a token too, and the last checkpoint of that stands behind "
        f"position {num_cached_tokens}.",
    )


def load_failed(num_blocks: int, num_cached_tokens: int) -> Miss:
    """Return the miss of a prompt of which `num_blocks` more were to be loaded and didn't arrive."""
    return Miss(
        MissReason.LOAD_FAILED,
        f"{num_blocks} more blocks after position {num_cached_tokens} lie in lower tiers, but their load "
        "failed or took too long.",
    )


def load_passed_over(num_blocks: int, tier: Tier, num_cached_tokens: int, *, is_awaited: bool) -> Miss:
    """Return the miss of a prompt of which `num_blocks` more lie in `tier` and weren't asked for."""
    where = f"{num_blocks} more blocks after position {num_cached_tokens} lie in the {tier} tier"
    if is_awaited:
        detail = f"{where}, but computing them is predicted to be faster than loading them."
        return Miss(MissReason.LOAD_SLOWER, detail)
    detail = f"{where}, but requests don't wait for this tier: the prefetch policy is best_effort."
    return Miss(MissReason.LOAD_NOT_AWAITED, detail)


def cached_for_other_adapter(num_tokens: int, adapter: str) -> Miss:
    """Return the miss of a prompt whose first `num_tokens` tokens are cached for another adapter."""
    whose = f"the adapter {adapter[:12]}" if adapter else "the model without an adapter"
    return Miss(
        MissReason.OTHER_ADAPTER,
        f"The first {num_tokens} tokens are cached for {whose}; an adapter changes the KV of every token.",
    )


def cached_for_other_model(num_tokens: int, difference: str) -> Miss:
    """Return the miss of a prompt whose first `num_tokens` tokens another model left on the disk."""
    return Miss(
        MissReason.MODEL_CHANGED,
        f"The first {num_tokens} tokens lay in the disk cache when the server started, computed "
        f"{difference}.",
    )

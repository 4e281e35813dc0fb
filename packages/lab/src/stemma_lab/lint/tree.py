"""The tree of prompts: which earlier one each begins like, how far, and what many begin with.

Prompts are compared token by token, and nothing is ever evicted: what a server with room enough would reuse.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stemma.prefix.keys import DEFAULT_NAMESPACE, KeySpace, chain_keys
from stemma.types import TokenArray
from stemma_lab.lint.prompts import LintedPrompt

BLOCK = 16
"""Tokens by which earlier prompts are looked up; the rest is compared."""
_MAX_CANDIDATES = 8
"""Latest prompts that are compared, of those that begin alike."""
_MAX_TRUNKS = 5


@dataclass(frozen=True, slots=True)
class Trunk:
    """A beginning that several prompts share."""

    num_tokens: int
    num_prompts: int
    prompt: int
    """Number of one that has it."""


def num_common(one: TokenArray, other: TokenArray) -> int:
    """Return how many leading tokens two prompts share."""
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


class PromptTree:
    """Prompts in their order."""

    def __init__(self) -> None:
        self._root = KeySpace("", "", BLOCK).root(DEFAULT_NAMESPACE)
        self._prompts: list[LintedPrompt] = []
        self._last: defaultdict[bytes, list[int]] = defaultdict(list)
        """By block key, the latest prompts that have it."""
        self._counts: Counter[bytes] = Counter()
        self._depths: dict[bytes, tuple[int, int, bytes | None]] = {}
        """By block key: tokens up to its end, a prompt, and the key before it."""
        self.num_tokens = self.num_shared = self.num_first = 0

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def reuse(self) -> float:
        """Tokens that an earlier prompt begins with too, as a share of those of all prompts but the first."""
        later = self.num_tokens - self.num_first
        return self.num_shared / later if later else 0.0

    def add(self, prompt: LintedPrompt) -> LintedPrompt | None:
        """Enter a prompt; return the earlier one that is nearest: None for the first."""
        keys = [bytes(key) for key in chain_keys(self._root, prompt.tokens, BLOCK)]
        nearest, shared = self._nearest(prompt, self._candidates(keys))
        number = len(self._prompts)
        self._prompts.append(prompt)
        self.num_tokens += len(prompt.tokens)
        self.num_shared += shared
        if not number:
            self.num_first = len(prompt.tokens)
        before = None
        for depth, key in enumerate([b"", *keys]):
            latest = self._last[key]
            latest.append(number)
            del latest[:-_MAX_CANDIDATES]
            self._counts[key] += 1
            self._depths.setdefault(key, (depth * BLOCK, number, before))
            before = key
        return nearest

    def _candidates(self, keys: Sequence[bytes]) -> list[int]:
        """Return the latest prompts that share most blocks, the latest first."""
        deepest = next((key for key in reversed(keys) if key in self._last), b"")
        return self._last[deepest][::-1]

    def _nearest(self, prompt: LintedPrompt, candidates: Sequence[int]) -> tuple[LintedPrompt | None, int]:
        """Return the candidate that has most parts in common, and how many tokens the best of them shares."""
        best: LintedPrompt | None = None
        shared, best_rank = 0, (-1, -1)
        for number in candidates:
            other = self._prompts[number]
            common = num_common(prompt.tokens, other.tokens)
            shared = max(shared, common)
            rank = (_num_equal(prompt, other), common)
            if rank > best_rank:
                best, best_rank = other, rank
        return best, shared

    def trunks(self) -> list[Trunk]:
        """Return the shared beginnings that save most, each to where the first of its prompts part."""
        inner = {before for key, (_, _, before) in self._depths.items() if self._continues(key, before)}
        ends = [key for key, count in self._counts.items() if key and count > 1 and key not in inner]
        ends.sort(key=lambda key: self._depths[key][0] * (self._counts[key] - 1), reverse=True)
        found = []
        for key in ends[:_MAX_TRUNKS]:
            num_tokens, number, _ = self._depths[key]
            found.append(Trunk(num_tokens, self._counts[key], number))
        return found

    def _continues(self, key: bytes, before: bytes | None) -> bool:
        return before is not None and self._counts[key] == self._counts[before]

    def ends(self, trunk: Trunk, num_tokens: int) -> TokenArray:
        """Return the last tokens of a trunk."""
        tokens = self._prompts[trunk.prompt].tokens[: trunk.num_tokens]
        return tokens[max(0, trunk.num_tokens - num_tokens) :]


def _num_equal(one: LintedPrompt, other: LintedPrompt) -> int:
    """Return how many messages two prompts have in common, and tools."""
    mine, theirs = one.parts, other.parts
    equal = sum(a == b for a, b in zip(mine.messages, theirs.messages, strict=False))
    return equal + (mine.tools == theirs.tools)

"""Lookahead decoding: the model's own guesses at later positions become n-grams, and these become drafts.

After "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding" (Fu et al.,
arXiv 2402.02057), in MindIE `la` with its level N, window W and guess_set_size G. Each verification also
tells what the model would say behind every draft token (one Jacobi iteration). The last N - 1 iterations are
kept as a window over W positions; its diagonals - the token at p from the oldest iteration, at p + 1 from the
next one, and so on - are n-grams each of whose tokens was drawn after the one before it. They go into a pool
of up to G n-grams for each first token.

What a flat causal batch can't do: the paper verifies G n-grams and iterates the window side by side under a
special mask. Here both are one chain: the pool's best n-gram for the last token (verification branch, up to
N - 1 tokens), then the window (lookahead branch), at most N - 1 + W rows instead of (N - 1)(W + G).
So one n-gram of G is verified per step, and the window iterates behind it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from stemma.engine.drafts.index_memory import IndexMemory
from stemma.engine.drafts.source import Proposal
from stemma.types import TokenArray

NGRAM_BYTES = 640
"""Bytes of one n-gram of the pool that is alone with its first token; measured, see the test."""


class Lookahead:
    """A `DraftSource` with an n-gram pool of its own.

    `level` N >= 2: length of the n-grams. `window` W >= 1: positions iterated. `guess_set_size` G >= 1:
    n-grams kept for each first token. Where `memory` has no room, the pool stops growing.
    """

    def __init__(
        self, memory: IndexMemory, *, level: int = 4, window: int = 5, guess_set_size: int = 5
    ) -> None:
        self._level = level
        self._window = window
        self._guess_set_size = guess_set_size
        self._pool: dict[int, OrderedDict[tuple[int, ...], int]] = {}
        """First token -> the tokens after it, least recently seen first, with how often they were seen."""
        self._iterations: deque[tuple[dict[int, int], dict[int, int]]] = deque(maxlen=level - 1)
        """The last iterations: position -> token that went in, and position -> token that came out."""
        self._num_pooled = 0
        self._memory = memory
        self._num_ngrams = 0

    def propose(self, tokens: TokenArray, max_tokens: int) -> Proposal | None:
        """Return the pool's n-gram for the last token, then the window's tokens behind it."""
        self._pool_text(tokens)
        most = min(max_tokens, self._level - 1 + self._window)
        guess = self._best(int(tokens[-1]))
        draft = list(guess)
        latest = self._iterations[-1][1] if self._iterations else {}
        for position in range(len(tokens) + len(draft), len(tokens) + most):
            # Positions that no iteration reached yet start from what usually follows, else from old text.
            token_id = latest.get(position)
            if token_id is None:
                follow = self._best(draft[-1] if draft else int(tokens[-1]))
                token_id = follow[0] if follow else int(tokens[(7 * position) % len(tokens)])
            draft.append(token_id)
        return Proposal(tuple(draft[:most]), "pool" if guess else "window") if most else None

    def observe(self, tokens: TokenArray, draft: Sequence[int], drawn: Sequence[int]) -> None:
        """Add one iteration of the window and pool the n-grams on its diagonals."""
        before = len(tokens) - 1
        inputs = {before + i: int(token) for i, token in enumerate((int(tokens[-1]), *draft))}
        outputs = {before + 1 + i: int(token) for i, token in enumerate(drawn)}
        self._iterations.append((inputs, outputs))
        if len(self._iterations) < self._level - 1:
            return
        for position, token_id in self._iterations[0][0].items():
            rest = self._diagonal(position, token_id)
            if rest:
                self._add(token_id, rest)

    def close(self) -> None:
        """Free the pool."""
        self._memory.free(self._num_ngrams * NGRAM_BYTES)
        self._num_ngrams = 0
        self._pool = {}

    def _diagonal(self, position: int, token_id: int) -> tuple[int, ...]:
        """Return what came out behind `position`, one position further in each later iteration.

        Empty where an iteration went in with another token than came out before, or doesn't reach so far.
        """
        rest: list[int] = []
        for inputs, outputs in self._iterations:
            if inputs.get(position) != token_id:
                return ()
            position += 1
            if (following := outputs.get(position)) is None:
                return ()
            token_id = following
            rest.append(token_id)
        return tuple(rest)

    def _pool_text(self, tokens: TokenArray) -> None:
        """Pool the n-grams of the text itself, each once."""
        level = self._level
        recent = tokens[self._num_pooled :].tolist()
        for i in range(len(recent) - level + 1):
            self._add(recent[i], tuple(recent[i + 1 : i + level]))
        self._num_pooled = max(0, len(tokens) - level + 1)

    def _add(self, first: int, rest: tuple[int, ...]) -> None:
        guesses = self._pool.get(first)
        is_larger = guesses is None or (rest not in guesses and len(guesses) < self._guess_set_size)
        if is_larger:
            if not self._memory.take(NGRAM_BYTES):
                return
            self._num_ngrams += 1
        if guesses is None:
            guesses = self._pool[first] = OrderedDict()
        guesses[rest] = guesses.pop(rest, 0) + 1
        if len(guesses) > self._guess_set_size:
            guesses.popitem(last=False)

    def _best(self, first: int) -> tuple[int, ...]:
        """Return the n-gram seen most often after `first`, the latest of equals; empty if there is none."""
        guesses = self._pool.get(first)
        if not guesses:
            return ()
        return max(reversed(guesses.items()), key=lambda item: item[1])[0]

"""Scores of texts: probabilities of their tokens, computed anew and served from the cache.

Both go through the engine's own model, blocks and prefix cache, in steps cut at different places; on CPU they
are the same to the bit. Runs on the thread that built the engine, with nothing else in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from stemma.engine.build import EngineParts
from stemma.errors import ConfigError
from stemma.model.attend.batch import ForwardBatch
from stemma.prefix.keys import Namespace
from stemma.types import TokenArray

Logprobs = npt.NDArray[np.float64]
COLD_CHUNK, WARM_CHUNK = 256, 192
"""Tokens of a step; logits of all of them are in memory at once."""


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Perplexity of a text, in windows that know nothing of each other."""

    num_tokens: int
    """Tokens that were predicted: all but the first of each window."""
    cold: float
    warm: float
    """With the first half of each window served from the cache."""
    num_cached_tokens: int
    same_bits: bool
    """Whether each token had the same log-probability both times."""


@dataclass(frozen=True, slots=True)
class LikeliestToken:
    """The likeliest of some next tokens."""

    index: int
    logprobs: Logprobs
    """[number of answers], of their first tokens."""
    num_prompt_tokens: int
    num_cached_tokens: int


class Evaluator:
    """Asks an engine's model for probabilities."""

    def __init__(self, parts: EngineParts) -> None:
        """Raises ConfigError for models whose layers keep more than KV of every token."""
        kv = parts.engine.runner.kv
        if kv.num_states:
            raise ConfigError("recurrent layers can't be scored here; ask a server for prompt_logprobs")
        if kv.layout.compressed is not None:
            raise ConfigError(
                "models that compress KV can't be scored here; ask a server for prompt_logprobs"
            )
        if kv.num_pages:
            raise ConfigError("texts are scored with all KV kept: build the engine with free_windows off")
        self._parts = parts
        self._num_namespaces = 0

    def perplexity(self, text: str, window: int) -> Perplexity:
        """Cut `text` into windows of `window` tokens and predict each. Raises ConfigError for too little."""
        totals, counts, num_cached, same = [0.0, 0.0], 0, 0, True
        for tokens in self.windows(text, window):
            cold = self._score(tokens, self._namespace(), len(tokens), COLD_CHUNK)
            warm, cached = self._score_in_halves(tokens)
            same &= bool(np.array_equal(cold, warm))
            totals = [totals[0] - cold.sum(), totals[1] - warm.sum()]
            counts, num_cached = counts + len(cold), num_cached + cached
        means = [math.exp(total / counts) for total in totals]
        return Perplexity(counts, means[0], means[1], num_cached, same)

    def windows(self, text: str, window: int) -> Iterator[TokenArray]:
        """Return the windows of a text; each begins with what the tokenizer puts before a text."""
        limit = self._parts.engine.limits.max_tokens
        if not 2 <= window <= limit:
            raise ConfigError(f"windows of {window} tokens: this model and cache take 2 to {limit}")
        head = self._parts.tokenizer.encode("")
        body = self._parts.tokenizer.encode(text)[len(head) :]
        step = window - len(head)
        if step < 1 or len(head) + len(body) < 2:
            raise ConfigError(
                f"the text has {len(body)} tokens; two are needed to predict one from the other"
            )
        for start in range(0, len(body), step):
            tokens = np.concatenate([head, body[start : start + step]])
            if len(tokens) >= 2:
                yield tokens

    def choose(
        self, prompt: str, answers: list[str], namespace: Namespace, *, cached: bool
    ) -> LikeliestToken:
        """Return which answer's first token is likeliest after a prompt. Raises ConfigError if too long."""
        tokenizer = self._parts.tokenizer
        tokens = tokenizer.encode(prompt)
        limit = self._parts.engine.limits.max_tokens
        if len(tokens) >= limit:
            raise ConfigError(f"a prompt has {len(tokens)} tokens, this model and cache take {limit - 1}")
        first = [int(tokenizer.encode(answer, add_special_tokens=False)[0]) for answer in answers]
        steps = list(self._steps(tokens, namespace, None if cached else 0, WARM_CHUNK, last_only=True))
        logprobs = torch.log_softmax(steps[-1][1][-1].double(), dim=-1)[first].numpy()
        return LikeliestToken(int(np.argmax(logprobs)), logprobs, len(tokens), steps[0][0])

    def _namespace(self) -> Namespace:
        self._num_namespaces += 1
        return Namespace(salt=f"evaluation {self._num_namespaces}")

    def _score_in_halves(self, tokens: TokenArray) -> tuple[Logprobs, int]:
        """Compute a prompt's first half, then all of it, with that half from the cache."""
        namespace, half = self._namespace(), max(1, len(tokens) // 2)
        first = self._score(tokens, namespace, half, COLD_CHUNK)
        scores, num_cached = [first], 0
        for start, logits in self._steps(tokens, namespace, None, WARM_CHUNK):
            num_cached = num_cached or start
            scores.append(_own(logits, tokens, start))
        rest = np.concatenate(scores[1:])
        return np.concatenate([first[:num_cached], rest]), num_cached

    def _score(self, tokens: TokenArray, namespace: Namespace, end: int, chunk: int) -> Logprobs:
        """Return the log-probabilities of tokens 1 .. min(end, T - 1), computed without the cache."""
        steps = self._steps(tokens[:end], namespace, 0, chunk)
        return np.concatenate([_own(logits, tokens, start) for start, logits in steps])

    def _steps(
        self,
        tokens: TokenArray,
        namespace: Namespace,
        max_cached: int | None,
        chunk: int,
        *,
        last_only: bool = False,
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Compute what isn't cached; yield each step's first position and logits, [R, V] or the last row."""
        cache, kv = self._parts.engine.cache, self._parts.engine.runner.kv
        lease = cache.reserve(namespace, tokens, max_cached=max_cached)
        if lease is None:
            raise ConfigError(f"the KV cache has no room for {len(tokens)} tokens; raise kv_cache_memory")
        done = 0
        try:
            if lease.pending is not None:
                lease.pending.num_loaded.result()
                cache.finish_load(lease)
            done = lease.num_cached_tokens
            while done < len(tokens):
                end = min(done + chunk, len(tokens))
                positions = np.arange(done, end)
                slots = lease.block_table[positions // cache.block_size].astype(np.int64) * cache.block_size
                batch = ForwardBatch(
                    token_ids=torch.from_numpy(tokens[done:end].astype(np.int64)),
                    positions=torch.from_numpy(positions),
                    slots=torch.from_numpy(slots + positions % cache.block_size),
                    query_starts=[0, len(positions)],
                    context_lens=[end],
                    block_tables=torch.from_numpy(lease.block_table[None].copy()),
                    logits_rows=torch.arange(len(positions))[-1 if last_only else 0 :],
                )
                yield done, self._parts.model.forward(batch, kv)
                done = end
        finally:
            cache.free(lease, done)


def _own(logits: torch.Tensor, tokens: TokenArray, start: int) -> Logprobs:
    """Return the log-probabilities [R] of the tokens after positions start, start + 1, ... of [R, V]."""
    targets = torch.from_numpy(tokens[start + 1 : start + 1 + len(logits)].astype(np.int64))
    logprobs = torch.log_softmax(logits[: len(targets)].double(), dim=-1)
    found: Logprobs = logprobs.gather(1, targets[:, None])[:, 0].numpy()
    return found

"""A request inside the engine, its sequences (one for each of the `n` answers), and their work in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

import torch

from stemma.engine.api import CacheReport, DraftCount, GenerationRequest
from stemma.engine.pooling import PooledPrompt
from stemma.engine.sampling.ending import EndingRule
from stemma.engine.sampling.logprobs import TokenLogprob
from stemma.engine.sampling.prompt_logprobs import PromptScores
from stemma.engine.sampling.state import SamplingState
from stemma.errors import StemmaError
from stemma.memory.cache.lease import Lease, TokenBuffer
from stemma.memory.tiers.loads import Prefetch
from stemma.types import FinishReason, TokenArray


class Status(Enum):
    """Where a sequence is in its life."""

    NEW = auto()
    """Not queued yet."""
    WAITING = auto()
    """Queued; holds no block."""
    LOADING = auto()
    """Holds blocks; some are being loaded from a lower tier."""
    RUNNING = auto()
    FINISHED = auto()


class RequestState:
    """A request from arrival to its last output. Changed by the step loop, but for `is_answered`."""

    __slots__ = (
        "arrival",
        "cache",
        "ending",
        "first_token_s",
        "is_answered",
        "load_s",
        "loading_since",
        "num_unfinished",
        "order",
        "pooled",
        "queue_wait_s",
        "request",
        "scores",
        "sequences",
    )

    def __init__(self, request: GenerationRequest, ending: EndingRule, arrival: float, order: int) -> None:
        self.request = request
        self.ending = ending
        self.arrival = arrival
        """The injected clock, seconds."""
        self.order = order
        """Arrival number: the age that decides which sequence is preempted."""
        self.sequences: list[SequenceState] = []
        self.num_unfinished = request.params.n
        self.cache: CacheReport | None = None
        """Set once, when the request starts: what a resumption after a preemption finds is no hit."""
        self.queue_wait_s = 0.0
        self.first_token_s: float | None = None
        """From arrival to its first token; None: it has none yet."""
        self.loading_since: float | None = None
        """When its first load from lower tiers began."""
        self.load_s = 0.0
        """The part of `queue_wait_s` that was the wait for that load."""
        self.scores: PromptScores | None = None
        """Log-probabilities of the prompt, where the request wants them; its first sequence collects them."""
        if (num_top := request.params.prompt_logprobs) is not None:
            self.scores = PromptScores(request.vocabulary_ids, num_top)
        self.pooled: PooledPrompt | None = None
        """The vector of the prompt, where the request wants that instead of an answer."""
        if request.pooling is not None:
            self.pooled = PooledPrompt(request.pooling, len(request.prompt_token_ids))
        self.is_answered = False
        """The client has the last output. Set by the output thread alone; later tokens are dropped."""


class SequenceState:
    """One answer in the making: tokens so far, how many of them have KV, and the lease on their blocks.

    A step computes tokens ``[num_computed, num_computed + k)``. Prefill, decode and resumption after a
    preemption differ only in how many are missing.

    While a step with `in_flight` runs, tokens up to `num_launched` get their KV from it, and the token it
    may draw follows `tokens`. All else is the state after the step collected last.
    """

    __slots__ = (
        "_num_prompt",
        "_tokens",
        "common_with",
        "hidden",
        "in_flight",
        "index",
        "lease",
        "match_tokens",
        "match_version",
        "num_computed",
        "num_output",
        "prefetch",
        "sampling",
        "state",
        "status",
        "was_preempted",
    )

    def __init__(self, state: RequestState, index: int, sampling: SamplingState) -> None:
        self.state = state
        self.index = index
        self.sampling = sampling
        self.status = Status.NEW
        self.lease: Lease | None = None
        self.in_flight: Scheduled | None = None
        """Work of this sequence in the step launched last, if that isn't collected yet."""
        self.prefetch: Prefetch | None = None
        """While it waits: a prefetch from the lower tiers."""
        self._tokens = TokenBuffer(state.request.prompt_token_ids)
        self._num_prompt = len(state.request.prompt_token_ids)
        self.num_computed = 0
        self.hidden: torch.Tensor | None = None
        """[H]: the model's last hidden state of token ``num_computed - 1``. Kept where drafts come from the
        model's own layer for multi-token prediction."""
        self.num_output = 0
        self.was_preempted = False
        self.match_tokens = 0
        """Cached prefix on the device, as of cache version `match_version`."""
        self.match_version = -1
        self.common_with: dict[int, int] = {}
        """Arrival number of a running request -> tokens in common with it."""

    @property
    def age(self) -> tuple[int, int]:
        """Sorts the oldest first."""
        return (self.state.order, self.index)

    @property
    def arrival(self) -> float:
        """Arrival of its request on the injected clock, in seconds."""
        return self.state.arrival

    @property
    def adapter_key(self) -> str:
        """The key of its request's adapter; empty for the base model."""
        return self.state.request.namespace.adapter

    @property
    def tokens(self) -> TokenArray:
        """Prompt and output so far; a view."""
        return self._tokens.view

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return self._num_prompt + self.num_output

    @property
    def num_left(self) -> int:
        """Tokens until it ends by number."""
        return self.state.ending.max_tokens - self.num_output

    @property
    def num_missing(self) -> int:
        """Tokens whose KV must be computed before the next one can be drawn."""
        return self.num_tokens - self.num_computed

    @property
    def num_launched(self) -> int:
        """Tokens that have their KV once the step in flight has ended."""
        return self.num_computed if self.in_flight is None else self.in_flight.end

    @property
    def num_unlaunched(self) -> int:
        """Number of tokens that are missing once the step in flight has ended, the token it draws
        included."""
        if self.in_flight is None:
            return self.num_missing
        return self.num_tokens + self.in_flight.num_logits - self.in_flight.end

    @property
    def scores(self) -> PromptScores | None:
        """The log-probabilities of the prompt that this sequence has yet to collect; None: none."""
        scores = self.state.scores if self.index == 0 else None
        return None if scores is None or scores.result is not None else scores

    @property
    def max_cached(self) -> int | None:
        """Leading tokens that need not be computed, at most; None: however many are cached.

        What is wanted of a prompt's tokens themselves can't be read from their KV.
        """
        if (scores := self.scores) is not None:
            return scores.num_scored
        pooled = self.state.pooled
        return None if pooled is None else pooled.max_cached

    def start(self, lease: Lease, *, num_recomputed: int = 0) -> None:
        """Take a lease; the tokens it has from the cache count as computed.

        The last `num_recomputed` of them are computed again: their KV is cached, their hidden state isn't.
        """
        self.lease = lease
        self._tokens = lease.buffer
        self.num_computed = max(0, lease.num_cached_tokens - num_recomputed)

    def stop(self, status: Status) -> None:
        """Remove the lease, which the caller has freed; keep the tokens. The result of a step in flight will
        be dropped."""
        assert self.lease is not None
        if self.in_flight is not None:
            self.in_flight.is_void = True
            self.in_flight = None
        self.lease = None
        self.num_computed = 0
        self.hidden = None
        self.status = status
        self.match_version = -1
        self.common_with.clear()

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add drawn tokens."""
        assert self.lease is not None
        self._tokens.extend(token_ids)
        self.sampling.extend(token_ids)
        self.num_output += len(token_ids)


class Limits:
    """Limits of all sequences, in addition to their requests' parameters."""

    def __init__(self, eos_token_ids: tuple[int, ...], max_tokens: int) -> None:
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_tokens = max_tokens
        """Prompt plus output: what model and cache can hold."""

    def ending(self, request: GenerationRequest) -> EndingRule:
        """Return the rule by which tokens end the sequences of a request."""
        room = self.max_tokens - len(request.prompt_token_ids)
        ending = EndingRule.of(request.params, self.eos_token_ids, room)
        has_answer = request.pooling is None and not request.is_preparation
        return ending if has_answer else replace(ending, max_tokens=0)


@dataclass(frozen=True, slots=True)
class SequenceNews:
    """The changes that a step made to one sequence."""

    state: RequestState
    index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob | None, ...] = ()
    finish_reason: FinishReason | None = None
    error: StemmaError | None = None
    draft: tuple[str, DraftCount] | None = None
    """Source of the draft that was verified, and its tokens."""


@dataclass(slots=True)
class Scheduled:
    """Tokens ``[start, start + num_tokens)`` of a sequence in one step, and a draft behind its last token."""

    sequence: SequenceState
    start: int
    num_tokens: int
    """Rows of the batch: known tokens, then draft tokens."""
    num_logits: int
    """Number of trailing rows that tokens are drawn from: 0 for a chunk with more to come, else 1 + draft."""
    draft: tuple[int, ...] = ()
    scored: range = range(0)
    """Positions whose logits say how likely the prompt's next token was."""
    first_row: int = -1
    """First row of the batch, as `StepRows` laid it out."""
    first_logit: int = -1
    """First row of the step's logits: those of `scored`, then those that tokens are drawn from."""
    source_row: int | None = None
    """The token isn't known yet: the step in flight draws it from this row of logits."""
    is_void: bool = False
    """The sequence ended or was preempted while this ran: the result is dropped."""

    @property
    def end(self) -> int:
        """Tokens that have their KV afterwards, if any draft is accepted whole."""
        return self.start + self.num_tokens

    @property
    def rows(self) -> range:
        """Its rows of the batch."""
        return range(self.first_row, self.first_row + self.num_tokens)

    @property
    def scored_logits(self) -> range:
        """Rows of the step's logits that belong to `scored`."""
        return range(self.first_logit, self.first_logit + len(self.scored))

    @property
    def drawn_logits(self) -> range:
        """Rows of the step's logits that tokens are drawn from."""
        first = self.first_logit + len(self.scored)
        return range(first, first + self.num_logits)

    def row_of(self, position: int) -> int:
        """Return the row of the batch that computes a position of the sequence."""
        return self.first_row + position - self.start

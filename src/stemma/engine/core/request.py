"""A request inside the engine, its sequences (one for each of the `n` answers), and their work in a step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from stemma.engine.api import CacheReport, GenerationRequest
from stemma.engine.sampling.ending import Ending
from stemma.engine.sampling.logprobs import TokenLogprob
from stemma.engine.sampling.sampler import SamplingState
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
    """Holds blocks; some are on their way up from a lower tier."""
    RUNNING = auto()
    FINISHED = auto()


class RequestState:
    """A request from arrival to its last output. Changed by the step loop, but for `is_answered`."""

    __slots__ = (
        "arrival",
        "cache",
        "ending",
        "is_answered",
        "num_unfinished",
        "order",
        "queue_wait_s",
        "request",
        "sequences",
    )

    def __init__(self, request: GenerationRequest, ending: Ending, arrival: float, order: int) -> None:
        self.request = request
        self.ending = ending
        self.arrival = arrival
        """The injected clock, seconds."""
        self.order = order
        """Arrival number: the age that decides who yields."""
        self.sequences: list[SequenceState] = []
        self.num_unfinished = request.params.n
        self.cache: CacheReport | None = None
        """Set when the request starts, and never again: recomputing after a preemption is no hit."""
        self.queue_wait_s = 0.0
        self.is_answered = False
        """The client has the last output. Set by the output side alone; later tokens are dropped."""


class SequenceState:
    """One answer in the making: tokens so far, how many of them have KV, and the lease on their blocks.

    A step computes tokens ``[num_computed, num_computed + k)``. Prefill, decode and resumption after a
    preemption differ only in how many are missing.

    While a step with `in_flight` is under way, tokens up to `num_launched` have their KV once it is over, and
    the token it may draw follows `tokens`. All else is as the last step that was collected left it.
    """

    __slots__ = (
        "_tokens",
        "common_with",
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
        """While it waits: a look at the lower tiers on its behalf."""
        self._tokens = TokenBuffer(state.request.prompt_token_ids)
        self.num_computed = 0
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
        """When its request came, the injected clock, seconds."""
        return self.state.arrival

    @property
    def tokens(self) -> TokenArray:
        """Prompt and output so far; a view."""
        return self._tokens.view

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self._tokens)

    @property
    def num_missing(self) -> int:
        """Tokens whose KV must be computed before the next one can be drawn."""
        return self.num_tokens - self.num_computed

    @property
    def num_launched(self) -> int:
        """Tokens that have their KV once the step under way is over."""
        return self.num_computed if self.in_flight is None else self.in_flight.end

    @property
    def num_unlaunched(self) -> int:
        """As `num_missing`, once the step under way is over: the token it draws included."""
        if self.in_flight is None:
            return self.num_missing
        return self.num_tokens + self.in_flight.num_logits - self.in_flight.end

    def start(self, lease: Lease) -> None:
        """Take a lease; what it brings from cache is computed already."""
        self.lease = lease
        self._tokens = lease.buffer
        self.num_computed = lease.num_cached_tokens

    def stop(self, status: Status) -> None:
        """Let go of the lease, which the caller has freed; keep the tokens. What is in flight is void."""
        assert self.lease is not None
        if self.in_flight is not None:
            self.in_flight.is_void = True
            self.in_flight = None
        self.lease = None
        self.num_computed = 0
        self.status = status
        self.match_version = -1
        self.common_with.clear()

    def append(self, token_id: int) -> None:
        """Add a drawn token."""
        assert self.lease is not None
        self._tokens.append(token_id)
        self.sampling.append(token_id)
        self.num_output += 1


class Limits:
    """What ends sequences beside their requests' own parameters."""

    def __init__(self, eos_token_ids: tuple[int, ...], max_tokens: int) -> None:
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_tokens = max_tokens
        """Prompt plus output: what model and cache can hold."""

    def ending(self, request: GenerationRequest) -> Ending:
        """Return when the sequences of a request are over by their tokens."""
        room = self.max_tokens - len(request.prompt_token_ids)
        return Ending.of(request.params, self.eos_token_ids, room)


@dataclass(frozen=True, slots=True)
class SequenceNews:
    """What a step did to one sequence."""

    state: RequestState
    index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob | None, ...] = ()
    finish_reason: FinishReason | None = None
    error: StemmaError | None = None


@dataclass(slots=True)
class Scheduled:
    """Tokens ``[start, start + num_tokens)`` of a sequence in one step, and a draft behind its last token."""

    sequence: SequenceState
    start: int
    num_tokens: int
    """Rows of the batch: known tokens, then draft tokens."""
    num_logits: int
    """Of the last so many rows logits are wanted: 0 for a chunk with more to come, else 1 + the draft."""
    draft: tuple[int, ...] = ()
    row: int = 0
    """Of a step that runs ahead: where its logits are among those of the step."""
    source_row: int | None = None
    """The token isn't known yet: it is what the step under way draws from this row of logits."""
    is_void: bool = False
    """The sequence ended or yielded while this was under way: the result is dropped."""

    @property
    def end(self) -> int:
        """Tokens that have their KV afterwards, if any draft is accepted whole."""
        return self.start + self.num_tokens

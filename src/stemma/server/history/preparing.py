"""The next turns of conversations, prepared while the server has nothing else to do.

After an answer its conversation is rendered as the next turn would be, with two different messages in the
place of the one that isn't known. Their common beginning is what the next prompt will begin with, so what of
it isn't cached is computed. Where a template leaves out the thinking of earlier answers that is the whole of
an answer.

Nothing begins while a request is open or others keep coming (`Idleness`), and what runs ends as soon as one
comes.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from stemma.config.settings import Settings
from stemma.engine.api import CacheReport, GenerationRequest, Prepared
from stemma.engine.client import EngineClient
from stemma.engine.sampling.params import SamplingParams
from stemma.errors import StemmaError
from stemma.prefix.keys import Namespace
from stemma.server.history.next_turn import NextTurn
from stemma.server.lifecycle import Lifecycle
from stemma.server.observe.collected import Collected, CollectedSequence, TurnObserver
from stemma.types import FinishReason, TokenArray

logger = logging.getLogger(__name__)
_MAX_WAITING = 16
"""Answers whose next turn waits for idle time; the newest are prepared first."""
_MAX_REMEMBERED = 256
"""Prepared prompts that no request has found yet."""
_MINUTE_S = 60.0
REST_S = 0.1
"""Idle time before anything is prepared: a client that goes on at once finds the server free."""
BUSY_REQUESTS = 4
BUSY_S = 1.0
"""A server to which so many requests of other conversations came within this time is busy, though none may
be open right now."""
VAIN_LOOKS = 16
"""After so many answers in a row that left nothing to compute, the template seems to leave nothing out."""
LOOKS_EVERY = 8
"""Then one of so many answers is looked at, since traffic changes."""
_OPENING_TOKENS = 8
"""Last tokens of a prompt, which may open its answer: another turn needn't have them."""


class Idleness:
    """Says how long a server must have rested. Gaps between the requests of a busy one are no idle time.

    A conversation that goes on from the newest answer says nothing: a lone agent with quick tools is the one
    whom preparing helps most, and what is computed for it when it comes is its own.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._others: deque[float] = deque(maxlen=BUSY_REQUESTS)
        """When the latest requests came that went on from another answer than the newest, or from none."""

    def came(self, *, goes_on: bool) -> None:
        """Note a request. `goes_on`: it is the turn after the newest answer."""
        if not goes_on:
            self._others.append(self._clock())

    @property
    def rest_s(self) -> float:
        """Seconds without any request after which idle time begins, from now."""
        if len(self._others) < BUSY_REQUESTS:
            return REST_S
        return max(REST_S, self._others[0] + BUSY_S - self._clock())


class Worth:
    """Which answers are looked at: to render a turn twice takes time even if nothing is left to compute."""

    def __init__(self) -> None:
        self._num_vain = 0
        self._num_skipped = 0

    def looks(self) -> bool:
        """Return whether to look at the next answer."""
        if self._num_vain < VAIN_LOOKS:
            return True
        self._num_skipped = (self._num_skipped + 1) % LOOKS_EVERY
        return not self._num_skipped

    def told(self, num_computed: int) -> None:
        """Note what was left to compute after an answer."""
        self._num_vain = 0 if num_computed else self._num_vain + 1


class OpenTurn(TurnObserver):
    """A request that is being answered, and its answer once it is whole."""

    def __init__(
        self, request: GenerationRequest, next_turn: NextTurn | None, close: Callable[[OpenTurn], None]
    ) -> None:
        """`next_turn`: None, nothing after it is prepared. `close` learns that it is over."""
        self.request, self.next_turn = request, next_turn
        self.answer: CollectedSequence | None = None
        """None: it didn't end by itself, or at its limit."""
        self._close = close

    def ended(self, so_far: Collected, outcome: str) -> None:
        """Keep an answer that is whole."""
        if so_far.sequences and so_far.sequences[0].finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            [self.answer] = so_far.sequences[:1]
        self._close(self)

    def goes_on_in(self, tokens: TokenArray) -> bool:
        """Whether a prompt is a later turn of this conversation."""
        head = self.request.prompt_token_ids[:-_OPENING_TOKENS]
        return len(tokens) > len(head) and np.array_equal(tokens[: len(head)], head)


@dataclass(frozen=True, slots=True)
class _Remembered:
    namespace: Namespace
    begin: int
    end: int
    digest: bytes
    """Of all tokens up to `end`."""


class _Allowance:
    """How many tokens may be prepared now: so many a minute, never more at once. Refills steadily."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self._per_minute, self._clock = per_minute, clock
        self._left, self._at = float(per_minute), clock()

    def left(self) -> int:
        """Return the number."""
        now = self._clock()
        self._left = min(
            float(self._per_minute), self._left + (now - self._at) * self._per_minute / _MINUTE_S
        )
        self._at = now
        return int(self._left)

    def take(self, num_tokens: int) -> None:
        """Count tokens that were computed."""
        self._left -= num_tokens


class TurnPreparer(Collector):
    """One server's; on the event loop."""

    def __init__(
        self,
        engine: EngineClient,
        settings: Settings,
        lifecycle: Lifecycle,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._is_on = settings.server.prepare_turns == "on" and settings.engine.cache.enable_prefix_cache
        self._max_tokens = settings.server.prepare_max_tokens
        self._lifecycle = lifecycle
        self._allowance = _Allowance(settings.server.prepare_tokens_per_minute, clock)
        self._idleness, self._worth = Idleness(clock), Worth()
        self._num_open = 0
        self._newest: OpenTurn | None = None
        """The one that was closed last."""
        self._waiting: deque[OpenTurn] = deque(maxlen=_MAX_WAITING)
        self._remembered: deque[_Remembered] = deque(maxlen=_MAX_REMEMBERED)
        self._task: asyncio.Task[None] | None = None
        self._is_computing = False
        self._outcomes: Counter[str] = Counter()
        self._num_tokens = 0
        self._num_used_tokens = 0

    def open(self, request: GenerationRequest, next_turn: NextTurn | None) -> OpenTurn:
        """Keep idle work away until it has ended; what runs ends."""
        self._num_open += 1
        newest = self._newest
        self._idleness.came(goes_on=newest is not None and newest.goes_on_in(request.prompt_token_ids))
        if not self._is_computing:  # else the engine ends it, and tells how far it came
            self._stop()
        for one in [one for one in self._waiting if one.goes_on_in(request.prompt_token_ids)]:
            self._waiting.remove(one)
        is_single = request.params.n == 1 and request.beam is None
        return OpenTurn(request, next_turn if self._is_on and is_single else None, self._closed)

    def _closed(self, turn: OpenTurn) -> None:
        """Note that a request ended; if its answer is whole, the turn after it waits for idle time."""
        if turn.answer is not None and turn.next_turn is not None:
            self._waiting.append(turn)
        self._newest = turn
        self._num_open -= 1
        self._begin()

    def num_used(self, request: GenerationRequest, cache: CacheReport) -> int:
        """Return how many cached tokens of a request were prepared for it; each is told once."""
        num_cached, tokens = cache.num_cached_tokens, request.prompt_token_ids
        likely = [
            one
            for one in self._remembered
            if one.namespace == request.namespace and one.begin < num_cached and one.end <= len(tokens)
        ]
        digests = _digests(tokens, sorted({one.end for one in likely}))
        found = [one for one in likely if one.digest == digests[one.end]]
        if not found:
            return 0
        for one in found:
            self._remembered.remove(one)
        number = min(num_cached, max(one.end for one in found)) - min(one.begin for one in found)
        self._num_used_tokens += number
        return number

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of this moment."""
        turns = CounterMetricFamily(
            "stemma_prepared_turns", "Answers whose next turn idle time looked at", labels=["outcome"]
        )
        for outcome in ("whole", "cut", "cached", "skipped", "refused"):
            turns.add_metric([outcome], self._outcomes[outcome])
        yield turns
        for name, text, value in (
            ("stemma_prepared_tokens", "Tokens computed in idle time", self._num_tokens),
            ("stemma_prepared_tokens_used", "Of these, tokens that a request found", self._num_used_tokens),
        ):
            yield CounterMetricFamily(name, text, value=value)

    def end(self) -> None:
        """Drop what waits and end what runs."""
        self._is_on = False
        self._waiting.clear()
        self._stop()

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def _begin(self) -> None:
        if self._waiting and not self._num_open and self._task is None and not self._lifecycle.draining:
            self._task = asyncio.get_running_loop().create_task(self._work())

    async def _work(self) -> None:
        """Prepare the waiting turns, the newest first, until none is left or the task is cancelled."""
        await asyncio.sleep(self._idleness.rest_s)
        while self._waiting and not (self._num_open or self._lifecycle.draining):
            turn = self._waiting.pop()
            if not self._worth.looks():
                self._outcomes["skipped"] += 1
                continue
            assert turn.next_turn is not None
            work = self._prepare(turn, turn.next_turn)
            await asyncio.get_running_loop().create_task(work, context=turn.next_turn.context)
        self._task = None

    async def _prepare(self, turn: OpenTurn, next_turn: NextTurn) -> None:
        try:
            prepared = await self._prepared(turn, next_turn)
        except asyncio.CancelledError:
            self._outcomes["cut"] += 1
            raise
        except StemmaError as error:
            logger.debug("a next turn can't be prepared: %s", error)
            self._outcomes["refused"] += 1
        except Exception:
            logger.exception("preparing a turn failed")
            self._outcomes["refused"] += 1
        else:
            self._note(prepared)

    def _note(self, prepared: Prepared) -> None:
        self._num_tokens += prepared.num_computed_tokens
        self._allowance.take(prepared.num_computed_tokens)
        outcome = "cut" if prepared.was_cut else "whole" if prepared.num_computed_tokens else "cached"
        self._outcomes[outcome] += 1
        if not prepared.was_cut:
            self._worth.told(prepared.num_computed_tokens)

    async def _prepared(self, turn: OpenTurn, next_turn: NextTurn) -> Prepared:
        room = min(self._max_tokens, self._allowance.left())
        if room <= 0:
            return Prepared(was_cut=True)
        assert turn.answer is not None
        one, other = await next_turn.prompts(turn.answer.text, turn.answer.token_ids)
        tokens = one.token_ids[: _num_common(one.token_ids, other.token_ids)]
        request = turn.request
        wanted = GenerationRequest(
            request_id=f"{request.request_id}-next",
            prompt_token_ids=tokens,
            params=SamplingParams(max_tokens=1),
            namespace=request.namespace,
            retention=request.retention,
            adapter=request.adapter,
            images=one.images,
        )
        self._is_computing = True
        try:
            prepared = await self._engine.prepare(wanted, room)
        finally:
            self._is_computing = False
        if prepared.num_computed_tokens > 0:
            begin, end = prepared.num_cached_tokens, prepared.num_tokens
            digest = _digests(tokens, [end])[end]
            self._remembered.append(_Remembered(request.namespace, begin, end, digest))
        return prepared


def _num_common(one: TokenArray, other: TokenArray) -> int:
    """Return how many leading tokens are equal."""
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


def _digests(tokens: TokenArray, ends: Sequence[int]) -> dict[int, bytes]:
    """Return a digest of the tokens before each of `ends`, which ascend: one pass, however many."""
    digest, at = hashlib.blake2b(digest_size=16), 0
    found: dict[int, bytes] = {}
    for end in ends:
        digest.update(tokens[at:end].tobytes())
        found[end], at = digest.digest(), end
    return found

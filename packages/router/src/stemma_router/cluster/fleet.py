"""Servers behind one router: which of them gets a request, given what each holds, does, and how it fares.

Nothing here knows HTTP. A front (a proxy, Envoy's endpoint picker) asks for the tries of a request
(`tries.py`), sends it, and tells how each try ended.

Failures count against a server (`health.py`), and so do answers that come far later than those of others
(`pace.py`); waiting in a queue doesn't. A failure that a second server repeats is the request's own, and
taken back.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal

import xxhash

from stemma.server.observe.lately import Lately
from stemma.told import NOTHING, Told
from stemma_router.cluster.answer_limit import answer_limit_s
from stemma_router.cluster.cost import seats_of
from stemma_router.cluster.health import Cause, Check, HealthPolicy, ServerHealth
from stemma_router.cluster.holdings import Holdings
from stemma_router.cluster.member import AGAINST, ASKED, FleetEvent, FleetMember, Outcome, reserve_of
from stemma_router.cluster.pace import Measure, Pace, prefill_units, whole_units
from stemma_router.cluster.prefill_speed import PrefillSpeed
from stemma_router.cluster.retry_budget import RetryBudget
from stemma_router.cluster.routers import Placement, Placements, ReplicaLoad, ReplicaRouter, RoutedRequest

_CROWD = 4
"""A server that tells no seats is taken to have as many as twice the requests of the others' median, and so
many more."""
MAX_EVENTS = 200


class Fleet:
    """The servers, and the requests under way. For one event loop."""

    def __init__(
        self,
        router: ReplicaRouter,
        urls: Iterable[str] = (),
        *,
        holdings: Holdings | None = None,
        policy: HealthPolicy | None = None,
        has_events: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`has_events`: see `Placements`."""
        self.placements = Placements(router, 0, holdings, has_events=has_events)
        self.num_lost_retries = 0
        """Requests that weren't sent again since no server had budget left."""
        self.lately = Lately()
        self.events: deque[FleetEvent] = deque(maxlen=MAX_EVENTS)
        """What became of servers, the oldest first."""
        self._policy = policy or HealthPolicy()
        self._clock = clock
        self._members: dict[str, FleetMember] = {}
        self._free_places: list[int] = []
        self.set_servers(urls)

    @property
    def members(self) -> tuple[FleetMember, ...]:
        """All servers, those included that leave."""
        return tuple(self._members.values())

    @property
    def urls(self) -> tuple[str, ...]:
        """All servers, those first that can be asked now."""
        now = self._clock()
        return tuple(one.url for one in sorted(self.members, key=lambda one: reserve_of(one, now)))

    @property
    def is_up(self) -> bool:
        """Whether any server can be asked now."""
        return any(one.health.standing in ASKED for one in self.members)

    def least_busy(self) -> str | None:
        """Return the server with the fewest requests of those that can be asked now; None: there is none."""
        order = {url: place for place, url in enumerate(self.urls)}
        asked = [one for one in self.members if one.health.standing in ASKED] or self.members
        best = min(asked, key=lambda one: (self.load(one).num_requests, order[one.url]), default=None)
        return None if best is None else best.url

    def member(self, url: str) -> FleetMember | None:
        """Return the server with this URL; None: there is none."""
        return self._members.get(url)

    def load(self, member: FleetMember) -> ReplicaLoad:
        """Return the work that was sent to a server and isn't done."""
        return self.placements.loads[member.place]

    def age_s(self, member: FleetMember) -> float | None:
        """Return how old is what a server told last; None: it never answered a check."""
        return None if member.heard_at is None else self._clock() - member.heard_at

    def set_servers(self, urls: Iterable[str]) -> None:
        """Make these the servers. New ones are taken up; missing ones get no more requests and then leave."""
        wanted = dict.fromkeys(urls)
        for url in wanted:
            if url not in self._members:
                self._members[url] = self._new_member(url)
            self._members[url].is_leaving = self._members[url].health.is_draining = False
        for member in self.members:
            if member.url not in wanted:
                if not member.is_leaving:
                    self._note(member.url, "leaving", "it isn't in the list any more")
                self.drain(member.url)
                member.is_leaving = True
                self._leave_if_done(member)

    def drain(self, url: str) -> None:
        """Send a server no more requests; what it has it ends. An unknown one is ignored."""
        if url in self._members:
            self._members[url].health.is_draining = True

    def note_check(self, url: str, found: Check, told: Told = NOTHING) -> None:
        """Note a check. The requests of a server that fell silent are told so (`Try.on_lost`).

        `told`: what the server tells with it; one that tells nothing keeps what it told before.
        """
        member = self._members.get(url)
        if member is None:
            return
        if found is not Check.SILENT:
            member.heard_at = self._clock()
        member.told = member.told.model_copy(update={n: v for n, v in told if v is not None})
        if told.load is not None:
            self.load(member).note_told(told.load)
        if member.health.check(found):
            for one in tuple(member.under_way):
                one.on_lost()

    def order(self, ask: RoutedRequest, without: Iterable[str] = ()) -> list[FleetMember]:
        """Return the servers for a request, best first.

        Those that can't be asked now come last, in case that nobody else is left; those that drain, at the
        very end.
        """
        dropped = set(without)
        members = [one for one in self.members if one.url not in dropped and not one.is_leaving]
        if not members:
            return []
        now = self._clock()
        by_place = {one.place: one for one in members}
        ordered = [by_place[place] for place in self.placements.order(ask, list(by_place))]
        return sorted(ordered, key=lambda one: reserve_of(one, now))  # keeps the router's order of equals

    # -- what tries tell ------------------------------------------------------------------------------------

    def begin(
        self,
        member: FleetMember,
        ask: RoutedRequest,
        *,
        is_retry: bool,
        is_streamed: bool,
        is_optional: bool = False,
    ) -> Try:
        """Note that a request goes to a server."""
        if is_retry:
            member.num_retries += 1
        else:
            member.budget.note_request()
        crowding = self._crowding(member)
        placement = self.placements.begin(ask, member.place)
        num_tokens = self.load(member).num_tokens
        one = Try(self, member, placement, num_tokens, self._clock(), member.health.begin(), is_streamed)
        one.crowding = crowding
        one.num_prompt, one.num_predicted = ask.num_tokens, ask.num_tokens - placement.num_missing
        if is_optional:
            one.is_optional = True
            one.limit_s = member.speed.optional_limit_s(num_tokens)
        elif not is_streamed:
            one.limit_s = answer_limit_s(
                member.speed.limit_s(num_tokens),
                ask.max_output,
                member.told.decode_s_per_token,
                self.load(member).num_requests - 1,
            )
        member.under_way[one] = None
        return one

    def note_first_byte(self, one: Try) -> None:
        """Count a first byte: it closes a probe, and measures the server's prefill."""
        member = one.member
        if one.placement.has_first_token:
            return
        self.placements.note_first_token(one.placement)
        seconds = self._clock() - one.begun_at
        is_slow = False
        if one.is_streamed:
            member.first_bytes.observe(seconds)
            member.latest_first_byte.observe(seconds)
            self.lately.time("first_byte", seconds)
            member.speed.observe(one.num_tokens, seconds)
            if one.crowding <= 1.0:
                is_slow = self._measure(one, "prefill", prefill_units(one.num_tokens), seconds)
                self.load(member).prefill_s = member.pace.prefill.mean_s
        if one.is_probe and not is_slow:
            one.is_probe = False
            member.health.succeed(is_probe=True)

    def note_whole(self, one: Try, num_output: int) -> None:
        """Measure a whole answer that has so many tokens, before the end of its try.

        Behind a queue it takes as many times longer as there are requests for each seat.
        """
        if not one.is_streamed:
            units, seconds = whole_units(one.num_missing, num_output), self._clock() - one.begun_at
            self.lately.time("whole", seconds)
            self._measure(one, "whole", units, seconds / max(1.0, one.crowding))

    def note_delivered(self, one: Try, num_tokens: int) -> None:
        """Count prompt tokens that a server says it had cached."""
        one.member.num_delivered_tokens += num_tokens
        self.lately.count("delivered", amount=num_tokens)

    def end(self, one: Try, outcome: Outcome, retry_after_s: float) -> int:
        """Count the outcome of a try; return the number of its failure, for `pardon`, or 0."""
        member, failure = one.member, 0
        del member.under_way[one]
        member.outcomes[outcome] += 1
        self.lately.count("tries", outcome.value)
        self.placements.end(one.placement)
        if outcome is Outcome.LATE and one.is_optional:
            # Else one that became slower would always be given up, and never be measured again.
            member.speed.note_late()
        if outcome in AGAINST:
            failure = member.health.fail(outcome.value, is_probe=one.is_probe)
        elif outcome is Outcome.ANSWERED:
            member.num_prompt_tokens += one.num_prompt
            member.num_predicted_tokens += one.num_predicted
            self.lately.count("prompt", amount=one.num_prompt)
            self.lately.count("predicted", amount=one.num_predicted)
            member.health.succeed(is_probe=one.is_probe)
        elif one.is_probe:
            member.health.withdraw()
        if outcome in (Outcome.BUSY, Outcome.UNSENT):
            member.busy_until = self._clock() + retry_after_s
        self._leave_if_done(member)
        return failure

    def _measure(self, one: Try, kind: Literal["prefill", "whole"], units: float, seconds: float) -> bool:
        """Note what a try's work took; eject its server if that is slow, and return whether it is.

        A probe is judged alone: a server that is still slow is ejected for longer.
        """
        member = one.member
        measure: Measure = getattr(member.pace, kind)
        each_s = measure.observe(units, seconds)
        others = [getattr(other.pace, kind).mean_s for other in self.members if other is not member]
        if not measure.is_slow(each_s if one.is_probe else measure.mean_s, others):
            return False
        cause, one.is_probe = Cause.PROBE if one.is_probe else Cause.SLOW, False
        member.speed, member.pace = PrefillSpeed(), Pace()
        member.health.eject(cause, "several times as slow as the others")
        return True

    def _crowding(self, member: FleetMember) -> float:
        """Return how many requests a server has for each seat, a further one included."""
        load = self.load(member)
        if load.told is not None:
            return (load.num_there + 1) / seats_of(load.told)
        others = [self.load(one).num_requests for one in self.members if one is not member]
        return (load.num_requests + 1) / (2 * statistics.median(others or [0]) + _CROWD)

    def _new_member(self, url: str) -> FleetMember:
        # By its name, so that several routers, whatever the order of their lists, agree on homes.
        number = xxhash.xxh3_64_intdigest(url.encode())
        if self._free_places:
            place = self._free_places.pop()
            self.placements.loads[place] = ReplicaLoad(number=number)
        else:
            place = self.placements.add_replica(number)
        self._note(url, "joined", "it is in the list")
        health = ServerHealth(self._policy, self._clock, partial(self._note, url))
        return FleetMember(url, place, health, RetryBudget(self._clock))

    def _note(self, url: str, what: str, why: str) -> None:
        self.events.append(FleetEvent(time.time(), url, what, why))

    def _leave_if_done(self, member: FleetMember) -> None:
        if member.is_leaving and not member.under_way and member.url in self._members:
            del self._members[member.url]
            self.placements.holdings.clear(member.place)
            self._free_places.append(member.place)


class Try:
    """A request that was sent to one server. `end` it once."""

    def __init__(
        self,
        fleet: Fleet,
        member: FleetMember,
        placement: Placement,
        num_tokens: int,
        begun_at: float,
        is_probe: bool,
        is_streamed: bool,
    ) -> None:
        self.member = member
        self.placement = placement
        self.num_missing = placement.num_missing
        self.num_tokens = num_tokens
        """Prompt tokens that the server has to compute until its first byte, as far as this router knows."""
        self.begun_at = begun_at
        self.is_probe = is_probe
        self.is_streamed = is_streamed
        self.on_lost: Callable[[], None] = lambda: None
        """Called if checks find that the server fell silent: end the try, as LOST before its first byte."""
        self.limit_s = member.speed.limit_s(num_tokens) if is_streamed else None
        """How long to wait for the first byte, or for a whole answer; None: as long as checks find the server
        alive, since nobody knows how long it takes."""
        self.is_optional = False
        self.crowding = 0.0
        """Requests that the server had for each seat; above 1, others had to end first."""
        self.num_prompt = 0
        self.num_predicted = 0
        """Prompt tokens that the server is expected to have cached."""
        self.outcome: Outcome | None = None
        self.failure = 0
        self._fleet = fleet

    @property
    def url(self) -> str:
        """The server's address, as the client of HTTP has it."""
        return self.member.url

    def first_byte(self) -> None:
        """The answer begins: the request isn't sent again. A second call does nothing."""
        self._fleet.note_first_byte(self)

    def delivered(self, num_tokens: int) -> None:
        """The server says that it had so many of the prompt's tokens cached."""
        self._fleet.note_delivered(self, num_tokens)

    def whole(self, num_output: int) -> None:
        """A whole answer of so many tokens is here; `end` follows."""
        self._fleet.note_whole(self, num_output)

    def end(self, outcome: Outcome, retry_after_s: float = 1.0) -> None:
        """The try is over. `retry_after_s`: of a server that didn't begin, how long it is asked last."""
        if self.outcome is None:
            self.outcome = outcome
            self.failure = self._fleet.end(self, outcome, retry_after_s)

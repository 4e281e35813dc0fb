"""Where a request goes, given what servers hold and how they fare, and when it goes nowhere else any more."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

import hypothesis.strategies as st
import pytest
from hypothesis import given

from stemma.told import Told, ToldLoad
from stemma_router.cluster.fleet import Fleet, Try
from stemma_router.cluster.health import Check, Standing
from stemma_router.cluster.member import FleetMember, Outcome
from stemma_router.cluster.routers import CacheAware, LeastLoaded, Rendezvous, RoundRobin, RoutedRequest
from stemma_router.cluster.tries import Tries

URLS = [f"http://host-{name}:8000" for name in "abcd"]
ASK = RoutedRequest([1, 2, 3], 50, 16)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def fleet_of(num_servers: int, router=CacheAware, clock=None) -> Fleet:
    return Fleet(router(), URLS[:num_servers], clock=clock or Clock())


def begun(fleet: Fleet, ask: RoutedRequest = ASK, *, is_streamed: bool = True) -> Try:
    """Return the first try of a request."""
    return next_of(Tries(fleet, ask, is_streamed=is_streamed))


def next_of(tries: Tries) -> Try:
    one = tries.next()
    assert one is not None
    return one


def member(fleet: Fleet, url: str) -> FleetMember:
    found = fleet.member(url)
    assert found is not None
    return found


def fail(fleet: Fleet, url: str) -> None:
    """Let a server fail until it is ejected."""
    for number in range(200):
        tries = Tries(fleet, RoutedRequest([], 5, 16, head=number + 1), is_streamed=True)
        while (one := tries.next()) is not None:
            one.end(Outcome.FAILED if one.url == url else Outcome.ANSWERED)
        if member(fleet, url).health.standing is not Standing.HEALTHY:
            return
    raise AssertionError("it isn't ejected")


OUTCOMES = st.sampled_from([one for one in Outcome])


@given(st.integers(1, 4), st.lists(st.lists(OUTCOMES, min_size=6, max_size=6), max_size=30), st.randoms())
def test_a_request_is_sent_as_often_as_the_rules_say(num_servers, requests, rng) -> None:
    """Each server once; what was begun once more; what answered never. And no load stays."""
    clock = Clock()
    fleet = fleet_of(num_servers, clock=clock)
    for outcomes in requests:
        clock.now += rng.choice([0, 1, 20])
        tries, seen = Tries(fleet, ASK, is_streamed=rng.random() < 0.5), []
        for outcome in outcomes:
            one = tries.next()
            if one is None:
                break
            seen.append((one.url, outcome))
            if outcome in (Outcome.ANSWERED, Outcome.BROKEN):
                one.first_byte()
                one.first_byte()
            one.end(outcome)
            one.end(Outcome.FAILED)  # a second end does nothing
        urls = [url for url, _ in seen]
        assert seen, "somebody is always asked"
        assert len(set(urls)) == len(urls)
        kinds = [outcome for _, outcome in seen]
        sent = (Outcome.FAILED, Outcome.LATE, Outcome.LOST)
        assert sum(kind in sent for kind in kinds) <= 2
        assert all(kind not in (Outcome.ANSWERED, Outcome.BROKEN, Outcome.LEFT) for kind in kinds[:-1])
        if len(seen) < min(num_servers, len(outcomes)):  # it ended before all were asked
            refused = sum(kind is Outcome.REFUSED for kind in kinds)
            is_final = kinds[-1] in (Outcome.ANSWERED, Outcome.BROKEN, Outcome.LEFT)
            assert is_final or sum(kind in sent for kind in kinds) == 2 or refused == 3
    for each in fleet.members:
        load = fleet.load(each)
        assert (load.num_requests, load.num_tokens, load.num_running, len(each.under_way)) == (0, 0, 0, 0)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.UNSENT, Outcome.LATE, Outcome.LOST])
@pytest.mark.parametrize("router", [CacheAware, LeastLoaded, RoundRobin])
def test_a_sick_server_costs_no_request_and_few_tries(outcome: Outcome, router) -> None:
    """One of two, always the least busy, since it fails at once."""
    clock = Clock()
    fleet = fleet_of(2, router, clock)
    ended: Counter[Outcome] = Counter()
    last = Outcome.LEFT
    for number in range(1000):
        clock.now += 0.1
        tries = Tries(fleet, RoutedRequest([number], 50, 16), is_streamed=True)
        while (one := tries.next()) is not None:
            last = outcome if one.url == URLS[0] else Outcome.ANSWERED
            one.end(last)
        ended[last] += 1
    assert ended == {Outcome.ANSWERED: 1000}
    assert member(fleet, URLS[0]).outcomes.total() < 12, "three, and a probe now and then"


def test_a_request_that_breaks_its_server_is_sent_to_two_and_ejects_none() -> None:
    fleet = fleet_of(4)
    for number in range(50):
        tries, count = Tries(fleet, RoutedRequest([number], 50, 16), is_streamed=True), 0
        while (one := tries.next()) is not None:
            one.end(Outcome.FAILED)
            count += 1
        assert count == 2
    assert {one.health.standing for one in fleet.members} == {Standing.HEALTHY}


def test_servers_that_still_answer_are_not_flooded() -> None:
    """Three of four fail, and each request is retried: the last one takes its budget and no more."""
    clock = Clock()
    fleet = fleet_of(4, RoundRobin, clock)
    num_failed = 0
    for number in range(2000):
        tries = Tries(fleet, RoutedRequest([number], 50, 16), is_streamed=True)
        while (one := tries.next()) is not None:
            one.end(Outcome.ANSWERED if one.url == URLS[3] else Outcome.FAILED)
        num_failed += one is None
        for each in fleet.members[:3]:
            each.health.succeed(is_probe=True)  # as if they were back at once
    assert member(fleet, URLS[3]).num_retries < 100 + 0.2 * 2000 + 5
    assert fleet.num_lost_retries > 0


def test_busy_servers_are_asked_last_and_everybody_is_asked() -> None:
    clock = Clock()
    fleet = fleet_of(4, Rendezvous, clock)
    first = fleet.order(ASK)[0]
    tries = Tries(fleet, ASK, is_streamed=True)
    for _ in range(4):
        next_of(tries).end(Outcome.BUSY, retry_after_s=5.0)
    assert tries.next() is None
    assert {one.health.standing for one in fleet.members} == {Standing.HEALTHY}
    fleet.order(ASK)[1].busy_until = 0.0
    assert fleet.order(ASK)[0] is not first
    clock.now += 6
    assert fleet.order(ASK)[0] is first


def test_a_clients_own_errors_say_nothing_of_a_server() -> None:
    fleet = fleet_of(4)
    for _ in range(50):
        tries, count = Tries(fleet, ASK, is_streamed=True), 0
        while (one := tries.next()) is not None:
            one.end(Outcome.REFUSED)
            count += 1
        assert count == 3
    assert {one.health.standing for one in fleet.members} == {Standing.HEALTHY}


def test_the_requests_of_a_silent_server_are_told_so() -> None:
    fleet = fleet_of(2)
    tries = [begun(fleet, is_streamed=streams) for streams in (True, False, True)]
    url = tries[0].url
    lost: list[int] = []
    for number, one in enumerate(tries):
        one.on_lost = partial(lost.append, number)
    mine = [number for number, one in enumerate(tries) if one.url == url]
    tries[mine[-1]].first_byte()
    for _ in range(2):
        fleet.note_check(url, Check.SILENT)
        assert member(fleet, url).health.standing is Standing.DOWN
        assert fleet.order(ASK)[0].url != url
        assert lost == []
    fleet.note_check(url, Check.SILENT)
    assert lost == mine
    fleet.note_check(url, Check.SERVES)
    assert member(fleet, url).health.standing is Standing.HEALTHY


def test_a_slow_server_is_ejected_though_it_answers() -> None:
    clock = Clock()
    fleet = fleet_of(3, RoundRobin, clock)
    for _ in range(60):
        one = begun(fleet, RoutedRequest([], 1000, 16, head=1))
        clock.now += 20 if one.url == URLS[0] else 1
        one.first_byte()
        one.end(Outcome.ANSWERED)
        if member(fleet, URLS[0]).health.num_ejections:
            break
    assert [one.health.num_ejections for one in fleet.members] == [1, 0, 0]


def test_a_queue_is_not_sickness() -> None:
    """One of three has a long queue, so that first bytes come late there; its pace is that of the others."""
    clock = Clock()
    fleet = fleet_of(3, clock=clock)
    for url in URLS[:3]:
        fleet.note_check(url, Check.SERVES, Told(load=ToldLoad(seats=4)))
    for _ in range(30):
        tries = [answered(fleet, clock, url, 1.0) for url in URLS[1:3]]
        assert all(tries)
        crowd = [begun_at(fleet, URLS[0]) for _ in range(20)]
        for number, one in enumerate(crowd):
            clock.now += 1 if number < 4 else 10
            one.first_byte()
        for one in crowd:
            one.end(Outcome.ANSWERED)
    assert {one.health.num_ejections for one in fleet.members} == {0}


def test_a_slow_server_is_ejected_though_its_answers_come_whole_and_comes_back_when_it_is_well() -> None:
    clock = Clock()
    fleet = fleet_of(3, clock=clock)
    slow = member(fleet, URLS[0])
    for _ in range(20):
        for url in URLS[:3]:
            answered(fleet, clock, url, 2.0 if url == URLS[0] else 0.2, num_output=10)
        if slow.health.num_ejections:
            break
    assert [one.health.num_ejections for one in fleet.members] == [1, 0, 0]
    for times in range(2, 4):  # a probe that is answered as slowly ejects it again, for longer
        clock.now += 200
        assert slow.health.standing is Standing.HALF_OPEN
        answered(fleet, clock, URLS[0], 2.0, num_output=10)
        assert (slow.health.standing, slow.health.num_ejections) == (Standing.EJECTED, times)
    clock.now += 200
    answered(fleet, clock, URLS[0], 0.2, num_output=10)
    assert slow.health.standing is Standing.HEALTHY


def begun_at(fleet: Fleet, url: str, *, is_streamed: bool = True) -> Try:
    ask = RoutedRequest([], 1000, 16, head=1)
    return fleet.begin(member(fleet, url), ask, is_retry=False, is_streamed=is_streamed)


def answered(fleet: Fleet, clock: Clock, url: str, seconds: float, num_output: int | None = None) -> Try:
    """Let a server answer a request; with `num_output` tokens at once, else as a stream."""
    one = begun_at(fleet, url, is_streamed=num_output is None)
    clock.now += seconds
    if num_output is None:
        one.first_byte()
    else:
        one.whole(num_output)
    one.end(Outcome.ANSWERED)
    return one


def test_how_long_to_wait_follows_the_queue_and_an_unstreamed_answer_has_no_limit() -> None:
    clock = Clock()
    fleet = fleet_of(1, clock=clock)
    for _ in range(30):
        one = begun(fleet, RoutedRequest([], 1000, 16, head=1))
        clock.now += 1
        one.first_byte()
        one.end(Outcome.ANSWERED)
    waiting = [begun(fleet, RoutedRequest([], 1000, 16, head=1)) for _ in range(20)]
    limits = [one.limit_s or 0.0 for one in waiting]
    assert limits[0] < 20 < limits[19]
    assert begun(fleet, is_streamed=False).limit_s is None


def test_who_is_late_is_waited_for_if_nobody_else_can_be_asked() -> None:
    alone, pair = Tries(fleet_of(1), ASK, is_streamed=True), fleet_of(2)
    alone.next()
    assert not alone.can_move()
    tries = Tries(pair, ASK, is_streamed=True)
    one = next_of(tries)
    assert tries.can_move()
    other = next(url for url in URLS[:2] if url != one.url)
    fail(pair, other)
    assert not tries.can_move()
    one.end(Outcome.ANSWERED)


def test_servers_come_drain_and_leave() -> None:
    fleet = fleet_of(3, Rendezvous)
    holdings = fleet.placements.holdings
    one = begun(fleet)
    gone = one.url
    holdings.store(one.member.place, [1, 2, 3])
    fleet.set_servers([url for url in URLS if url != gone])
    assert gone not in {each.url for each in fleet.order(ASK)}
    assert fleet.member(gone) is not None, "it ends what it has"
    one.end(Outcome.ANSWERED)
    assert fleet.member(gone) is None
    assert holdings.num_ids == 0
    fleet.set_servers(URLS)
    assert fleet.order(ASK)[0].url == gone, "its home is where it was"
    fleet.drain(gone)
    assert fleet.order(ASK)[-1].url == gone
    fleet.set_servers([])
    assert Tries(fleet, ASK, is_streamed=True).next() is None


def test_routers_side_by_side_agree_on_homes_whatever_their_lists_order() -> None:
    shuffled = random.Random(0).sample(URLS, 4)
    one, other = Fleet(CacheAware(), URLS), Fleet(CacheAware(), shuffled)
    for head in range(1, 100):
        ask = RoutedRequest([], 50, 16, head=head)
        assert [m.url for m in one.order(ask)] == [m.url for m in other.order(ask)]


def test_beginnings_are_spread_and_a_server_that_leaves_moves_only_its_share() -> None:
    whole, rest = fleet_of(4, Rendezvous), fleet_of(3, Rendezvous)
    asks = [RoutedRequest([], 5, 16, head=n * 7919 + 1) for n in range(400)]
    first = Counter(whole.order(ask)[0].url for ask in asks)
    assert all(60 < count < 140 for count in first.values())
    for ask in asks:
        before = [one.url for one in whole.order(ask)]
        assert [one.url for one in rest.order(ask)] == [url for url in before if url != URLS[3]]


def test_a_busy_home_is_passed_over_until_it_has_worked_off_its_lead() -> None:
    fleet = fleet_of(4, Rendezvous)
    favourite, second, *_ = fleet.order(ASK)
    tries = []
    for _ in range(4):
        assert fleet.order(ASK)[0] is favourite
        tries.append(begun(fleet))
    assert fleet.order(ASK)[0] is second
    assert fleet.order(ASK)[-1] is favourite
    tries[0].end(Outcome.ANSWERED)
    assert fleet.order(ASK)[0] is favourite


def test_an_optional_request_is_given_up_at_twice_its_time() -> None:
    """A server that became slower is measured again, though nobody waits for it."""
    clock = Clock()
    fleet = fleet_of(1, clock=clock)
    for seconds in [1.0] * 20:
        one = next_of(Tries(fleet, ASK, is_streamed=True, is_optional=True))
        clock.now += seconds
        one.first_byte()
        one.end(Outcome.ANSWERED)
    limits = []
    for _ in range(2):
        tries = Tries(fleet, ASK, is_streamed=True, is_optional=True)
        one = next_of(tries)
        assert one.limit_s is not None
        limits.append(one.limit_s)
        clock.now += one.limit_s
        assert tries.can_move()
        one.end(Outcome.LATE)
        assert tries.next() is None, "the decode server computes already"
    assert 2.0 <= limits[0] < 2.2
    assert limits[1] > limits[0] + 0.2


def test_an_optional_request_goes_to_no_server_that_is_down() -> None:
    fleet = fleet_of(2)
    fleet.note_check(URLS[0], Check.SILENT)
    tries = Tries(fleet, ASK, is_streamed=True, is_optional=True)
    one = next_of(tries)
    assert one.url == URLS[1]
    one.end(Outcome.UNSENT)
    assert tries.next() is None


def test_a_whole_answer_is_late_after_what_it_can_take_at_the_most() -> None:
    """Never before, however many other requests the server has; and not if its length isn't known."""
    fleet = fleet_of(2)
    ask = RoutedRequest([1, 2, 3], 50, 16, max_output=1000)
    assert begun(fleet, ask, is_streamed=False).limit_s is None  # the server told nothing yet
    for url in URLS[:2]:
        fleet.note_check(url, Check.SERVES, Told(decode_s_per_token=0.05))
        fleet.note_check(url, Check.SERVES)  # it keeps what it told
    one = begun(fleet, ask, is_streamed=False)
    assert one.limit_s is not None
    first_byte_s = one.member.speed.limit_s(one.num_tokens)
    assert one.limit_s == pytest.approx(30.0 + first_byte_s + (4 + num_beside(fleet, one)) * 50.0)
    again = fleet.begin(one.member, ask, is_retry=False, is_streamed=False)
    assert again.limit_s is not None
    assert again.limit_s > one.limit_s + 50.0 - 1e-6
    assert begun(fleet, ASK, is_streamed=False).limit_s is None  # it may have any number of tokens
    assert (
        begun(fleet, RoutedRequest([], 5, 16, max_output=10**6), is_streamed=False).limit_s is None
    )  # hours
    pooled = fleet_of(1)
    assert begun(pooled, RoutedRequest([], 5, 16, max_output=0), is_streamed=False).limit_s is not None


def num_beside(fleet: Fleet, one: Try) -> int:
    return fleet.load(one.member).num_requests - 1

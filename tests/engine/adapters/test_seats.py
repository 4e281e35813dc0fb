"""How many adapters run at a time: never more than the limit, and nobody waits for ever."""

from __future__ import annotations

from dataclasses import dataclass

from stemma.engine.core.adapter_seats import AdapterSeats


@dataclass
class Waiting:
    adapter_key: str
    arrival: float = 0.0


def seats(running: str, waiting: list[Waiting], limit: int = 2) -> AdapterSeats:
    made = AdapterSeats(limit, [Waiting(key) for key in running], ageing_s=5.0)
    made.look_at(waiting)
    return made


def test_limit():
    a, c, base = Waiting("a"), Waiting("c"), Waiting("")
    some = seats("a", [a, c, base])
    assert [some.admits(one) for one in (a, c, base)] == [True, True, True]
    some.take(c)
    assert not some.admits(Waiting("d"))
    assert some.admits(Waiting("c"))
    full = seats("ab", [a, c, base])
    assert [full.admits(one) for one in (a, c, base)] == [True, False, True]


def test_a_stream_of_requests_for_running_adapters_starves_nobody():
    old = Waiting("c", arrival=10.0)
    soon, late, base = Waiting("a", 14.0), Waiting("a", 16.0), Waiting("", 100.0)
    some = seats("ab", [old, soon, late, base])
    assert [some.admits(one) for one in (soon, late, base, old)] == [True, False, True, False]
    free = seats("b", [old, late])
    assert free.admits(old)
    assert free.admits(late)

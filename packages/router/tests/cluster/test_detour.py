"""The way through a prefill server is compared with the decode server alone, end to end."""

from __future__ import annotations

from tests.memory.manual_clock import ManualClock

from stemma.two_ways import Way
from stemma_router.cluster.detour import Detour

TOKENS = 1000


class Traffic:
    """Requests one after the other: a prefill takes `prefill_s`, loading `load_s`, the decode server
    `alone_s`."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.detour = Detour(self.clock)

    def ask(self, prefill_s: float, load_s: float, alone_s: float, *, tokens: int = TOKENS) -> Way:
        way = self.detour.choose(tokens, prefill_s)
        taken = load_s if way is Way.THROUGH else alone_s
        self.detour.observe(way, tokens, taken)
        self.clock.now += taken + (prefill_s if way is Way.THROUGH else 0.0)
        return way


def test_a_detour_that_makes_prompts_slower_is_left_within_ten_and_tried_again_later() -> None:
    traffic = Traffic()
    first = [traffic.ask(0.5, 0.6, 0.5) for _ in range(10)]
    assert first[:4] == [Way.THROUGH] * 4
    later = [traffic.ask(0.5, 0.6, 0.5) for _ in range(150)]
    assert first[-1] is later[0] is Way.ALONE
    assert 1 <= later.count(Way.THROUGH) <= 4
    healed = [traffic.ask(0.1, 0.01, 0.5) for _ in range(200)]
    assert healed[-1] is Way.THROUGH


def test_a_detour_that_pays_is_kept() -> None:
    traffic = Traffic()
    ways = [traffic.ask(0.3, 0.05, 0.5) for _ in range(300)]
    assert ways.count(Way.ALONE) <= 5
    assert [traffic.ask(0.001, 5.0, 0.001) for _ in range(20)] == [Way.THROUGH] * 20, "it costs nothing"


def test_a_prefill_server_with_a_queue_is_passed_by_at_once() -> None:
    traffic = Traffic()
    for _ in range(10):
        traffic.ask(0.3, 0.05, 0.5)
    assert traffic.ask(3.0, 0.05, 0.5) is Way.ALONE
    assert traffic.ask(0.3, 0.05, 0.5) is Way.THROUGH


def test_no_long_prompt_is_used_to_try() -> None:
    traffic = Traffic()
    for number in range(1, 40):
        way = traffic.ask(0.3, 0.05, 0.5, tokens=100_000 if number % 5 == 0 else 100)
        assert way is Way.THROUGH or number % 5

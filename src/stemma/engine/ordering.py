"""In which order waiting sequences are admitted.

Longest cached prefix first visits the prefix tree depth first, which is the order with the most hits
(SGLang, arXiv 2312.07104, theorem 3.1), but alone it starves prompts that share nothing. So a sequence that
has waited for `ageing_s` goes before all that haven't, and among such the oldest goes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from stemma.config.settings import SchedulerSettings
from stemma.engine.request import Sequence

MAX_MATCHED = 128
"""Only the oldest so many are matched against the index: matching a long queue every step costs more than
its order is worth."""


def order_fcfs(waiting: Iterable[Sequence]) -> list[Sequence]:
    """Return the oldest first; preempted sequences go before all others."""
    return sorted(waiting, key=lambda s: (not s.was_preempted, s.age))


def order_longest_prefix(
    waiting: Iterable[Sequence], num_cached: Callable[[Sequence], int], now: float, ageing_s: float
) -> list[Sequence]:
    """Return preempted and aged sequences by age, then the others by cached prefix, longest first."""
    by_age = order_fcfs(waiting)

    def rank(sequence: Sequence) -> tuple[int, int, tuple[int, int]]:
        if sequence.was_preempted:
            return (0, 0, sequence.age)
        if now - sequence.state.arrival >= ageing_s:
            return (1, 0, sequence.age)
        return (2, -num_cached(sequence), sequence.age)

    return sorted(by_age[:MAX_MATCHED], key=rank) + by_age[MAX_MATCHED:]


def order_waiting(
    waiting: Iterable[Sequence],
    settings: SchedulerSettings,
    num_cached: Callable[[Sequence], int],
    now: float,
) -> list[Sequence]:
    """Return the order that the settings ask for."""
    if settings.order == "fcfs":
        return order_fcfs(waiting)
    return order_longest_prefix(waiting, num_cached, now, settings.ageing_s)

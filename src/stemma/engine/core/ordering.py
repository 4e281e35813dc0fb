"""In which order waiting sequences are admitted.

Longest cached prefix first visits the prefix tree depth first, which is the order with the most hits
(SGLang, arXiv 2312.07104, theorem 3.1), but alone it starves prompts that share nothing. So a sequence is
overtaken only by those that arrived less than `ageing_s` after it. That bounds every wait, and under
overload, where all have waited long, hits still count among neighbours in the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from stemma.config.settings import SchedulerSettings

MAX_MATCHED = 128
"""Only this many of the oldest are matched against the index: matching a long queue in every step costs more
than a better order saves."""


class Waiting(Protocol):
    """An item in the order: a sequence of the engine, or a request of a trace in the lab."""

    was_preempted: bool

    @property
    def age(self) -> tuple[int, int]:
        """Sorts the oldest first."""

    @property
    def arrival(self) -> float:
        """Seconds."""


W = TypeVar("W", bound=Waiting)


def order_fcfs(waiting: Iterable[W]) -> list[W]:
    """Return the oldest first; preempted sequences go before all others."""
    return sorted(waiting, key=lambda s: (not s.was_preempted, s.age))


def order_longest_prefix(waiting: Iterable[W], num_cached: Callable[[W], int], ageing_s: float) -> list[W]:
    """Return preempted sequences by age, then the others by cached prefix, longest first.

    Cohorts of `ageing_s`, counted from the arrival of the oldest, follow each other.
    """
    by_age = order_fcfs(waiting)
    oldest = min((s.arrival for s in by_age if not s.was_preempted), default=0.0)

    def rank(sequence: W) -> tuple[float, int, tuple[int, int]]:
        if sequence.was_preempted:
            return (-1.0, 0, sequence.age)
        cohort = (sequence.arrival - oldest) // ageing_s
        return (cohort, -num_cached(sequence), sequence.age)

    return sorted(by_age[:MAX_MATCHED], key=rank) + by_age[MAX_MATCHED:]


def order_waiting(
    waiting: Iterable[W],
    settings: SchedulerSettings,
    num_cached: Callable[[W], int],
) -> list[W]:
    """Return the order that the settings ask for."""
    waiting = list(waiting)
    if len(waiting) < 2:
        return waiting
    if settings.order == "fcfs":
        return order_fcfs(waiting)
    return order_longest_prefix(waiting, num_cached, settings.ageing_s)

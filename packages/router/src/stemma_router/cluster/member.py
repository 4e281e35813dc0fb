"""One server of a fleet: what is known of it, how requests to it end, and what became of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from stemma.smoothed import Smoothed
from stemma.told import NOTHING, Told
from stemma_router.cluster.health import ServerHealth, Standing
from stemma_router.cluster.pace import Pace
from stemma_router.cluster.prefill_speed import PrefillSpeed
from stemma_router.cluster.retry_budget import RetryBudget
from stemma_router.cluster.waits import Waits

if TYPE_CHECKING:
    from stemma_router.cluster.fleet import Try

ASKED = (Standing.HEALTHY, Standing.HALF_OPEN)
"""Servers of this standing get requests; the others only if there are none."""


class Outcome(StrEnum):
    """How a try ended."""

    ANSWERED = "answered"
    """With an answer that is the client's, errors of its own included."""
    UNSENT = "unsent"
    """The server couldn't be reached."""
    BUSY = "busy"
    """It drains or is overloaded (503): it didn't begin."""
    REFUSED = "refused"
    """It takes no more of this client's (429), or doesn't know its key (401, 403)."""
    ELSEWHERE = "elsewhere"
    """It hasn't what the request names; another one may."""
    FAILED = "failed"
    """An error of the server, or no answer at all: 500, a reset, garbage, an empty body."""
    LATE = "late"
    """No first byte in time."""
    LOST = "lost"
    """Checks found the server down meanwhile."""
    BROKEN = "broken"
    """It failed after its first byte."""
    LEFT = "left"
    """The client left."""


AGAINST = (Outcome.UNSENT, Outcome.FAILED, Outcome.LATE, Outcome.LOST, Outcome.BROKEN)
"""Outcomes that count against a server."""


@dataclass(frozen=True, slots=True)
class FleetEvent:
    """What became of a server."""

    at: float
    """Seconds since 1970."""
    url: str
    what: str
    """``ejected``, ``back``, ``down``, ``up``, ``joined`` or ``leaving``."""
    why: str


@dataclass(eq=False, slots=True)
class FleetMember:
    """One server of a fleet. Its fields are for reading; `Fleet` changes them."""

    url: str
    place: int
    """Number of its load and its holdings."""
    health: ServerHealth
    budget: RetryBudget
    speed: PrefillSpeed = field(default_factory=PrefillSpeed)
    pace: Pace = field(default_factory=Pace)
    """Of answers that didn't wait in a queue."""
    told: Told = NOTHING
    """What it told last with checks."""
    heard_at: float | None = None
    """When it last answered a check; None: never."""
    under_way: dict[Try, None] = field(default_factory=dict)
    first_bytes: Waits = field(default_factory=Waits)
    latest_first_byte: Smoothed = field(default_factory=Smoothed)
    num_prompt_tokens: int = 0
    """Of requests that it answered, as far as the router knows them."""
    num_predicted_tokens: int = 0
    """Of these, those that it was expected to have cached."""
    num_delivered_tokens: int = 0
    """Of these, those that it said it had cached."""
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    num_retries: int = 0
    """Requests that it got after another server."""
    busy_until: float = 0.0
    is_leaving: bool = False
    """It was taken from the fleet, and ends what it has."""


def reserve_of(member: FleetMember, now: float) -> int:
    """Return how late a server is asked: 0 for all that may be asked now."""
    standing = member.health.standing
    if standing in ASKED:
        return 1 if member.busy_until > now else 0
    return {Standing.EJECTED: 2, Standing.DOWN: 3, Standing.DRAINING: 4}[standing]

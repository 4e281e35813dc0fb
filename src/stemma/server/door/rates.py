"""How much a tenant may ask for: requests and tokens a minute, and requests at once.

Requests and tokens are token buckets that hold one minute's worth and fill evenly. Each sequence (`n`,
`best_of`, beams, several prompts) counts as a request. A request needs room for its prompt and for the
longest answers that it may get; when it ends, what they didn't use comes back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from stemma.errors import InvalidRequest, RateLimited
from stemma.server.door.keyfile import Tenant, TenantEntry

MINUTE_S = 60.0
BUSY_RETRY_S = 1.0
"""Seconds that a tenant with too many requests at once is told to wait: nobody knows when one ends."""


class Bucket:
    """`per_minute` units a minute, at most that many at once."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_s = per_minute / MINUTE_S
        self._size = float(per_minute)
        self._level = self._size
        self._then = now

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until `amount` can be taken; 0 if it can be now.

        More than the bucket holds needs a full bucket, and leaves a debt.
        """
        self._level = min(self._size, self._level + (now - self._then) * self._per_s)
        self._then = now
        missing = min(amount, self._size) - self._level
        return max(0.0, missing / self._per_s)

    @property
    def size(self) -> float:
        """The amount that it holds when it is full."""
        return self._size

    def take(self, amount: float) -> None:
        """Take `amount`, if need be into debt; less than 0 is given back."""
        self._level -= amount


@dataclass(slots=True)
class _Usage:
    requests: Bucket | None
    tokens: Bucket | None
    num_running: int = 0
    num_reserved: int = 0


def _charged(bucket: Bucket | None, num_prompt_tokens: int, num_reserved_tokens: int) -> int:
    """Return what is taken at first: no more than the bucket holds is reserved for answers."""
    if bucket is None:
        return num_prompt_tokens
    return num_prompt_tokens + min(num_reserved_tokens, int(bucket.size))


def _check(bucket: Bucket | None, amount: int, what: str, now: float) -> None:
    """Raise RateLimited unless `amount` can be taken."""
    if bucket is not None and amount and (wait_s := bucket.wait_s(amount, now)) > 0:
        raise RateLimited(f"your limit is {what} a minute", wait_s)


class RateLimits:
    """Admits requests of tenants. For one event loop: not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._usage: dict[str, tuple[TenantEntry, _Usage]] = {}

    def widen(self, tenant: Tenant, num_before: int, num_sequences: int, least_tokens: int = 0) -> None:
        """Count a request's sequences up to `num_sequences`, of which `num_before` are counted.

        A tenant that couldn't take `least_tokens` now is refused before anything is done for it. Raises
        RateLimited if the tenant must wait, and InvalidRequest if waiting would not help. Then nothing is
        counted.
        """
        entry, now = tenant.entry, self._clock()
        usage, more = self._of(tenant, now), num_sequences - num_before
        for most in (entry.max_concurrent, entry.requests_per_minute):
            if most is not None and num_sequences > most:
                raise InvalidRequest(
                    f"{num_sequences} sequences (prompts times n) at once; your limit is {most}", param="n"
                )
        if entry.max_concurrent is not None and usage.num_running + more > entry.max_concurrent:
            running = f"{usage.num_running - num_before} sequences of yours are running"
            raise RateLimited(f"{running}; your limit is {entry.max_concurrent}", BUSY_RETRY_S)
        _check(usage.requests, more, f"{entry.requests_per_minute} requests", now)
        _check(usage.tokens, least_tokens, f"{entry.tokens_per_minute} tokens", now)
        if usage.requests is not None:
            usage.requests.take(more)
        usage.num_running += more

    def charge(self, tenant: Tenant, num_prompt_tokens: int, num_reserved_tokens: int) -> None:
        """Count the tokens of a request that was counted, and those that its answers may need.

        Raises RateLimited; then none is counted.
        """
        now = self._clock()
        usage = self._of(tenant, now)
        if usage.tokens is None:
            return
        num_tokens = _charged(usage.tokens, num_prompt_tokens, num_reserved_tokens)
        _check(usage.tokens, num_tokens, f"{tenant.entry.tokens_per_minute} tokens", now)
        usage.tokens.take(num_tokens)
        usage.num_reserved += num_tokens - num_prompt_tokens

    def forget(self, tenant: Tenant, num_sequences: int) -> None:
        """Give a request's share of the minute back: nothing was done for it."""
        usage = self._of(tenant, self._clock())
        if usage.requests is not None:
            usage.requests.take(-num_sequences)

    def ended(
        self, tenant: Tenant, num_output_tokens: int, num_sequences: int = 1, num_reserved_tokens: int = 0
    ) -> None:
        """Count an admitted request out: what it generated is charged, what was reserved comes back."""
        usage = self._of(tenant, self._clock())
        usage.num_running = max(0, usage.num_running - num_sequences)
        if usage.tokens is not None:
            back = min(usage.num_reserved, _charged(usage.tokens, 0, num_reserved_tokens))
            usage.num_reserved -= back
            usage.tokens.take(num_output_tokens - back)

    def num_running(self, tenant: Tenant) -> int:
        """Return how many requests of `tenant` are running."""
        return self._of(tenant, self._clock()).num_running

    def _of(self, tenant: Tenant, now: float) -> _Usage:
        """Return the tenant's counters; limits that were changed in the file start with full buckets."""
        known = self._usage.get(tenant.name)
        if known is not None and known[0] == tenant.entry:
            return known[1]
        entry = tenant.entry
        usage = _Usage(
            requests=None if entry.requests_per_minute is None else Bucket(entry.requests_per_minute, now),
            tokens=None if entry.tokens_per_minute is None else Bucket(entry.tokens_per_minute, now),
            num_running=0 if known is None else known[1].num_running,
        )
        self._usage[tenant.name] = (entry, usage)
        return usage

"""Each eviction policy as its paper tells it, with plain lists and no regard for speed."""

from __future__ import annotations

import math
from collections.abc import Callable

from stemma.prefix.eviction.policy import BlockTraits


class NaivePolicy:
    """Blocks in `order`, oldest first; the deepest of one call is the oldest."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.candidates: set[int] = set()

    def insert(self, ids: list[int], now: float, traits: BlockTraits) -> None:
        self.order += reversed(ids)

    def access(self, ids: list[int], now: float) -> None:
        """Nothing, unless a policy says otherwise."""

    def renew(self, ids: list[int]) -> None:
        for block_id in reversed(ids):
            self.order.remove(block_id)
            self.order.append(block_id)

    def victim(self, now: float) -> int | None:
        """The candidate that is lowest by `key`, then oldest."""
        return min(self.candidates, key=lambda i: (self.key(i, now), self.order.index(i)), default=None)

    def key(self, block_id: int, now: float) -> tuple[float, ...]:
        return ()

    def drop(self, block_id: int, now: float, *, evicted: bool) -> None:
        self.order.remove(block_id)
        self.candidates.discard(block_id)


class NaiveFIFO(NaivePolicy):
    pass


class NaiveLRU(NaivePolicy):
    def access(self, ids: list[int], now: float) -> None:
        self.renew(ids)


class NaiveLFU(NaiveLRU):
    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[int, int] = {}

    def insert(self, ids: list[int], now: float, traits: BlockTraits) -> None:
        super().insert(ids, now, traits)
        self.counts.update((i, 1) for i in ids)

    def access(self, ids: list[int], now: float) -> None:
        super().access(ids, now)
        for i in ids:
            self.counts[i] += 1

    def key(self, block_id: int, now: float) -> tuple[float, ...]:
        return (self.counts[block_id],)


class NaiveGDSF(NaiveLFU):
    def __init__(self) -> None:
        super().__init__()
        self.costs: dict[int, float] = {}
        self.values: dict[int, float] = {}
        self.inflation = 0.0

    def insert(self, ids: list[int], now: float, traits: BlockTraits) -> None:
        super().insert(ids, now, traits)
        costs = [1.0] * len(ids) if traits.costs_s is None else traits.costs_s.tolist()
        self.costs.update(zip(ids, costs, strict=True))
        self.values.update((i, self.inflation + self.costs[i]) for i in ids)

    def access(self, ids: list[int], now: float) -> None:
        super().access(ids, now)
        self.values.update((i, self.inflation + self.counts[i] * self.costs[i]) for i in ids)

    def key(self, block_id: int, now: float) -> tuple[float, ...]:
        return (self.values[block_id],)

    def drop(self, block_id: int, now: float, *, evicted: bool) -> None:
        if evicted:
            self.inflation = max(self.inflation, self.values[block_id])
        super().drop(block_id, now, evicted=evicted)


class NaiveRetention(NaiveLRU):
    def __init__(self) -> None:
        super().__init__()
        self.hints: dict[int, BlockTraits] = {}
        self.used_s: dict[int, float] = {}

    def insert(self, ids: list[int], now: float, traits: BlockTraits) -> None:
        super().insert(ids, now, traits)
        self.hints.update((i, traits) for i in ids)
        self.used_s.update((i, now) for i in ids)

    def access(self, ids: list[int], now: float) -> None:
        super().access(ids, now)
        self.used_s.update((i, now) for i in ids)

    def key(self, block_id: int, now: float) -> tuple[float, ...]:
        hint = self.hints[block_id].hint
        expiry_s = math.inf if hint.ttl_s is None else self.used_s[block_id] + hint.ttl_s
        return (0.0, expiry_s) if expiry_s <= now else (1.0, hint.priority)


class NaiveSieve(NaivePolicy):
    def __init__(self) -> None:
        super().__init__()
        self.visited: dict[int, bool] = {}
        self.hand = 0

    def insert(self, ids: list[int], now: float, traits: BlockTraits) -> None:
        super().insert(ids, now, traits)
        self.visited.update((i, False) for i in ids)

    def access(self, ids: list[int], now: float) -> None:
        self.visited.update((i, True) for i in ids)

    def victim(self, now: float) -> int | None:
        if not self.candidates:
            return None
        while True:
            if self.hand >= len(self.order):
                self.hand = 0
            block_id = self.order[self.hand]
            if block_id in self.candidates:
                if not self.visited[block_id]:
                    return block_id
                self.visited[block_id] = False
            self.hand += 1

    def drop(self, block_id: int, now: float, *, evicted: bool) -> None:
        if self.order.index(block_id) < self.hand:
            self.hand -= 1
        super().drop(block_id, now, evicted=evicted)


def first_of(queue: list[int], candidates: set[int]) -> int | None:
    return next((i for i in queue if i in candidates), None)


class NaiveS3FIFO:
    def __init__(self) -> None:
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghosts: list[int] = []
        self.uses: dict[int, int] = {}
        self.fingerprints: dict[int, int] = {}
        self.candidates: set[int] = set()

    def insert(self, ids: list[int], now: float, traits: BlockTraits) -> None:
        assert traits.fingerprints is not None
        self.fingerprints.update(zip(ids, traits.fingerprints.tolist(), strict=True))
        self.uses.update((i, 0) for i in ids)
        returned = set()
        for i in ids:
            if self.fingerprints[i] in self.ghosts:
                self.ghosts.remove(self.fingerprints[i])
                returned.add(i)
        self.small += [i for i in reversed(ids) if i not in returned]
        self.main += [i for i in reversed(ids) if i in returned]

    def access(self, ids: list[int], now: float) -> None:
        self.uses.update((i, min(self.uses[i] + 1, 3)) for i in ids)

    def victim(self, now: float) -> int | None:
        while self.candidates:
            small, main = first_of(self.small, self.candidates), first_of(self.main, self.candidates)
            if small is not None and (10 * len(self.small) >= len(self.small + self.main) or main is None):
                if self.uses[small] < 2:
                    return small
                self.small.remove(small)
                self.main.append(small)
                self.uses[small] = 0
                continue
            assert main is not None
            if not self.uses[main]:
                return main
            self.main.remove(main)
            self.main.append(main)
            self.uses[main] -= 1
        return None

    def drop(self, block_id: int, now: float, *, evicted: bool) -> None:
        self.candidates.discard(block_id)
        if block_id in self.main:
            self.main.remove(block_id)
            return
        max_ghosts = int(0.9 * len(self.small + self.main))
        self.small.remove(block_id)
        if evicted:
            fingerprint = self.fingerprints[block_id]
            self.ghosts = [i for i in self.ghosts if i != fingerprint] + [fingerprint]
            self.ghosts = self.ghosts[max(0, len(self.ghosts) - max_ghosts) :]


class NaiveARC:
    def __init__(self) -> None:
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []
        self.target = 0.0
        self.fingerprints: dict[int, int] = {}
        self.candidates: set[int] = set()

    def insert(self, ids: list[int], now: float, traits: BlockTraits) -> None:
        assert traits.fingerprints is not None
        self.fingerprints.update(zip(ids, traits.fingerprints.tolist(), strict=True))
        returned = set()
        capacity = len(self.t1 + self.t2) + len(ids)
        for i in ids:
            fingerprint = self.fingerprints[i]
            if fingerprint in self.b1:
                self.target = min(self.target + max(1.0, len(self.b2) / len(self.b1)), capacity)
                self.b1.remove(fingerprint)
                returned.add(i)
            elif fingerprint in self.b2:
                self.target = max(self.target - max(1.0, len(self.b1) / len(self.b2)), 0.0)
                self.b2.remove(fingerprint)
                returned.add(i)
        self.t1 += [i for i in reversed(ids) if i not in returned]
        self.t2 += [i for i in reversed(ids) if i in returned]

    def access(self, ids: list[int], now: float) -> None:
        for i in reversed(ids):
            (self.t1 if i in self.t1 else self.t2).remove(i)
            self.t2.append(i)

    def victim(self, now: float) -> int | None:
        recent, frequent = first_of(self.t1, self.candidates), first_of(self.t2, self.candidates)
        if recent is not None and (len(self.t1) > self.target or frequent is None):
            return recent
        return frequent

    def drop(self, block_id: int, now: float, *, evicted: bool) -> None:
        self.candidates.discard(block_id)
        capacity = len(self.t1 + self.t2)
        fingerprint = self.fingerprints[block_id]
        if block_id in self.t1:
            self.t1.remove(block_id)
            if evicted:
                ghosts, room = self.b1, capacity - len(self.t1)
        else:
            self.t2.remove(block_id)
            if evicted:
                ghosts, room = self.b2, capacity - len(self.b1)
        if evicted:
            if fingerprint in ghosts:
                ghosts.remove(fingerprint)
            ghosts.append(fingerprint)
            del ghosts[: max(0, len(ghosts) - room)]


NAIVE_POLICIES: dict[str, Callable[[], NaivePolicy | NaiveS3FIFO | NaiveARC]] = {
    "arc": NaiveARC,
    "fifo": NaiveFIFO,
    "gdsf": NaiveGDSF,
    "lfu": NaiveLFU,
    "lru": NaiveLRU,
    "retention": NaiveRetention,
    "s3fifo": NaiveS3FIFO,
    "sieve": NaiveSieve,
}

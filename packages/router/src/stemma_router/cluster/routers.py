"""Which replica gets a request: five ways, one interface, used by the proxy, Ray Serve and the lab.

`cache-aware` is Stemma's. For each replica it adds up what the request costs there in seconds (`cost.py`):
computing what isn't cached, `_MISS_WEIGHT` times, waiting for the prompts before it and for a seat, and
slower decoding; and takes the least. So a request goes where its prefix is, unless the queue there is long or
decoding crowded; then it goes elsewhere, and a hot prefix has two homes. Tokens to compute cost more where
much was computed lately, since there they evict sooner: so conversations spread over all of the memory.
Replicas that cost the same are ordered by rendezvous hashing of the prompt's beginning: requests that share a
new prefix meet before the first event about it has come.

The others are what it is compared with: `round-robin`, `least-loaded`, `rendezvous` (a prefix has one home,
unless that is overloaded), `prefix-affinity` (Ray Serve's policy: the best match of a history of what was
sent where, if queues are balanced and it matches at least a tenth; else the shorter of two random queues).
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stemma.told import ToldLoad
from stemma_router.cluster.cost import decoding_s, prefill_speeds, waiting_s
from stemma_router.cluster.holdings import Holdings
from stemma_router.cluster.rendezvous import OVERLOADED_BY, rendezvous_order

_MISS_WEIGHT = 8
"""A token computed where another replica has it is stored twice, and evicts one that would have been reused.
With 1, four replicas lose 6.6 points of hits to one of the same memory, on Mooncake's conversations; with 8,
1.3 points. Above 8 the longest waits grow (docs/how-to/fleet.md)."""
_PRESSURE_WEIGHT = 5.0
"""Added cost of a token computed on a replica, for each time that it lately computed, beyond the mean of all,
what a cache holds: it evicts one there sooner. Without it, six beginnings of prompts stay on four replicas as
two, two, one and one, and half of the memory holds a third of the conversations (docs/project/log.md)."""
_AFFINITY_IMBALANCE = 8
_AFFINITY_MATCH = 0.1
_AFFINITY_BLOCKS = 400_000


@dataclass(slots=True)
class ReplicaLoad:
    """The work that was sent to a replica and isn't done, and what the replica tells of it."""

    num_requests: int = 0
    num_tokens: int = 0
    """Prompt tokens to compute, of requests without a first token."""
    num_running: int = 0
    """Requests that have their first token."""
    num_recent: float = 0.0
    """Prompt tokens that it was sent to compute while all caches filled once; older ones count less. 0
    where no replica tells what it holds."""
    num_earlier: float = 0.0
    """Tokens that caches hold, on the mean of all, and that were computed before this router placed any."""
    number: int | None = None
    """Which replica it is, where a router is shown some of them; None: its place in the list."""
    told: ToldLoad | None = None
    """As it told last; None: it tells nothing."""
    num_elsewhere: int = 0
    """Requests that others sent there, as it told last."""
    prefill_s: float | None = None
    """Seconds for a prompt token, as measured up to first bytes."""

    @property
    def num_there(self) -> int:
        """Requests that it has, whoever sent them."""
        return self.num_requests + self.num_elsewhere

    def note_told(self, told: ToldLoad) -> None:
        """Take what the replica tells now."""
        self.told = told
        self.num_elsewhere = max(0, told.running + told.waiting - self.num_requests)


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request to be placed."""

    chain: Sequence[int]
    """Names of the prompt's full blocks (`holdings.chain_of`); empty if its tokens aren't known."""
    num_tokens: int
    """Number of tokens of the prompt."""
    block_size: int
    head: int = 0
    """A hash of the prompt's beginning; 0: of the first block."""
    max_output: int | None = None
    """Tokens that the answer may have; None: the request doesn't say."""
    chains: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Names of the same prompt's blocks by other sizes, for replicas that have these."""

    @property
    def home(self) -> int:
        """Return the number that rendezvous hashing goes by."""
        return self.head or (self.chain[0] if self.chain else 0)


class ReplicaRouter(Protocol):
    """Orders replicas for a request, best first."""

    def order(self, ask: RoutedRequest, loads: Sequence[ReplicaLoad], depths: Sequence[int]) -> list[int]:
        """Return the numbers of all replicas; `depths` are the blocks that each holds of the prompt."""


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._next = 0

    def order(self, ask: RoutedRequest, loads: Sequence[ReplicaLoad], depths: Sequence[int]) -> list[int]:
        """Return all replicas, from the next one on."""
        first = self._next % len(loads)
        self._next += 1
        return [*range(first, len(loads)), *range(first)]


class LeastLoaded:
    """The least tokens to compute, then the fewest requests."""

    def order(self, ask: RoutedRequest, loads: Sequence[ReplicaLoad], depths: Sequence[int]) -> list[int]:
        """Return the replicas by tokens to compute, then by requests."""
        ranks = _ranks(ask, loads)
        return sorted(range(len(loads)), key=lambda r: (loads[r].num_tokens, loads[r].num_requests, ranks[r]))


class Rendezvous:
    """Highest hash of (beginning of the prompt, replica); overloaded replicas last."""

    def order(self, ask: RoutedRequest, loads: Sequence[ReplicaLoad], depths: Sequence[int]) -> list[int]:
        """Return the replicas by hash, overloaded ones last."""
        ranks = _ranks(ask, loads)
        most = 2 * min(load.num_requests for load in loads) + OVERLOADED_BY
        return sorted(
            range(len(loads)),
            key=lambda r: (loads[r].num_requests >= most and loads[r].num_requests, ranks[r]),
        )


class CacheAware:
    """The least seconds: computing, waiting and decoding."""

    def order(self, ask: RoutedRequest, loads: Sequence[ReplicaLoad], depths: Sequence[int]) -> list[int]:
        """Return the replicas by cost (see the module)."""
        ranks = _ranks(ask, loads)
        speeds = prefill_speeds(loads)
        mean = sum(load.num_recent for load in loads) / len(loads)
        # Where caches were full before, differences of the first requests say nothing of what is evicted.
        filling = mean + sum(load.num_earlier for load in loads) / len(loads)

        def cost(replica: int) -> tuple[float, int]:
            load = loads[replica]
            missing = max(1, ask.num_tokens - depths[replica] * ask.block_size)
            pressure = (load.num_recent - mean) / filling if filling else 0.0
            weight = _MISS_WEIGHT + _PRESSURE_WEIGHT * pressure
            return (
                weight * missing * speeds[replica]
                + waiting_s(load, speeds[replica])
                + decoding_s(load, ask.max_output, speeds[replica]),
                ranks[replica],
            )

        return sorted(range(len(loads)), key=cost)


@dataclass(slots=True)
class PrefixAffinity:
    """Ray Serve's `PrefixCacheAffinityRouter`, rebuilt for comparison: history instead of events."""

    seed: int = 0
    _history: dict[int, OrderedDict[int, None]] = field(default_factory=dict)
    """By replica."""
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def order(self, ask: RoutedRequest, loads: Sequence[ReplicaLoad], depths: Sequence[int]) -> list[int]:
        """Return the replica that was sent the prompt's beginning first, else one of two at random."""
        numbers = [_number(load, place) for place, load in enumerate(loads)]
        queues = [load.num_requests for load in loads]
        chosen = self._match(ask, numbers) if max(queues) - min(queues) <= _AFFINITY_IMBALANCE else None
        if chosen is None:
            two = self._random.sample(range(len(loads)), min(2, len(loads)))
            chosen = min(two, key=lambda r: queues[r])
        self._note(numbers[chosen], ask)
        return [chosen, *(r for r in sorted(range(len(loads)), key=lambda r: queues[r]) if r != chosen)]

    def _match(self, ask: RoutedRequest, numbers: Sequence[int]) -> int | None:
        best, most = None, 0
        for place, number in enumerate(numbers):
            history = self._history.setdefault(number, OrderedDict())
            depth = next((d for d, one in enumerate(ask.chain) if one not in history), len(ask.chain))
            if depth > most:
                best, most = place, depth
        return best if most * ask.block_size >= _AFFINITY_MATCH * ask.num_tokens else None

    def _note(self, replica: int, ask: RoutedRequest) -> None:
        history = self._history.setdefault(replica, OrderedDict())
        for one in ask.chain:
            history[one] = None
            history.move_to_end(one)
        while len(history) > _AFFINITY_BLOCKS:
            history.popitem(last=False)


ROUTERS: dict[str, Callable[[], ReplicaRouter]] = {
    "cache-aware": CacheAware,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "rendezvous": Rendezvous,
    "prefix-affinity": PrefixAffinity,
}
"""By name: how to make one."""


@dataclass(slots=True)
class Placement:
    """A request that was sent to a replica."""

    replica: int
    num_missing: int
    """Tokens that it was expected to compute there."""
    chain: Sequence[int]
    has_first_token: bool = False


class Placements:
    """Requests under way, and with them each replica's load. Not thread-safe.

    Blocks of requests under way count as held where these were sent: the replica computes them now, and its
    event will come later.
    """

    def __init__(
        self,
        router: ReplicaRouter,
        num_replicas: int,
        holdings: Holdings | None = None,
        *,
        has_events: bool = True,
    ) -> None:
        """`has_events`: replicas tell what they hold. Else only equal costs send prompts that begin alike to
        one replica, so what was computed lately makes no difference."""
        self._has_events = has_events
        self.holdings = holdings or Holdings()
        self.loads = [ReplicaLoad(number=number) for number in range(num_replicas)]
        self._router = router
        self._expected: list[dict[int, int]] = [{} for _ in range(num_replicas)]
        """By replica: block -> requests under way that will leave it there."""
        self.block_sizes: dict[int, int] = {}
        """By replica, where it is known: tokens of its blocks."""
        self._num_placed = 0
        """Tokens that replicas were sent to compute since the start."""

    def add_replica(self, number: int | None = None) -> int:
        """Return the place of a further replica; `number` tells it apart in rendezvous hashing."""
        self.loads.append(ReplicaLoad(number=len(self.loads) if number is None else number))
        self._expected.append({})
        return len(self.loads) - 1

    def order(self, ask: RoutedRequest, among: Sequence[int] | None = None) -> list[int]:
        """Return all replicas for a request, or those of `among`, best first."""
        depths = self.depths(ask)
        if among is None:
            return self._router.order(ask, self.loads, depths)
        order = self._router.order(ask, [self.loads[r] for r in among], [depths[r] for r in among])
        return [among[place] for place in order]

    def depths(self, ask: RoutedRequest) -> list[int]:
        """Return how many leading blocks of the prompt each replica holds or is computing.

        A replica whose blocks have another size counts by tokens, in whole blocks of the prompt's size.
        """
        depths = self._depths_by(ask.chain)
        for size, chain in ask.chains.items():
            if size in self.block_sizes.values():
                others = self._depths_by(chain)
                for replica, its_size in self.block_sizes.items():
                    if its_size == size:
                        depths[replica] = others[replica] * size // ask.block_size
        return depths

    def _depths_by(self, chain: Sequence[int]) -> list[int]:
        depths = self.holdings.depths(chain, len(self.loads))
        for replica, expected in enumerate(self._expected):
            if expected:
                depth = depths[replica]
                while depth < len(chain) and chain[depth] in expected:
                    depth += 1
                depths[replica] = depth
        return depths

    def begin(self, ask: RoutedRequest, replica: int) -> Placement:
        """Note that a request was sent to a replica."""
        held = self.depths(ask)[replica] * ask.block_size
        chain = ask.chains.get(self.block_sizes.get(replica, ask.block_size), ask.chain)
        placement = Placement(replica, max(1, ask.num_tokens - held), chain)
        load = self.loads[replica]
        load.num_requests += 1
        load.num_tokens += placement.num_missing
        if self._has_events:
            held = max(self.holdings.num_ids * ask.block_size, placement.num_missing)
            kept = math.exp(-placement.num_missing / held)
            # Twice: blocks of answers are held too, and weren't sent to be computed.
            earlier = max(0.0, held - 2 * self._num_placed) / len(self.loads)
            self._num_placed += placement.num_missing
            for one_load in self.loads:
                one_load.num_recent *= kept
                one_load.num_earlier = earlier
            load.num_recent += placement.num_missing
        expected = self._expected[replica]
        for one in chain:
            expected[one] = expected.get(one, 0) + 1
        return placement

    def note_first_token(self, placement: Placement) -> None:
        """The prompt is computed. A second call does nothing."""
        if placement.has_first_token:
            return
        placement.has_first_token = True
        load = self.loads[placement.replica]
        load.num_tokens -= placement.num_missing
        load.num_running += 1

    def end(self, placement: Placement) -> None:
        """The request was answered or failed."""
        load = self.loads[placement.replica]
        load.num_requests -= 1
        if placement.has_first_token:
            load.num_running -= 1
        else:
            load.num_tokens -= placement.num_missing
        expected = self._expected[placement.replica]
        for one in placement.chain:
            expected[one] -= 1
            if not expected[one]:
                del expected[one]


def _ranks(ask: RoutedRequest, loads: Sequence[ReplicaLoad]) -> list[int]:
    """Return the rank of each replica by rendezvous hashing, 0 first."""
    head = (ask.home & (1 << 64) - 1).to_bytes(8, "little")
    numbers = [_number(load, place) for place, load in enumerate(loads)]
    ranks = [0] * len(loads)
    for rank, place in enumerate(rendezvous_order(head, numbers)):
        ranks[place] = rank
    return ranks


def _number(load: ReplicaLoad, place: int) -> int:
    return place if load.number is None else load.number

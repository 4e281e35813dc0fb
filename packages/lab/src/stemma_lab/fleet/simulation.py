"""Runs traffic through the proxy's own code and a fleet of simulated servers, some of which fall sick.

The proxy's code is all that decides: `send` and `Relay` pass requests on, `keep_checking` asks for each
server's health, `Fleet` with its router, health and retry budgets places, `Holdings` knows the blocks. Only
servers, network, clients and time are simulated. Requests arrive at their times, whatever became of those
before.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt

from stemma.errors import ConfigError
from stemma.http import async_http_client
from stemma_lab.fleet.caches import CacheChange, RunCache
from stemma_lab.fleet.decoding import DecodeModel
from stemma_lab.fleet.router import Cpu, SimulatedRouter
from stemma_lab.fleet.servers import TOLD_TOKENS, Mode, Network, ServerModel, SimulatedServer
from stemma_lab.fleet.traffic import Traffic, hash_of, names_of
from stemma_lab.fleet.virtual_time import run_in_virtual_time
from stemma_lab.fleet.warm import warm
from stemma_lab.savings import PrefillModel
from stemma_router.cluster.holdings import MAX_BLOCKS
from stemma_router.cluster.routers import ROUTERS, RoutedRequest
from stemma_router.routing.checks import keep_checking
from stemma_router.routing.relay import Relay, Relayed, RouteOptions
from stemma_router.routing.sending import Outgoing, send

_PATH = "/v1/completions"
FAULTS = (Mode.HANGS, Mode.GARBAGE, Mode.GONE, Mode.DRAINS)
Progress = Callable[[int], None]
"""Called with the number of requests that ended."""


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """The servers, the router, and what goes wrong."""

    num_servers: int
    capacity_blocks: int
    """Of each server."""
    router: str = "cache-aware"
    prefill: PrefillModel = field(default_factory=PrefillModel)
    decode: DecodeModel = field(default_factory=DecodeModel)
    num_seats: int = 64
    """Answers that each server computes at once."""
    is_streamed: bool = True
    """Whether answers come as they are generated."""
    crawl_from_s: float | None = None
    """When the first server becomes ten times slower, until `crawl_to_s`."""
    crawl_to_s: float = math.inf
    event_lag_s: float = 0.05
    index_blocks: int = MAX_BLOCKS
    """Blocks that the router knows at most."""
    faults: int = 0
    """How many servers hang, answer garbage, die, and drain, each; evenly over the time."""
    fault_s: float = 20.0
    """How long; then a hung server goes on, a dead one is back with an empty cache, and one that drained is
    replaced by another."""
    restart_at_s: float | None = None
    """When the router is started anew; requests under way end in the old one."""
    snapshot_blocks_per_s: float = 500_000.0
    """How fast a router takes snapshots after its start."""
    seed: int = 0


@dataclass(slots=True)
class FleetRun:
    """What became of the requests. Arrays have the shape [num_requests]."""

    num_prompt_blocks: npt.NDArray[np.int64]
    num_hit_blocks: npt.NDArray[np.int64]
    ttft_s: npt.NDArray[np.float64]
    """From arrival to the first byte; NaN: there was none."""
    end_s: npt.NDArray[np.float64]
    """From the start of the run to the end of the answer."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Requests by how they ended: right, `broken` (after the first byte), or the status of a failure."""
    tries: Counter[str] = field(default_factory=Counter)
    """Tries by how they ended, of all servers."""
    num_by_server: dict[str, int] = field(default_factory=dict)
    """Requests that each server was sent, by its name."""
    num_retries: int = 0
    num_ejections: int = 0
    num_faults: Counter[str] = field(default_factory=Counter)
    num_index_blocks: int = 0
    num_index_bytes: int = 0
    num_index_evicted: int = 0
    snapshots_ready_s: float | None = None
    """How long after the restart the last snapshot was in the index."""
    cpu: Cpu = field(default_factory=Cpu)

    @property
    def hit_ratio(self) -> float:
        """Hit blocks over blocks of prompts; failed requests hit nothing."""
        return float(self.num_hit_blocks.sum()) / max(1, int(self.num_prompt_blocks.sum()))

    @property
    def success(self) -> float:
        """Share of requests that were answered to the end."""
        return self.outcomes["right"] / max(1, self.outcomes.total())

    @property
    def ttft_p99_s(self) -> float:
        """99th percentile of the time to the first byte, of requests that got one."""
        return float(np.nanquantile(self.ttft_s, 0.99))


def simulate(
    traffic: Traffic, settings: FleetSettings, progress: Progress = lambda num_done: None
) -> FleetRun:
    """Run the whole traffic. Raises ConfigError for an unknown router."""
    if settings.router not in ROUTERS:
        raise ConfigError(f"unknown router {settings.router!r}; known: {', '.join(ROUTERS)}")
    return run_in_virtual_time(_Simulation(traffic, settings, progress).run())


def one_cache_hits(traffic: Traffic, capacity_blocks: int) -> npt.NDArray[np.int64]:
    """Return the hit blocks of each request, [num_requests], if one cache were in front of all servers."""
    cache = RunCache(capacity_blocks)
    for last in traffic.earlier.tolist():
        chain = traffic.chain(last)
        cache.use(chain, traffic.sizes(chain))
    hits = np.zeros(traffic.num_requests, dtype=np.int64)
    for number in range(traffic.num_requests):
        chain = traffic.chain(int(traffic.prompt_runs[number]))
        sizes = traffic.sizes(chain)
        num_tokens = cache.num_cached(chain, sizes) * traffic.block_size
        hits[number] = min(num_tokens, max(0, int(traffic.input_tokens[number]) - 1)) // traffic.block_size
        cache.use(chain, sizes)
        if traffic.answer_runs[number] >= 0:
            chain = traffic.chain(int(traffic.answer_runs[number]))
            cache.use(chain, traffic.sizes(chain))
    return hits


class _Simulation:
    """One run of a fleet: its servers, its router and its clients, in virtual time."""

    def __init__(self, traffic: Traffic, settings: FleetSettings, progress: Progress) -> None:
        self._traffic = traffic
        self._settings = settings
        self._progress = progress
        self._random = random.Random(settings.seed)
        self._network = Network()
        self._num_started = 0
        count = traffic.num_requests
        num_prompt = np.array(
            [sum(traffic.sizes(traffic.chain(last))) for last in traffic.prompt_runs.tolist()], dtype=np.int64
        )
        self._run = FleetRun(
            num_prompt, np.zeros(count, dtype=np.int64), np.full(count, np.nan), np.zeros(count)
        )
        self._past: list[SimulatedRouter] = []

    async def run(self) -> FleetRun:
        """Warm the caches, start the router, send everything, and count."""
        settings, loop = self._settings, asyncio.get_running_loop()
        for _ in range(settings.num_servers):
            self._start_server()
        warm(self._traffic, [server.cache for server in self._network.servers.values()])
        self._client = async_http_client(transport=self._network, timeout=None)
        self._relay = Relay(self._client, RouteOptions())
        self._start_router()
        for server in tuple(self._network.servers.values()):
            self._router.take_snapshot(server, self._traffic.block_size)
        beside = [loop.create_task(work) for work in (self._fail(), self._restart(), self._crawl())]
        begun = self._begun = loop.time()
        asked = []
        for number, arrival in enumerate(self._traffic.arrivals_s.tolist()):
            await asyncio.sleep(begun + arrival - loop.time())
            asked.append(loop.create_task(self._ask(number)))
        await asyncio.gather(*asked)
        for task in (*beside, self._checking):
            task.cancel()
        done = await asyncio.gather(*beside, self._checking, return_exceptions=True)
        for failure in done:
            if isinstance(failure, Exception):
                raise failure
        await self._client.aclose()
        self._count()
        return self._run

    # -- servers and routers that start ----------------------------------------------------------------------

    def _start_server(self) -> SimulatedServer:
        settings = self._settings
        model = ServerModel(settings.capacity_blocks, settings.prefill, settings.decode, settings.num_seats)
        server = SimulatedServer(f"server-{self._num_started}", model, self._traffic, self._tell)
        self._num_started += 1
        self._network.servers[server.host] = server
        return server

    def _start_router(self) -> None:
        loop = asyncio.get_running_loop()
        urls = [server.url for server in self._network.servers.values() if server.mode is not Mode.DRAINS]
        self._router = SimulatedRouter.started(
            self._settings.router, urls, self._settings.index_blocks, self._run.cpu, loop.time
        )
        self._past.append(self._router)
        self._checking = loop.create_task(keep_checking(self._router.fleet, self._client))

    async def _restart(self) -> None:
        """Replace the router by one that knows nothing, and takes one snapshot after the other."""
        settings, loop = self._settings, asyncio.get_running_loop()
        if settings.restart_at_s is None:
            return
        await asyncio.sleep(settings.restart_at_s)
        self._checking.cancel()
        self._start_router()
        begun = loop.time()
        for server in tuple(self._network.servers.values()):
            if server.mode is not Mode.GONE:
                await asyncio.sleep(server.cache.num_blocks / settings.snapshot_blocks_per_s)
                self._router.take_snapshot(server, self._traffic.block_size)
        self._run.snapshots_ready_s = loop.time() - begun

    def _tell(self, server: SimulatedServer, change: CacheChange) -> None:
        """Let the router know of a change soon."""
        loop = asyncio.get_running_loop()
        loop.call_later(self._settings.event_lag_s, lambda: self._router.take_event(server, change))

    # -- what goes wrong -------------------------------------------------------------------------------------

    async def _fail(self) -> None:
        """Let one server after the other fall sick."""
        settings = self._settings
        duration_s = float(self._traffic.arrivals_s[-1]) if self._traffic.num_requests else 0.0
        kinds = FAULTS * settings.faults
        async with asyncio.TaskGroup() as faults:
            for kind in kinds:
                await asyncio.sleep(duration_s / (len(kinds) + 1))
                well = [one for one in self._network.servers.values() if one.mode is Mode.SERVES]
                if len(well) > 1:
                    self._run.num_faults[kind.value] += 1
                    faults.create_task(self._be_sick(self._random.choice(well), kind))

    async def _crawl(self) -> None:
        """Let the first server be slow for a while."""
        settings, first = self._settings, next(iter(self._network.servers.values()))
        if settings.crawl_from_s is not None:
            await asyncio.sleep(settings.crawl_from_s)
            first.become(Mode.CRAWLS)
            if settings.crawl_to_s < math.inf:
                await asyncio.sleep(settings.crawl_to_s - settings.crawl_from_s)
                first.become(Mode.SERVES)

    async def _be_sick(self, server: SimulatedServer, kind: Mode) -> None:
        server.become(kind)
        if kind is not Mode.DRAINS:
            await asyncio.sleep(self._settings.fault_s)
            server.become(Mode.SERVES)
            if kind is Mode.GONE:  # the router's connection is made anew, so it asks for a snapshot
                self._router.take_snapshot(server, self._traffic.block_size)
            return
        successor = self._start_server()
        gone = {one.url for one in self._network.servers.values() if one.mode is Mode.DRAINS}
        urls = [one.url for one in self._network.servers.values() if one.url not in gone]
        await asyncio.sleep(1.0)  # until the list of servers is read again
        self._router.fleet.set_servers(urls)
        self._router.take_snapshot(successor, self._traffic.block_size)

    # -- clients ---------------------------------------------------------------------------------------------

    async def _ask(self, number: int) -> None:
        """Send a request and read its answer."""
        traffic, run, loop = self._traffic, self._run, asyncio.get_running_loop()
        begun = loop.time()
        chain = traffic.chain(int(traffic.prompt_runs[number]))
        pieces = [(part, 0, size) for part, size in zip(chain, traffic.sizes(chain), strict=True)]
        head = hash_of(chain[min(1, len(chain) - 1)]) if chain else 0
        length = int(traffic.input_tokens[number])
        ask = RoutedRequest(names_of(pieces).tolist(), length, traffic.block_size, head)
        headers = {"accept": "text/event-stream" if self._settings.is_streamed else "application/json"}
        outgoing = Outgoing(_PATH, str(number).encode(), headers, self._settings.is_streamed)
        response, _ = await send(self._router.fleet, self._relay, ask, outgoing)
        chunks: list[bytes] = []

        async def take(message: Any) -> None:
            if message.get("body"):
                if not chunks:
                    run.ttft_s[number] = loop.time() - begun
                chunks.append(message["body"])

        if isinstance(response, Relayed):
            await response({"type": "http", "asgi": {"spec_version": "2.4"}}, _nothing, take)
            is_whole = chunks[-1:] == [b"data: [DONE]\n\n"]
            run.outcomes["right" if is_whole else "broken"] += 1
        elif response.status_code == httpx.codes.OK:
            run.ttft_s[number] = loop.time() - begun
            run.outcomes["right"] += 1
        else:
            run.outcomes[str(response.status_code)] += 1
        run.num_hit_blocks[number] = int(response.headers.get(TOLD_TOKENS, "0")) // traffic.block_size
        run.end_s[number] = loop.time() - self._begun
        self._progress(1)

    def _count(self) -> None:
        run = self._run
        run.num_by_server = {one.host: one.num_requests for one in self._network.servers.values()}
        for router in self._past:
            for member in router.fleet.met:
                run.tries.update({outcome.value: count for outcome, count in member.outcomes.items()})
                run.num_retries += member.num_retries
                run.num_ejections += member.health.num_ejections
        holdings = self._router.fleet.placements.holdings
        run.num_index_blocks, run.num_index_bytes = holdings.num_ids, holdings.num_bytes
        run.num_index_evicted = holdings.num_evicted


async def _nothing() -> dict[str, httpx.Response]:
    return {}

"""Made-up traffic of many kinds, made so that a learned eviction order may go wrong on it.

Every generator takes a seed and returns a `Trace` of 512-token blocks. They are small (20,000 to 150,000
blocks), since each is replayed at several capacities.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from stemma_lab.traces.columns import Trace, collect
from stemma_lab.traces.request import TraceRequest

BLOCK_SIZE = 512


class Writer:
    """Collects requests; hands out ids that nobody had before."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._requests: list[TraceRequest] = []
        self._next_id = 0

    def fresh(self, num_blocks: int) -> list[int]:
        """Return new ids."""
        self._next_id += num_blocks
        return list(range(self._next_id - num_blocks, self._next_id))

    def add(self, time_s: float, chain: list[int], num_partial: int = 0) -> None:
        """Enter a prompt; with `num_partial` tokens it ends in a partial block that never returns."""
        ids = [*chain, *self.fresh(1)] if num_partial else chain
        num_tokens = len(chain) * BLOCK_SIZE + num_partial
        array = np.asarray(ids, dtype=np.int64)
        self._requests.append(TraceRequest(time_s, array, num_tokens, 200, num_prompt_blocks=len(ids)))

    def trace(self) -> Trace:
        """Return everything, by time."""
        return collect(self.name, lambda: BLOCK_SIZE, self._requests)


def sessions(
    writer: Writer,
    rng: np.random.Generator,
    num_sessions: int,
    span_s: float,
    mean_turns: float,
    first_blocks: tuple[int, int],
    grown_blocks: float,
    gap: Callable[[], float],
    system: list[list[int]] | None = None,
    partial: bool = True,
) -> None:
    """Enter conversations whose prompt grows each turn, behind one of the `system` prompts if any."""
    for start in rng.uniform(0.0, span_s, num_sessions):
        now = float(start)
        chain = list(system[min(int(rng.zipf(1.6)) - 1, len(system) - 1)]) if system else []
        chain += writer.fresh(int(rng.integers(*first_blocks)))
        for _ in range(int(rng.geometric(1.0 / mean_turns))):
            writer.add(now, chain, int(rng.integers(1, BLOCK_SIZE)) if partial else 0)
            chain = chain + writer.fresh(int(rng.poisson(grown_blocks)))
            now += gap()


def agentic(seed: int, num_sessions: int = 120, share_human: float = 0.12, mean_turns: float = 25.0) -> Trace:
    """Long sessions that share nothing: tools answer in seconds, humans in minutes; some 95 % hits."""
    rng, writer = np.random.default_rng(seed), Writer(f"agentic {share_human}")

    def gap() -> float:
        if rng.random() < share_human:
            return float(rng.lognormal(4.8, 1.0))
        return 2.0 + float(rng.lognormal(1.6, 0.7))

    sessions(writer, rng, num_sessions, 2400.0, mean_turns, (20, 90), 2.5, gap)
    return writer.trace()


def agentic_shared(seed: int) -> Trace:
    """Agents behind a few long system prompts."""
    rng, writer = np.random.default_rng(seed), Writer("agentic shared")
    system = [writer.fresh(int(size)) for size in rng.integers(10, 40, 5)]
    sessions(
        writer, rng, 150, 1800.0, 15.0, (2, 20), 1.5, lambda: 1.0 + float(rng.lognormal(1.5, 1.0)), system
    )
    return writer.trace()


def agentic_parallel(seed: int) -> Trace:
    """A main loop that forks sub-agents: several branches of one prompt at once, dead soon after."""
    rng, writer = np.random.default_rng(seed), Writer("agentic parallel")
    for start in rng.uniform(0.0, 1800.0, 60):
        now, chain = float(start), writer.fresh(int(rng.integers(20, 60)))
        for _ in range(int(rng.geometric(0.08))):
            writer.add(now, chain, 100)
            if rng.random() < 0.3:
                for _ in range(int(rng.integers(2, 6))):
                    branch, then = list(chain), now
                    for _ in range(int(rng.geometric(0.25))):
                        branch = branch + writer.fresh(2)
                        then += float(rng.lognormal(1.0, 0.5))
                        writer.add(then, branch, 50)
                now += 30.0
            chain = chain + writer.fresh(int(rng.integers(1, 5)))
            now += float(rng.lognormal(2.0, 1.0))
    return writer.trace()


def chat(seed: int, span_s: float = 3600.0, num_sessions: int = 1500) -> Trace:
    """Humans who read and type for a minute; most leave after a turn."""
    rng, writer = np.random.default_rng(seed), Writer("chat")
    sessions(
        writer, rng, num_sessions, span_s, 2.2, (2, 50), 2.0, lambda: 20.0 + float(rng.lognormal(3.4, 0.8))
    )
    return writer.trace()


def day(seed: int) -> Trace:
    """A day of chat: load goes up and down, people come back after hours."""
    rng, writer = np.random.default_rng(seed), Writer("day")
    for _ in range(4):
        peak = rng.uniform(2, 22) * 3600.0
        for start in rng.normal(peak, 5000.0, 250):
            now, chain = max(0.0, float(start)), writer.fresh(int(rng.integers(1, 30)))
            for _ in range(int(rng.geometric(0.3))):
                writer.add(now, chain, 100)
                chain = chain + writer.fresh(int(rng.integers(1, 4)))
                now += (
                    float(rng.lognormal(9.0, 1.0)) if rng.random() < 0.2 else float(rng.lognormal(4.0, 1.0))
                )
    return writer.trace()


def tool_agent(seed: int) -> Trace:
    """Many one-off requests behind long, very popular tool prompts, a few with turns."""
    rng, writer = np.random.default_rng(seed), Writer("tool agent")
    system = [writer.fresh(int(size)) for size in rng.integers(3, 16, 40)]
    sessions(writer, rng, 2500, 1800.0, 2.0, (1, 14), 1.0, lambda: float(rng.lognormal(2.0, 1.2)), system)
    return writer.trace()


def scan(seed: int) -> Trace:
    """Long documents read once, between requests of a small hot set."""
    rng, writer = np.random.default_rng(seed), Writer("scan")
    hot = [writer.fresh(int(size)) for size in rng.integers(2, 20, 60)]
    for number in range(2000):
        if rng.random() < 0.3:
            writer.add(number * 0.8, writer.fresh(int(rng.integers(20, 120))))
        else:
            writer.add(number * 0.8, hot[int(rng.integers(len(hot)))])
    return writer.trace()


def loop(seed: int, num_prompts: int = 200) -> Trace:
    """The same prompts in the same order again and again: LRU's worst case."""
    rng, writer = np.random.default_rng(seed), Writer("loop")
    prompts = [writer.fresh(int(size)) for size in rng.integers(2, 30, num_prompts)]
    for number in range(12 * num_prompts):
        writer.add(number * 0.5, prompts[number % num_prompts])
    return writer.trace()


def loops_and_stops(seed: int) -> Trace:
    """Loops over one set for a while, then over another: what was learned of the first is wrong."""
    rng, writer = np.random.default_rng(seed), Writer("loops and stops")
    now = 0.0
    for _ in range(12):
        prompts = [writer.fresh(int(size)) for size in rng.integers(2, 20, int(rng.integers(20, 150)))]
        for number in range(int(rng.integers(1, 6)) * len(prompts)):
            writer.add(now, prompts[number % len(prompts)])
            now += 0.5
    return writer.trace()


def shifting(seed: int, every: int = 400) -> Trace:
    """A working set that moves on: what was hot is dead, uniformly used while it is hot."""
    rng, writer = np.random.default_rng(seed), Writer(f"shifting {every}")
    now = 0.0
    for number in range(4000):
        if number % every == 0:
            hot = [writer.fresh(int(size)) for size in rng.integers(2, 30, 60)]
        writer.add(now, hot[int(rng.integers(len(hot)))])
        now += float(rng.exponential(0.5))
    return writer.trace()


def drifting(seed: int) -> Trace:
    """A working set that drifts one prompt at a time: LRU is close to the best."""
    rng, writer = np.random.default_rng(seed), Writer("drifting")
    hot = [writer.fresh(int(size)) for size in rng.integers(2, 30, 80)]
    for number in range(4000):
        if rng.random() < 0.15:
            hot.pop(0)
            hot.append(writer.fresh(int(rng.integers(2, 30))))
        writer.add(number * 0.4, hot[int(rng.integers(len(hot)))])
    return writer.trace()


def recency(seed: int, mean_distance: float = 25.0) -> Trace:
    """The most recent prompts are the likeliest next (geometric stack distances): LRU is optimal."""
    rng, writer = np.random.default_rng(seed), Writer("recency")
    stack: list[list[int]] = []
    for number in range(4500):
        distance = int(rng.geometric(1.0 / mean_distance)) - 1
        chain = stack.pop(distance) if distance < len(stack) else writer.fresh(int(rng.integers(2, 25)))
        if rng.random() < 0.05:
            chain = writer.fresh(int(rng.integers(2, 25)))
        stack.insert(0, chain)
        del stack[400:]
        writer.add(number * 0.4, chain)
    return writer.trace()


def zipf(seed: int, exponent: float = 1.1) -> Trace:
    """Independent requests of Zipf popularity: no sessions, no recency."""
    rng, writer = np.random.default_rng(seed), Writer(f"zipf {exponent}")
    prompts = [writer.fresh(int(size)) for size in rng.integers(1, 30, 3000)]
    weights = np.arange(1, len(prompts) + 1) ** -exponent
    chosen = rng.choice(len(prompts), 6000, p=weights / weights.sum())
    for time_s, number in zip(np.cumsum(rng.exponential(0.3, len(chosen))), chosen, strict=True):
        writer.add(float(time_s), prompts[int(number)])
    return writer.trace()


def bursts(seed: int) -> Trace:
    """Each prompt several times within seconds, then never again."""
    rng, writer = np.random.default_rng(seed), Writer("bursts")
    for start in rng.uniform(0.0, 1500.0, 900):
        now, chain = float(start), writer.fresh(int(rng.integers(5, 40)))
        for _ in range(int(rng.integers(1, 9))):
            writer.add(now, chain)
            now += float(rng.exponential(1.5))
    return writer.trace()


def echo(seed: int) -> Trace:
    """Every prompt exactly twice, the second time after a fixed delay that changes half-way."""
    rng, writer = np.random.default_rng(seed), Writer("echo")
    for start in rng.uniform(0.0, 3000.0, 1800):
        chain = writer.fresh(int(rng.integers(5, 30)))
        writer.add(float(start), chain)
        writer.add(float(start) + (40.0 if start < 1500.0 else 8.0) + float(rng.exponential(2.0)), chain)
    return writer.trace()


def uneven(seed: int) -> Trace:
    """Prompts of 1 to 1,100 blocks (log-uniform), reused by recency."""
    rng, writer = np.random.default_rng(seed), Writer("uneven")
    stack: list[list[int]] = []
    for number in range(2500):
        distance = int(rng.geometric(0.08)) - 1
        if distance < len(stack) and rng.random() < 0.8:
            chain = stack.pop(distance)
        else:
            chain = writer.fresh(int(np.exp(rng.uniform(0.0, 7.0))))
        stack.insert(0, chain)
        writer.add(number * 1.0, chain)
    return writer.trace()


def few_shot(seed: int) -> Trace:
    """Batches behind one set of examples each: a shared prefix, then a question of its own."""
    rng, writer = np.random.default_rng(seed), Writer("few-shot")
    now = 0.0
    for _ in range(120):
        examples = writer.fresh(int(rng.integers(5, 60)))
        for _ in range(int(rng.integers(3, 60))):
            writer.add(now, examples + writer.fresh(int(rng.integers(1, 4))))
            now += float(rng.exponential(0.4))
    return writer.trace()


def documents(seed: int) -> Trace:
    """Questions to documents of Zipf popularity behind one system prompt."""
    rng, writer = np.random.default_rng(seed), Writer("documents")
    system = writer.fresh(6)
    library = [system + writer.fresh(int(size)) for size in rng.integers(5, 60, 1500)]
    weights = np.arange(1, len(library) + 1) ** -0.9
    for turn, number in enumerate(rng.choice(len(library), 3500, p=weights / weights.sum())):
        writer.add(turn * 0.7, library[int(number)], 77)
    return writer.trace()


def phases(seed: int) -> Trace:
    """Chat, then a loop, then recency, then chat: each teaches what is wrong in the next."""
    rng, writer = np.random.default_rng(seed), Writer("phases")
    parts = [chat(seed, 900.0, 400), loop(seed, 80), recency(seed), chat(seed + 1, 900.0, 400), bursts(seed)]
    start = 0.0
    for number in rng.permutation(len(parts)).tolist():
        part = parts[number]
        base = writer.fresh(part.num_unique_blocks)[:1][0]
        for request, time_s in enumerate(part.timestamps_s.tolist()):
            writer.add(start + time_s, [base + block for block in part.blocks_of(request).tolist()])
        start += float(part.timestamps_s[-1])
    return writer.trace()


def mirage(seed: int) -> Trace:
    """Old blocks return while the policy learns; then only new ones do."""
    rng, writer = np.random.default_rng(seed), Writer("mirage")
    old: list[list[int]] = []
    for number in range(4000):
        now = number * 0.5
        if number < 1500 and len(old) > 150 and rng.random() < 0.5:
            writer.add(now, old.pop(0))
        elif number >= 1500 and rng.random() < 0.6:
            writer.add(now, old[-1 - min(int(rng.geometric(0.1)), len(old) - 1)])
        else:
            old.append(writer.fresh(int(rng.integers(3, 25))))
            writer.add(now, old[-1])
    return writer.trace()


def closed_loop(seed: int, num_users: int = 64) -> Trace:
    """A fixed number of users who send the next turn as soon as they have read: round-robin, in effect."""
    rng, writer = np.random.default_rng(seed), Writer(f"closed loop {num_users}")
    heap = [
        (float(rng.uniform(0, 30)), user, writer.fresh(int(rng.integers(5, 30)))) for user in range(num_users)
    ]
    heapq.heapify(heap)
    for _ in range(4000):
        now, user, chain = heapq.heappop(heap)
        writer.add(now, chain, 200)
        if rng.random() < 0.06:
            chain = writer.fresh(int(rng.integers(5, 30)))
        else:
            chain = chain + writer.fresh(int(rng.integers(0, 3)))
        heapq.heappush(heap, (now + float(rng.gamma(4.0, 8.0)), user, chain))
    return writer.trace()


def tiny(seed: int) -> Trace:
    """A few dozen requests: nothing can be learned."""
    rng, writer = np.random.default_rng(seed), Writer("tiny")
    sessions(writer, rng, 8, 60.0, 4.0, (1, 6), 1.0, lambda: float(rng.lognormal(1.0, 1.0)))
    return writer.trace()


def retimed(trace: Trace, kind: str) -> Trace:
    """Return the trace with other timestamps: `equal`, `counted` 0, 1, 2 ..., in `ms`, in `coarse` steps."""
    times = {
        "equal": np.zeros(trace.num_requests),
        "counted": np.arange(trace.num_requests, dtype=np.float64),
        "ms": trace.timestamps_s * 1000.0,
        "fast": trace.timestamps_s / 1000.0,
        "coarse": np.floor(trace.timestamps_s / 60.0) * 60.0,
    }[kind]
    return replace(trace, name=f"{trace.name}, times {kind}", timestamps_s=times)


def _retimed(make: Callable[[int], Trace], kind: str) -> Callable[[int], Trace]:
    return lambda seed: retimed(make(seed), kind)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of traffic."""

    name: str
    make: Callable[[int], Trace]


KINDS: tuple[Kind, ...] = (
    Kind("agentic", agentic),
    Kind("agentic-no-human", lambda seed: agentic(seed, share_human=0.0)),
    Kind("agentic-slow", lambda seed: agentic(seed, share_human=0.5)),
    Kind("agentic-long", lambda seed: agentic(seed, num_sessions=50, mean_turns=70.0)),
    Kind("agentic-shared", agentic_shared),
    Kind("agentic-parallel", agentic_parallel),
    Kind("chat", chat),
    Kind("day", day),
    Kind("tool-agent", tool_agent),
    Kind("scan", scan),
    Kind("loop", loop),
    Kind("loops-and-stops", loops_and_stops),
    Kind("shifting", shifting),
    Kind("shifting-fast", lambda seed: shifting(seed, every=150)),
    Kind("drifting", drifting),
    Kind("recency", recency),
    Kind("recency-wide", lambda seed: recency(seed, mean_distance=120.0)),
    Kind("zipf-0.8", lambda seed: zipf(seed, 0.8)),
    Kind("zipf-1.1", zipf),
    Kind("bursts", bursts),
    Kind("echo", echo),
    Kind("uneven", uneven),
    Kind("few-shot", few_shot),
    Kind("documents", documents),
    Kind("phases", phases),
    Kind("mirage", mirage),
    Kind("closed-loop", closed_loop),
    Kind("tiny", tiny),
    *(
        Kind(f"{name}-{kind}", _retimed(make, kind))
        for name, make in (("chat", chat), ("agentic", agentic), ("recency", recency))
        for kind in ("equal", "counted", "ms", "fast", "coarse")
    ),
)
"""All of them; the test runs each at several capacities."""


def capacities_of(trace: Trace) -> Iterator[int]:
    """Yield sizes from a handful of blocks to nearly everything."""
    for share in (0.005, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8):
        yield max(1, round(share * trace.num_unique_blocks))

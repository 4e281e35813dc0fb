"""The part of `stemma replay` that replays a trace through several replicas behind a router."""

from __future__ import annotations

from dataclasses import replace

from rich.table import Table

from stemma.cli.progress import CommandProgress, StepCounter
from stemma.errors import ConfigError
from stemma_lab.replay import BOUNDS
from stemma_lab.replicas import Cluster, ClusterResult, replay_replicas
from stemma_lab.traces.columns import Trace
from stemma_router.cluster.routers import ROUTERS

ONE = "one replica, all memory"
"""Name of the row that the others are compared with."""


def parse_replicas(text: str) -> list[int]:
    """Return numbers of replicas; raise ConfigError if one isn't between 1 and 1024."""
    numbers = []
    for part in text.split(","):
        word = part.strip()
        if not word.isdecimal() or not 1 <= int(word) <= 1024:
            raise ConfigError(f"--replicas takes numbers from 1 to 1024, separated by commas, not {word!r}")
        numbers.append(int(word))
    return numbers


def parse_routers(text: str) -> list[str]:
    """Return names of routers; raise ConfigError for one that doesn't exist."""
    names = list(ROUTERS) if text.strip() == "all" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in ROUTERS:
            raise ConfigError(f"unknown router {name!r}; known: {', '.join(ROUTERS)}, all")
    return names


def replay_clusters(
    trace: Trace,
    policies: list[str],
    sizes: list[int | None],
    which: tuple[str, str],
    cluster: Cluster,
    progress: CommandProgress,
) -> list[ClusterResult]:
    """Replay every policy, size, number of replicas and router of `which` (replicas, routers), as text.

    For each number of replicas, one replica with the memory of all comes first.
    """
    numbers, routers = parse_replicas(which[0]), parse_routers(which[1])
    policies = [name for name in policies if name not in BOUNDS]
    runs = len(policies) * len(sizes) * len(numbers) * (1 + len(routers))
    counter = StepCounter(progress, "replaying", runs * trace.num_requests)
    results = []
    for policy in policies:
        for size in sizes:
            for number in numbers:
                whole = replace(
                    cluster,
                    policy=policy,
                    capacity_blocks=size and size * number,
                    busy=cluster.busy / number,
                )
                one = replay_replicas(trace, "round-robin", whole, counter.advance)
                results.append(replace(one, router=ONE))
                parts = replace(cluster, policy=policy, capacity_blocks=size, num_replicas=number)
                for router in routers:
                    counter.stage = f"{router}, {number} x {size or 'unlimited'} blocks"
                    results.append(replay_replicas(trace, router, parts, counter.advance))
    return results


def replica_table(trace: Trace, results: list[ClusterResult], cluster: Cluster) -> Table:
    """Return a line per result."""
    about = f"busy {cluster.busy:.0%}, events {cluster.event_lag_s:g} s late, {cluster.event_loss:.0%} lost"
    table = Table(title=f"{trace.version}: {about}", title_justify="left")
    for name in ("policy", "router"):
        table.add_column(name)
    for name in ("replicas", "blocks each", "block hit ratio", "first token, mean", "p99", "busiest / mean"):
        table.add_column(name, justify="right")
    for one in results:
        table.add_row(
            one.policy,
            one.router,
            f"{one.num_replicas}",
            "unlimited" if one.capacity_blocks is None else f"{one.capacity_blocks:,}",
            f"{one.block_hit_ratio:.4f}",
            f"{one.ttft_mean_s:.2f} s",
            f"{one.ttft_p99_s:.2f} s",
            f"{one.imbalance:.2f}",
            end_section=False,
        )
    return table

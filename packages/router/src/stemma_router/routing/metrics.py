"""`/metrics` of a proxy: what it did, how its servers fare, and what it knows of their blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from stemma_router.cluster.fleet import Fleet
from stemma_router.cluster.health import Cause, Standing
from stemma_router.cluster.holdings import Holdings
from stemma_router.cluster.member import Outcome

_BY_SERVER = ["role", "server"]


class _Collected(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Return the families."""
        return self._families


def render(*families: Iterable[Metric]) -> bytes:
    """Return metric families in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(list(chain(*families))))
    return generate_latest(registry)


def counters(counts: Mapping[str, tuple[str, int]]) -> Iterable[Metric]:
    """Return counters of the proxy itself; `counts`: name without ``stemma_route_`` -> (text, count)."""
    for name, (text, count) in counts.items():
        yield CounterMetricFamily(f"stemma_route_{name}", text, value=count)


def following_metrics(fleet: Fleet, followed: Mapping[str, Mapping[str, Any]]) -> Iterable[Metric]:
    """Return what is known of each server's blocks, and how old that is; `followed`: of `Following`."""
    holdings = fleet.placements.holdings
    known = GaugeMetricFamily("stemma_route_known_blocks", "Blocks known of a server", labels=["server"])
    followed_now = GaugeMetricFamily(
        "stemma_route_events_followed", "1 while a server's KV events can be followed", labels=["server"]
    )
    age = GaugeMetricFamily(
        "stemma_route_last_event_seconds", "Time since a server's latest KV event", labels=["server"]
    )
    for member in fleet.members:
        known.add_metric([member.url], holdings.num_blocks(member.place))
    for url, state in followed.items():
        followed_now.add_metric([url], state["state"] == "following")
        if state["last_event_s"] is not None:
            age.add_metric([url], state["last_event_s"])
    yield from (known, followed_now, age)


def holdings_metrics(holdings: Holdings, events: Mapping[str, int]) -> Iterable[Metric]:
    """Return what is known of all servers' blocks; `events`: counters of `Following`."""
    yield GaugeMetricFamily("stemma_route_index_bytes", "Memory of the index of blocks", holdings.num_bytes)
    texts = {
        "events": "KV events of servers",
        "unplaced": "Blocks of events whose tokens or predecessors aren't known",
        "gaps": "Times that messages of events were missing",
        "lost": "Gaps after which all that was known of a server was dropped",
        "snapshots": "Snapshots that servers sent",
        "malformed": "Messages that are no batch of events",
        "aged": "Times that what was known of a server was forgotten, since it couldn't be reached",
    }
    for name, text in texts.items():
        yield CounterMetricFamily(f"stemma_route_event_{name}", text, value=events.get(name, 0))
    text = "Blocks dropped from the index, those first that no prompt matched for longest"
    yield CounterMetricFamily("stemma_route_evicted_blocks", text, value=holdings.num_evicted)


def fleet_metrics(fleets: Mapping[str, Fleet]) -> Iterable[Metric]:
    """Return how the servers of fleets fare, by role."""
    tries = CounterMetricFamily(
        "stemma_route_tries", "Requests sent to a server, by how they ended", labels=[*_BY_SERVER, "outcome"]
    )
    retries = CounterMetricFamily(
        "stemma_route_retries", "Requests that a server got after another one", labels=_BY_SERVER
    )
    ejections = CounterMetricFamily(
        "stemma_route_ejections", "Times that a server was ejected", labels=[*_BY_SERVER, "cause"]
    )
    standing = GaugeMetricFamily(
        "stemma_route_server_standing",
        "1 for how far a server may be asked",
        labels=[*_BY_SERVER, "standing"],
    )
    under_way = GaugeMetricFamily("stemma_route_under_way", "Requests under way", labels=_BY_SERVER)
    seconds = GaugeMetricFamily(
        "stemma_route_prefill_seconds_per_token", "Measured up to the first byte", labels=_BY_SERVER
    )
    first_bytes = HistogramMetricFamily(
        "stemma_route_time_to_first_byte_seconds", "From sending a request to its stream's first byte",
        labels=_BY_SERVER,
    )  # fmt: skip
    predicted = CounterMetricFamily(
        "stemma_route_predicted_hit_tokens", "Prompt tokens expected in a server's cache", labels=_BY_SERVER
    )
    delivered = CounterMetricFamily(
        "stemma_route_told_hit_tokens", "Prompt tokens that a server said it had cached", labels=_BY_SERVER
    )
    age = GaugeMetricFamily(
        "stemma_route_last_check_seconds", "Time since a server last answered a check", labels=_BY_SERVER
    )
    for role, fleet in fleets.items():
        for member in fleet.members:
            labels = [role, member.url]
            for outcome in Outcome:
                tries.add_metric([*labels, outcome.value], member.outcomes[outcome])
            retries.add_metric(labels, member.num_retries)
            for cause in Cause:
                ejections.add_metric([*labels, cause.value], member.health.ejections[cause])
            predicted.add_metric(labels, member.num_predicted_tokens)
            delivered.add_metric(labels, member.num_delivered_tokens)
            if (age_s := fleet.age_s(member)) is not None:
                age.add_metric(labels, age_s)
            for one in Standing:
                standing.add_metric([*labels, one.value], member.health.standing is one)
            under_way.add_metric(labels, len(member.under_way))
            first_bytes.add_metric(labels, member.first_bytes.buckets(), member.first_bytes.sum_s)
            if member.speed.num_samples:
                seconds.add_metric(labels, member.speed.mean_s)
    lost = sum(fleet.num_lost_retries for fleet in fleets.values())
    yield from (tries, retries, ejections, standing, under_way, seconds, first_bytes)
    yield from (predicted, delivered, age)
    text = "Requests that failed and weren't sent again, since no server had retries left"
    yield CounterMetricFamily("stemma_route_lost_retries", text, value=lost)

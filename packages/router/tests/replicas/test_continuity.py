"""Replicas on a real Ray, under load: whatever is killed or replaced, no second is without answers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from packages.router.tests.replicas.cluster import (
    KEY,
    PROMPTS,
    READY_S,
    Cluster,
    Load,
    answers_of_one_engine,
    serving,
    wait_for,
)
from prometheus_client.parser import text_string_to_metric_families

pytest.importorskip("ray", reason="the extra `ray` isn't installed")
pytest.importorskip("zmq", reason="the extra `ray` isn't installed")
pytestmark = pytest.mark.slow

LONGEST_GAP_S = 1.0
AFTER_S = 3.0
"""The load goes on for so long after what is tested."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with serving(Cluster(tmp_path_factory.mktemp("cluster"), {"count": 2})) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> dict[str, str]:
    return answers_of_one_engine(cluster.model)


@pytest.fixture
def load(cluster: Cluster, expected: dict[str, str]) -> Iterator[Load]:
    """Four clients, for which nothing is wrong, whatever happens."""
    wait_for(lambda: len(cluster.replicas()) == 2, timeout_s=READY_S)
    load = Load(cluster, expected, num_clients=4, max_tokens=8)
    wait_for(lambda: load.num_right > 20)
    yield load
    load.stop()
    assert load.wrong == []


def gap_during(load: Load, act: Callable[[], None], until: Callable[[], bool]) -> float:
    """Return the longest time without an answer, in seconds."""
    begun = time.monotonic()
    act()
    wait_for(until, timeout_s=READY_S)
    time.sleep(AFTER_S)
    return load.longest_gap_s(begun)


def is_replaced(cluster: Cluster, pid: int) -> bool:
    pids = {one["pid"] for one in cluster.replicas().values()}
    return len(pids) == 2 and pid not in pids


def of_ingresses(cluster: Cluster) -> list[int]:
    """Return the process ids of this cluster's ingresses."""
    found = []
    for name in os.listdir("/proc"):
        try:
            words = Path("/proc", name, "cmdline").read_text()
            session = os.getsid(int(name))
        except (OSError, ValueError):
            continue
        if "ray::ServeReplica:stemma:ingress" in words and session == cluster.process.pid:
            found.append(int(name))
    return found


def test_metrics_of_all_replicas_come_from_any_ingress(cluster: Cluster, load: Load) -> None:
    answer = httpx.get(f"{cluster.url}/metrics", headers=KEY, timeout=30)
    samples = [one for family in text_string_to_metric_families(answer.text) for one in family.samples]
    names = set(cluster.replicas())
    up = {one.labels["replica"]: one.value for one in samples if one.name == "stemma_replica_up"}
    assert up == dict.fromkeys(names, 1.0)
    assert {one.labels["replica"] for one in samples if one.name == "stemma_requests_running"} == names
    assert {"ingress"} == set().union(
        *(one.labels for one in samples if one.name.startswith("stemma_route_"))
    )
    assert httpx.get(f"{cluster.url}/metrics").status_code == 401


def test_a_killed_replica_leaves_no_second_without_answers(cluster: Cluster, load: Load) -> None:
    pid = next(iter(cluster.replicas().values()))["pid"]
    gap_s = gap_during(load, lambda: os.kill(pid, signal.SIGKILL), lambda: is_replaced(cluster, pid))
    assert gap_s < LONGEST_GAP_S
    assert load.lost == []


def test_a_rolling_restart_leaves_no_second_without_answers(cluster: Cluster, load: Load) -> None:
    before = {one["pid"] for one in cluster.replicas().values()}
    ingresses = of_ingresses(cluster)
    assert len(ingresses) == 2

    def is_done() -> bool:
        return "Replaced.\n" in cluster.lines

    gap_s = gap_during(load, lambda: cluster.process.send_signal(signal.SIGHUP), is_done)
    assert gap_s < LONGEST_GAP_S
    assert load.lost == []
    wait_for(lambda: not before & {one["pid"] for one in cluster.replicas().values()})
    assert not set(ingresses) & set(of_ingresses(cluster))


def test_a_killed_ingress_leaves_no_second_without_answers(cluster: Cluster, load: Load) -> None:
    """What it had under way is lost: Serve's own proxy asks no second ingress."""
    ingresses = of_ingresses(cluster)

    def is_new() -> bool:
        return len(now := of_ingresses(cluster)) == 2 and ingresses[0] not in now

    gap_s = gap_during(load, lambda: os.kill(ingresses[0], signal.SIGKILL), is_new)
    assert gap_s < LONGEST_GAP_S
    assert len(load.lost) <= 4  # as many as there are clients


def test_a_stopped_replica_is_replaced(cluster: Cluster, load: Load) -> None:
    """Three checks of 5 s; what it had is asked of another one then."""
    pid = max(cluster.replicas().values(), key=lambda one: one["requests"])["pid"]
    begun = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: is_replaced(cluster, pid), timeout_s=60)
    wait_for(lambda: load.num_right > 0 and load.right_at[-1] > begun + AFTER_S)
    load.stop()
    assert load.lost == []


@pytest.mark.parametrize("streams", [True, False])
def test_requests_at_a_stopped_replica_go_to_the_other_one(cluster: Cluster, streams: bool) -> None:
    """A stream once its first byte is late, a whole answer once the replica leaves checks unanswered."""
    wait_for(lambda: len(cluster.replicas()) == 2, timeout_s=READY_S)
    for prompt in PROMPTS * 2:  # measured: prefill takes milliseconds
        assert cluster.complete(prompt, stream=True).status_code == 200
    told = max(cluster.replicas().items())[1]
    os.kill(told["pid"], signal.SIGSTOP)
    with ThreadPoolExecutor(16) as threads:
        asked = [threads.submit(cluster.complete, prompt, stream=streams) for prompt in PROMPTS * 2]
        answers = [one.result() for one in asked]
    assert Path(f"/proc/{told['pid']}").exists(), "Serve hasn't replaced it yet"
    assert [one.status_code for one in answers] == [200] * 16
    assert all("error" not in one.text for one in answers)
    wait_for(lambda: is_replaced(cluster, told["pid"]), timeout_s=60)

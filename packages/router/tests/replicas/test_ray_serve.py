"""Replicas on a real Ray: routing by KV events, a killed replica, a rolling restart with warm disks."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from packages.router.tests.replicas.cluster import (
    PROMPTS,
    READY_S,
    Cluster,
    Load,
    answers_of_one_engine,
    serving,
    wait_for,
)

pytest.importorskip("ray", reason="the extra `ray` isn't installed")
pytest.importorskip("zmq", reason="the extra `ray` isn't installed")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with serving(Cluster(tmp_path_factory.mktemp("cluster"), {"count": 2})) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> dict[str, str]:
    return answers_of_one_engine(cluster.model)


def cached(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_prompts_go_where_their_blocks_are(cluster: Cluster, expected: dict[str, str]) -> None:
    for prompt in PROMPTS:
        answer = cluster.complete(prompt)
        assert expected[prompt].startswith(answer.json()["choices"][0]["text"])
    held_by = {replica["tokens_to_compute"] for replica in cluster.replicas().values()}
    assert held_by == {0}
    wait_for(lambda: cluster.health()["num_known_blocks"] > 0)
    assert all(cached(cluster.complete(prompt + " And then?")) > 64 for prompt in PROMPTS)
    assert cluster.complete(5).status_code == 400  # type: ignore[arg-type]
    assert httpx.get(f"{cluster.url}/v1/models").json()["data"][0]["id"] == "model"
    assert httpx.get(f"{cluster.url}/admin/stats").status_code == 400


def test_a_stream_comes_whole(cluster: Cluster, expected: dict[str, str]) -> None:
    answer = cluster.complete(PROMPTS[0], stream=True, max_tokens=32)
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data:")]
    assert events[-1] == "[DONE]"
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
    assert text
    assert expected[PROMPTS[0]].startswith(text)


def test_a_killed_replica_is_replaced_and_the_new_one_is_warm(
    cluster: Cluster, expected: dict[str, str]
) -> None:
    before = cluster.replicas()
    assert len(before) == 2
    with ThreadPoolExecutor(8) as threads:
        running = [threads.submit(cluster.complete, prompt, max_tokens=300) for prompt in PROMPTS]
        wait_for(lambda: any(replica["requests"] for replica in cluster.replicas().values()))
        victim = max(cluster.replicas().values(), key=lambda replica: replica["requests"])
        os.kill(victim["pid"], signal.SIGKILL)
        answers = [one.result() for one in running]
    assert {answer.status_code for answer in answers} == {200}
    assert [answer.json()["choices"][0]["text"] for answer in answers] == list(expected.values())
    wait_for(lambda: cluster.health()["num_retries"] > 0)  # each ingress counts its own
    wait_for(lambda: len(cluster.replicas()) == 2, timeout_s=READY_S)
    [new] = [one for name, one in cluster.replicas().items() if name not in before]
    assert new["disk"] == victim["disk"]
    tiers = [
        cluster.complete(prompt).json()["usage"]["stemma"]["cached_tokens_by_tier"] for prompt in PROMPTS
    ]
    assert all(sum(one.values()) > 64 for one in tiers)
    assert any(one.get("disk") for one in tiers)


def test_a_rolling_restart_is_warm_and_loses_nothing(cluster: Cluster, expected: dict[str, str]) -> None:
    before = cluster.replicas()
    stop = threading.Event()
    wrong: list[str] = []

    def ask() -> None:
        while not stop.is_set():
            answer = cluster.complete(PROMPTS[0])
            if answer.status_code != 200 or not expected[PROMPTS[0]].startswith(
                answer.json()["choices"][0]["text"]
            ):
                wrong.append(answer.text)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        cluster.process.send_signal(signal.SIGHUP)
        cluster.wait_until("Replaced.")
    finally:
        stop.set()
        asking.join()
    assert wrong == []
    wait_for(lambda: len(cluster.replicas()) == 2, timeout_s=READY_S)
    after = cluster.replicas()
    assert not {one["pid"] for one in after.values()} & {one["pid"] for one in before.values()}
    assert {one["disk"] for one in after.values()} == {one["disk"] for one in before.values()}
    assert all(cached(cluster.complete(prompt)) > 64 for prompt in PROMPTS)


def test_replicas_follow_the_load_and_lose_no_request(tmp_path: Path) -> None:
    """One at first, three under load, one again; somebody asks all the time."""
    autoscaling = {
        "min_replicas": 1,
        "max_replicas": 3,
        "target_ongoing_requests": 1.0,
        "upscale_delay_s": 1.0,
        "downscale_delay_s": 4.0,
        "metrics_interval_s": 0.5,
        "look_back_period_s": 2.0,
    }
    with serving(Cluster(tmp_path, {"autoscaling": autoscaling})) as cluster:
        expected = answers_of_one_engine(cluster.model)
        steady = Load(cluster, expected, num_clients=1, max_tokens=8)
        wait_for(lambda: len(cluster.replicas()) == 1)
        heavy = Load(cluster, expected, num_clients=12, max_tokens=300)
        try:
            wait_for(lambda: len(cluster.replicas()) == 3, timeout_s=READY_S)
            pids = {replica["pid"] for replica in cluster.replicas().values()}
            num_before = heavy.num_right
            wait_for(lambda: heavy.num_right > num_before + 24, timeout_s=READY_S)
            heavy.stop()
            wait_for(lambda: len(cluster.replicas()) == 1, timeout_s=READY_S)
            [last] = cluster.replicas().values()
            num_before = steady.num_right
            wait_for(lambda: steady.num_right > num_before + 8, timeout_s=READY_S)
        finally:
            heavy.stop()
            steady.stop()
        assert heavy.wrong == steady.wrong == heavy.lost == steady.lost == []
        assert last["pid"] in pids

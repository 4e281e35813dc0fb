"""What a router holds of whole answers is bounded, and given back when clients read, or don't."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from packages.router.tests.routing.processes import Process, become, health, router, sick_server
from packages.router.tests.routing.sick_server import BIG_BYTES

MEMORY = 32 * 2**20
NUM_CLIENTS = 24
BODY = b'{"prompt": "p"}'
REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(BODY), BODY)
)


@pytest.fixture
def behind() -> Iterator[Process]:
    server = sick_server()
    yield server
    server.stop()


@pytest.fixture
def proxy(behind: Process) -> Iterator[Process]:
    made = router(behind.url, flags=("--answer-memory", str(MEMORY), "--send-timeout-s", "3"))
    yield made
    made.stop()


def held(proxy: Process) -> int:
    budgets: Any = health(proxy)["budgets"]
    return int(next(one["held"] for one in budgets if one["name"] == "answer_bytes"))


def unread(proxy: Process) -> socket.socket:
    """Ask for an answer, and don't read it."""
    url = httpx.URL(proxy.url)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((url.host, url.port))
    client.sendall(REQUEST)
    return client


@pytest.mark.slow
def test_many_large_answers_that_nobody_reads_stay_within_the_budget(behind: Process, proxy: Process) -> None:
    become(behind, "big")
    process = psutil.Process(proxy.pid)
    before = process.memory_info().rss
    clients = [unread(proxy) for _ in range(NUM_CLIENTS)]
    most = most_held = 0
    end = time.monotonic() + 60
    while time.monotonic() < end:
        most = max(most, process.memory_info().rss - before)
        now = held(proxy)
        most_held = max(most_held, now)
        if most_held and not now:
            break
        time.sleep(0.05)
    assert 0 < most_held <= MEMORY
    assert most < 3 * MEMORY < NUM_CLIENTS * BIG_BYTES / 3  # sockets have buffers, and so has Python
    assert held(proxy) == 0, "who doesn't read loses the connection"
    for client in clients:
        client.close()


def test_a_large_answer_arrives_whole(behind: Process, proxy: Process) -> None:
    become(behind, "big")
    answer = httpx.post(f"{proxy.url}/v1/completions", json={"prompt": "p"}, timeout=60)
    assert answer.status_code == 200
    assert len(answer.json()["text"]) == BIG_BYTES
    assert held(proxy) == 0


def test_a_large_answer_that_breaks_off_does_not_look_finished(behind: Process, proxy: Process) -> None:
    become(behind, "big-cut")
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.post(f"{proxy.url}/v1/completions", json={"prompt": "p"}, timeout=60)
    assert health(proxy)["num_broken_streams"] == 1

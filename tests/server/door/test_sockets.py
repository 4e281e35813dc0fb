"""Sockets count from accept on; those that ask nothing make room. Over real sockets, plain and TLS."""

from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx

from tests.server.processes_seen import memory, tls_files
from tests.server.scripted_process import Server, read_all, serving

HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def num_files(server: Server) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


def connect(server: Server, stack: ExitStack, sent: bytes = b"") -> socket.socket:
    connection = stack.enter_context(socket.create_connection(server.address, timeout=10))
    if sent:
        connection.sendall(sent)
    return connection


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(5)
    with suppress(ConnectionError):
        return connection.recv(1) == b""
    return True


def test_half_sent_requests_never_lock_others_out(tokenizer_path: Path) -> None:
    """Headers, bodies, or nothing at all: the oldest goes first, so health answers at once."""
    sent = [b"", b"POST / HT", HALF, HALF + b'Content-Length: 99\r\n\r\n{"prompt"']
    with serving(tokenizer_path, max_connections=8) as server, ExitStack() as stack:
        held = [connect(server, stack, sent[number % 4]) for number in range(20)]
        time.sleep(0.2)
        for _ in range(5):
            assert httpx.get(f"{server.url}/health", timeout=5).status_code == 200
        assert all(is_closed(one) for one in held[:8])
        held[-1].settimeout(0.1)
        with suppress(TimeoutError):
            assert held[-1].recv(1) != b"", "the newest stays"


def test_a_connection_at_work_is_not_closed_for_another(tokenizer_path: Path) -> None:
    with serving(tokenizer_path, max_connections=2) as server, ExitStack() as stack:
        body = json.dumps({"prompt": "ab", "max_tokens": 4000, "stream": True}).encode()
        asked = HALF + b"Content-Length: %d\r\n\r\n" % len(body) + body
        working = [connect(server, stack, asked) for _ in range(2)]
        firsts = [one.recv(12) for one in working]
        assert firsts == [b"HTTP/1.1 200"] * 2


def test_silent_tls_connections_cost_nothing_and_end(tokenizer_path: Path, tmp_path: Path) -> None:
    """Three hundred with a limit of 50: no descriptors beyond it, no 280 KB each, and they end in time."""
    files, context = tls_files(tmp_path)
    limits: dict[str, Any] = {"max_connections": 50, "header_timeout_s": 2.0}
    with serving(tokenizer_path, tls=files, **limits) as server, ExitStack() as stack:
        with httpx.Client(verify=context) as client:
            assert client.get(f"{server.url}/health").status_code == 200
        files_before, before = num_files(server), memory(server)
        begun = time.monotonic()
        for _ in range(300):
            connect(server, stack)
        held = [connect(server, stack, b"\x16\x03\x01") for _ in range(10)]  # a handshake that begins
        time.sleep(0.3)
        assert num_files(server) <= files_before + 55
        assert memory(server) - before < 6 * 2**20
        with httpx.Client(verify=context) as client:
            assert client.get(f"{server.url}/health").status_code == 200, "the oldest silent one made room"
        assert all(is_closed(one) for one in held)
        assert time.monotonic() - begun < 6
        while num_files(server) > files_before + 1:
            assert time.monotonic() - begun < 8
            time.sleep(0.05)
        with httpx.Client(verify=context) as client:
            assert client.get(f"{server.url}/health").status_code == 200


def test_a_client_that_closes_its_half_gets_its_answers(tokenizer_path: Path) -> None:
    body = json.dumps({"prompt": "ab", "max_tokens": 3}).encode()
    asked = HALF + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with serving(tokenizer_path) as server, ExitStack() as stack:
        for sent, num_answers in (
            (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 1),
            (b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n", 1),
            (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3, 3),
            (asked, 1),
        ):
            connection = connect(server, stack, sent)
            connection.shutdown(socket.SHUT_WR)
            assert read_all(connection).count(b" 200 OK") == num_answers


def test_a_client_that_left_is_told_from_one_that_closed_its_half(tokenizer_path: Path) -> None:
    """Its request ends, and so does its connection: the drain has nothing to wait for."""
    body = json.dumps({"prompt": "ab", "max_tokens": 4000}).encode()
    asked = HALF + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with serving(tokenizer_path, delay_s=5.0, admin_key="root") as server:
        with ExitStack() as stack:
            connect(server, stack, asked)
            wait_for(server, 1)
        wait_for(server, 0)


def wait_for(server: Server, num_under_way: int) -> None:
    deadline = time.monotonic() + 4
    headers = {"authorization": "Bearer root"}
    while (
        len(httpx.get(f"{server.url}/admin/live/now", headers=headers).json()["under_way"]) != num_under_way
    ):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_no_host_is_400_and_head_answers_as_get(tokenizer_path: Path) -> None:
    with serving(tokenizer_path) as server:
        close = b"Connection: close\r\n\r\n"
        assert server.ask(b"GET /health HTTP/1.1\r\n" + close).startswith(b"HTTP/1.1 400")
        head = server.ask(b"HEAD /v1/models HTTP/1.1\r\nHost: localhost\r\n" + close)
        assert head.startswith(b"HTTP/1.1 200")
        assert head.endswith(b"\r\n\r\n")
        assert server.ask(b"HEAD /admin/live HTTP/1.1\r\nHost: localhost\r\n" + close).startswith(
            b"HTTP/1.1 200"
        )
        assert server.ask(b"HEAD /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + close).startswith(
            b"HTTP/1.1 405"
        )
        assert httpx.get(f"{server.url}/health").status_code == 200

"""Clients that don't read: bounded, given a deadline, and the first to make room. Over real sockets."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from tests.server.processes_seen import memory, tls_files
from tests.server.scripted_process import Server, serving

GET = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
ADMIN = {"authorization": "Bearer root"}
HOLDING = {"prompt": "ab", "max_tokens": 800, "n": 48, "logprobs": 5, "stream": True}
"""A request for more bytes than the kernel's buffers take."""


def deaf(server: Server, stack: ExitStack, sent: bytes) -> socket.socket:
    """Connect with a small window, send, and read nothing."""
    connection = stack.enter_context(socket.socket())
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(60)
    connection.connect(server.address)
    connection.sendall(sent)
    return connection


def asked(body: object) -> bytes:
    content = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(content) + content


def num_under_way(server: Server) -> int:
    return len(httpx.get(f"{server.url}/admin/live/now", headers=ADMIN).json()["under_way"])


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def answers(server: Server) -> bool:
    """Whether a new client is answered; for a moment all others may be at work."""
    with suppress(httpx.TransportError):
        return httpx.get(f"{server.url}/health", timeout=5).status_code == 200
    return False


def ends(connection: socket.socket) -> bool:
    """Whether the server ends it, after what is read meanwhile."""
    with suppress(ConnectionError):
        while connection.recv(1 << 16):
            pass
    return True


def test_sockets_that_read_nothing_lock_nobody_out(tokenizer_path: Path) -> None:
    """Three hundred with pipelined requests refused everybody for minutes: now the oldest makes room."""
    with serving(tokenizer_path, max_connections=8, keep_alive_s=60.0) as server, ExitStack() as stack:
        size = len(httpx.get(f"{server.url}/openapi.json").content)
        before = memory(server)
        for _ in range(24):
            with suppress(ConnectionError):
                deaf(server, stack, GET * 24)
        for _ in range(5):
            wait_until(lambda: answers(server))
        assert memory(server) - before < 8 * 3 * size, "one answer a socket is made before it is read"


def test_a_pipeline_has_an_end(tokenizer_path: Path) -> None:
    with serving(tokenizer_path) as server:
        assert b" 400 " in server.ask(GET * 200)
        assert httpx.get(f"{server.url}/health", timeout=5).status_code == 200


def test_pipelined_requests_are_answered_as_they_are_read(tokenizer_path: Path) -> None:
    with serving(tokenizer_path) as server, ExitStack() as stack:
        last = GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        connection = deaf(server, stack, GET * 9 + last)
        received = bytearray()
        while data := connection.recv(1 << 16):
            received += data
        assert received.count(b"HTTP/1.1 200 OK") == 10


@pytest.mark.parametrize("tls", [False, True])
def test_an_unread_stream_loses_its_connection_and_its_seats(
    tokenizer_path: Path, tmp_path: Path, tls: bool
) -> None:
    files, context = tls_files(tmp_path) if tls else (None, None)
    with (
        serving(tokenizer_path, tls=files, admin_key="root", send_timeout_s=0.5) as server,
        ExitStack() as stack,
    ):
        connection = deaf(server, stack, b"" if tls else asked(HOLDING))
        if context is not None:
            connection = stack.enter_context(context.wrap_socket(connection, server_hostname="127.0.0.1"))
            connection.sendall(asked(HOLDING))
        client = stack.enter_context(httpx.Client(verify=context or True, headers=ADMIN))

        def under_way() -> int:
            return len(client.get(f"{server.url}/admin/live/now").json()["under_way"])

        wait_until(lambda: under_way() == 1)
        wait_until(lambda: under_way() == 0)
        assert ends(connection)


def test_a_trickle_holds_no_connection(tokenizer_path: Path) -> None:
    with (
        serving(tokenizer_path, admin_key="root", send_timeout_s=0.5) as server,
        ExitStack() as stack,
    ):
        connection = deaf(server, stack, asked(HOLDING))
        wait_until(lambda: num_under_way(server) == 1)
        deadline = time.monotonic() + 20
        while num_under_way(server):
            assert time.monotonic() < deadline
            with suppress(ConnectionError):
                connection.recv(16)


def test_a_slow_reader_gets_all_of_its_answer(tokenizer_path: Path) -> None:
    """Longer than the deadline, which is for those who don't read at all."""
    with serving(tokenizer_path, send_timeout_s=2.0) as server, ExitStack() as stack:
        body = {"prompt": "ab", "max_tokens": 400, "n": 32, "logprobs": 5}
        connection = deaf(server, stack, asked(body).replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        begun, received = time.monotonic(), bytearray()
        while data := connection.recv(1 << 17):
            received += data
            if time.monotonic() - begun < 3:
                time.sleep(0.02)
        head, _, text = bytes(received).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert len(json.loads(text)["choices"]) == 32


def test_the_ledger_holds_an_answer_until_it_has_left(tokenizer_path: Path) -> None:
    """Once it was made it counted for nothing, however long it lay there."""
    with serving(tokenizer_path, admin_key="root") as server, ExitStack() as stack:
        echoes = {"prompt": ["x" * 4000] * 4, "n": 256, "echo": True, "max_tokens": 0}
        connection = deaf(server, stack, asked({**echoes, "return_token_ids": True}))

        def held() -> int:
            shown = httpx.get(f"{server.url}/admin/live/now", headers=ADMIN).json()["budgets"]
            return sum(one["held"] for one in shown if one["name"] == "answer_bytes")

        assert connection.recv(12) == b"HTTP/1.1 200"  # it is made, and on its way
        assert held() > 10_000_000
        connection.settimeout(1)
        with suppress(TimeoutError):
            while connection.recv(1 << 20):
                pass
        wait_until(lambda: held() == 0)


def test_what_is_pipelined_behind_a_stream_does_not_hide_that_its_client_left(tokenizer_path: Path) -> None:
    with serving(tokenizer_path, delay_s=0.05, admin_key="root") as server:
        with ExitStack() as stack:
            deaf(server, stack, asked(HOLDING) + GET)
            wait_until(lambda: num_under_way(server) == 1)
        wait_until(lambda: num_under_way(server) == 0)


def test_sockets_with_a_key_are_the_last_to_go(tokenizer_path: Path) -> None:
    models = b"HEAD /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer s3cret\r\n\r\n"
    with (
        serving(tokenizer_path, api_key="s3cret", max_connections=4, keep_alive_s=60.0) as server,
        ExitStack() as stack,
    ):
        known = deaf(server, stack, models)
        assert known.recv(4096).startswith(b"HTTP/1.1 200")
        for _ in range(12):
            deaf(server, stack, b"")
            with suppress(ConnectionError):
                deaf(server, stack, GET * 24)
            wait_until(lambda: answers(server))
        known.sendall(models)
        assert known.recv(4096).startswith(b"HTTP/1.1 200")

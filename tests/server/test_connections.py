"""Limits of connections before a key is read: over real sockets, against a server in a process of its own."""

from __future__ import annotations

import shutil
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from stemma.server.transport.connections import ACCEPT_BURST, MAX_HEADER_BYTES, connection_limit
from stemma.server.transport.planes import listen
from tests.server.scripted_process import Server, serving

FAST: dict[str, Any] = {"header_timeout_s": 0.5, "body_timeout_s": 0.5, "keep_alive_s": 1.0}


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory, tokenizer_path: Path) -> Iterator[Server]:
    """A server with short deadlines and a key that nobody here has."""
    with serving(tokenizer_path, api_key="s3cret", **FAST) as server:
        yield server


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\r\n",
        b"POST /v1/comp",
        HEAD + b"Authorization: Bea",
        HEAD + b"Content-Length: 100\r\n\r\n{",
        HEAD + b"Authorization: Bearer s3cret\r\nContent-Length: 100\r\n\r\n{",
        HEAD + b"Authorization: Bearer s3cret\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /health HT",
    ],
)
def test_requests_that_never_end_are_closed(fast: Server, sent: bytes) -> None:
    begun = time.monotonic()
    fast.ask(sent)
    assert time.monotonic() - begun < 8
    assert httpx.get(f"{fast.url}/health").status_code == 200


def test_a_trickle_does_not_stop_the_clock(fast: Server) -> None:
    """One byte every 50 ms; deadlines of 0.5 s."""
    for head in (
        b"POST / HTTP/1.1\r\nX: ",
        HEAD + b"Authorization: Bearer s3cret\r\nContent-Length: 999\r\n\r\n",
    ):
        begun = time.monotonic()
        with socket.create_connection(fast.address, timeout=10) as connection, suppress(ConnectionError):
            connection.sendall(head)
            while time.monotonic() - begun < 5:
                connection.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() - begun < 5


def test_whole_requests_pass(fast: Server) -> None:
    """Deadlines concern what is read, not answers; a connection is used again."""
    with httpx.Client(base_url=fast.url, headers={"authorization": "Bearer s3cret"}) as client:
        for pause_s in (0.0, 0.7):
            time.sleep(pause_s)
            body = {"prompt": "x" * 3000, "max_tokens": 2}
            assert client.post("/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_http_1_0_has_no_chunks_and_ends_with_the_connection(fast: Server, stream: bool) -> None:
    body = b'{"prompt":"x","max_tokens":3,"stream":%s}' % (b"true" if stream else b"false")
    head = b"POST /v1/completions HTTP/1.0\r\nAuthorization: Bearer s3cret\r\nContent-Length: %d\r\n\r\n"
    answer = fast.ask(head % len(body) + body)
    told, _, text = answer.partition(b"\r\n\r\n")
    assert b"200 OK" in told
    assert b"chunked" not in told.lower()
    assert text.startswith(b"data: {" if stream else b"{")
    assert text.endswith(b"data: [DONE]\n\n" if stream else b"}")


MALFORMED = [
    b"GET / HTTP/1.1\r\nHost: [\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost:x\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: \xff\xfe\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: a\r\nAuthorization: b\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: \xb2\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
    b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: x\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http://[ HTTP/1.1\r\nHost: x\r\n\r\n",
    b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET / HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(200)) + b"\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * MAX_HEADER_BYTES + b"\r\n\r\n",
    b"GET /" + b"y" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nX: " + b"y" * 300_000,
]


@pytest.mark.parametrize("sent", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_requests_are_400(fast: Server, sent: bytes) -> None:
    answer = fast.ask(sent)
    status = answer.split(b" ", 2)[1] if answer else b"closed"
    assert status in (b"400", b"closed"), answer[:200]
    assert httpx.get(f"{fast.url}/health").status_code == 200


@pytest.mark.parametrize(
    "line",
    [
        b"Authorization: \xff\xfe",
        b"Authorization: Bearer " + b"\xf0" * 100,
        b"Content-Type: \xff",
        b"Accept-Encoding: \x80",
        b"Origin: http://[",
        b"Cookie: =;;;\xff",
        b"Range: bytes=-",
        b"Expect: 100-continue",
        b"Connection: upgrade\r\nUpgrade: websocket",
        b"X-Forwarded-For: \xff",
    ],
)
def test_strange_headers_are_no_server_errors(fast: Server, line: bytes) -> None:
    # Kept open, a connection would end only by its time limit, and `ask` reads to the end.
    lines = [b"Host: localhost", line] + [b"Connection: close"] * (not line.startswith(b"Connection"))
    for path in (b"/v1/models", b"/health", b"/admin/stats", b"/nowhere"):
        answer = fast.ask(b"GET " + path + b" HTTP/1.1\r\n" + b"\r\n".join(lines) + b"\r\n\r\n")
        assert answer.split(b" ", 2)[1] in (b"200", b"400", b"401", b"403", b"404"), answer[:200]


def test_log_of_a_flood_stays_small(fast: Server) -> None:
    for _ in range(200):
        fast.ask(b"nonsense\r\n\r\n")
    assert len(fast.written()) < 20_000, fast.written()[:2000]


def test_descriptors_are_never_used_up(tokenizer_path: Path) -> None:
    """256 files, 400 half requests at once: others wait for a deadline at most, and the log stays small."""
    with serving(tokenizer_path, num_files=256, header_timeout_s=2.0) as server:
        held = []
        for _ in range(400):
            with suppress(OSError):
                connection = socket.create_connection(server.address, timeout=5)
                held.append(connection)
                connection.sendall(b"POST / HTTP/1.1\r\nX: ")
        deadline = time.monotonic() + 10
        status = 0
        while status != 200 and time.monotonic() < deadline:
            with suppress(httpx.HTTPError):
                status = httpx.get(f"{server.url}/health", timeout=2).status_code
            time.sleep(0.05)
        for connection in held:
            connection.close()
        assert status == 200
        assert len(server.written()) < 20_000, server.written()[:2000]


def test_the_limit_of_connections() -> None:
    assert connection_limit(1024, 65_536) == 1024
    assert connection_limit(1024, 256) + ACCEPT_BURST < 256
    assert connection_limit(1024, 10) == 1


def test_a_template_that_hangs_does_not_hold_the_drain(tokenizer_path: Path, tmp_path: Path) -> None:
    hanging = shutil.copytree(tokenizer_path, tmp_path / "tokenizer")
    # Few rounds, each slow: what the bounds of templates let run for seconds.
    slow = "{% set s = 'a' * 1000000 %}{% for i in range(99999) %}{% if 'ab' in s %}{% endif %}{% endfor %}"
    slow = f"{{% if messages[0].content == 'hang' %}}{slow}{{% endif %}}"  # the start's own questions don't
    (hanging / "chat_template.jinja").write_text(slow)
    body = {"messages": [{"role": "user", "content": "hang"}]}
    with serving(hanging, tokenize_timeout_s=0.3) as server:
        for _ in range(3):
            assert httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=20).status_code == 408
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, timeout=20).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(15) == 0


def test_small_writes_wait_for_no_acknowledgement() -> None:
    """Else an answer's second write comes 40 ms late: its head and its body are two."""
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

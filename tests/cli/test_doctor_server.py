from __future__ import annotations

import socket
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import orjson
import pytest
from typer.testing import CliRunner, Result

from stemma.cli import make_app


def run(*arguments: str) -> Result:
    return CliRunner().invoke(make_app(), ["doctor", *arguments])


def test_a_server_says_how_it_is_and_what_it_serves(live_url: str) -> None:
    told = run(live_url)
    assert told.exit_code == 0, told.output
    assert "health        ok" in told.output
    assert "nothing is wrong" in told.output
    assert orjson.loads(run(f"{live_url}/v1", "--json").output)["models"]


def test_what_does_not_answer_is_told() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        told = run(f"http://127.0.0.1:{unused.getsockname()[1]}")
    assert told.exit_code == 1
    assert "can't be reached: ConnectError" in told.output


@pytest.mark.parametrize("body", [b"no JSON", b"[" * 100_000, b"[]", b'{"data": 1}', b" " * (2 << 20)])
def test_garbage_is_told_and_bounded(body: bytes) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            with suppress(ConnectionError):
                self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        told = run(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert told.exit_code == 1, told.output
    assert "does it speak" in told.output or "is this an OpenAI-compatible server?" in told.output


@pytest.mark.parametrize("given", ["/no/such/dir", "https.gguf"])
def test_a_path_is_no_url(given: str) -> None:
    assert "can't be reached" not in run(given).output

from __future__ import annotations

import socket

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


@pytest.mark.parametrize("given", ["/no/such/dir", "https.gguf"])
def test_a_path_is_no_url(given: str) -> None:
    assert "can't be reached" not in run(given).output

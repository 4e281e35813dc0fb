"""Divergences over the real server: found, replayed, rendered, and true when their advice is followed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.e2e.conftest import Served, start_server
from typer.testing import CliRunner

from stemma.cli import make_app

BODY = "You are a helpful assistant of the harbour. Answer in one sentence and explain your reasoning. " * 3
NUM_REQUESTS = 12


@pytest.fixture(scope="module")
def own_server(tiny_model: Path) -> Iterator[Served]:
    served, stop = start_server(tiny_model, kv_cache_memory="16MB")
    yield served
    stop()


def ask(served: Served, prompt: str) -> int:
    usage = served.complete(prompt, max_tokens=1)["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def report(served: Served, **params: Any) -> dict[str, Any]:
    return httpx.get(f"{served.url}/admin/divergences", params=params, timeout=60).json()


def test_following_the_advice_brings_what_it_says(own_server: Served) -> None:
    empty = report(own_server)
    assert (empty["num_requests"], empty["divergences"]) == (0, [])
    as_asked = [f"Now: 2026-11-20 08:{n:02d}:07. {BODY}Who asks {n}?" for n in range(NUM_REQUESTS)]
    cached = sum(ask(own_server, prompt) for prompt in as_asked)
    found = report(own_server)
    assert found["num_requests"] == NUM_REQUESTS
    assert found["num_prompt_tokens"] - found["num_missed_tokens"] == cached
    first = found["divergences"][0]
    assert (first["shape"], first["first_token"]) == ("timestamp", 0)
    assert "move it to the end" in first["advice"]
    assert first["example"]["yours"].startswith(first["example"]["common"])
    assert found["prefill_s_per_token"] > 0.0
    assert first["saved_s"] > 0.0
    own_server.post("/admin/cache/flush")
    moved = sum(
        ask(own_server, f"Now: . {BODY}Who asks {n}? 2026-11-20 08:{n:02d}:07") for n in range(NUM_REQUESTS)
    )
    assert first["saved_tokens"] == pytest.approx(moved - cached, rel=0.2)


def test_the_command_renders_them(own_server: Served) -> None:
    for n in range(3):
        ask(own_server, f"Now: 2026-11-21 09:{n:02d}:07. {BODY}")
    result = CliRunner(env={"COLUMNS": "160"}).invoke(
        make_app(), ["explain", "--divergences", "--url", own_server.url]
    )
    assert result.exit_code == 0, result.output
    assert "part at a timestamp in the first 64 tokens" in result.output
    assert "Replayed" in result.output
    both = CliRunner().invoke(make_app(), ["explain", "--divergences", "--last"])
    assert both.exit_code != 0


@pytest.mark.parametrize("window_s", ["0", "-1", "nan", "inf", "soon", "1e99"])
def test_a_malformed_window_is_refused(own_server: Served, window_s: str) -> None:
    response = httpx.get(f"{own_server.url}/admin/divergences", params={"window_s": window_s})
    assert response.status_code == 400
    assert "window_s" in response.text

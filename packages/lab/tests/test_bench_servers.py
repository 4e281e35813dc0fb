"""`stemma bench` against a scripted engine."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.cli.terminal import terminal
from tests.server.scripted_engine import ScriptedEngine
from typer.testing import CliRunner, Result

from stemma.cli import make_app
from stemma.cli.client import StreamedAnswer
from stemma_lab.measure.driver import Record
from stemma_lab.measure.report import summarize


def bench(*arguments: Any) -> Result:
    return CliRunner().invoke(make_app(), ["bench", *map(str, arguments)])


def test_shared_prefix_run(live_url: str, engine: ScriptedEngine, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    result = bench(
        live_url, "-n", 6, "-c", 2, "--input-tokens", 5, "--prefix-tokens", 20, "--output-tokens", 7,
        "--json", file,
    )  # fmt: skip

    assert result.exit_code == 0, result.output
    report = orjson.loads(file.read_bytes())
    summary = report["summary"]
    assert (summary["num_requests"], summary["num_failed"]) == (6, 0)
    assert summary["num_generated_tokens"] == 6 * 7
    assert summary["num_prompt_tokens"] == sum(len(r.prompt_token_ids) for r in engine.requests[1:])
    assert 0.5 < summary["cached_share"] < 1.0
    assert report["setup"]["model"] == "scripted"
    assert len(report["requests"]) == 6
    assert "prompt tokens from cache" in result.output


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_turns_contain_the_answers_before(live_url: str, engine: ScriptedEngine, endpoint: str) -> None:
    result = bench(
        live_url, "-w", "multi-turn", "--num-sessions", 2, "--num-turns", 3, "--input-tokens", 4,
        "--prefix-tokens", 3, "--output-tokens", 5, "--endpoint", endpoint, "-c", 1,
    )  # fmt: skip

    assert result.exit_code == 0, result.output
    rounds = engine.requests[1:]
    assert len(rounds) == 6
    for before, after in pairwise(rounds[:3]):
        answer = engine.tokenizer.decode(engine.reply_ids(before, 0))
        assert answer in engine.tokenizer.decode(after.prompt_token_ids.tolist())


def test_arrivals_at_a_rate(live_url: str) -> None:
    result = bench(live_url, "-w", "random", "-n", 4, "--request-rate", 200, "--input-tokens", 3)

    assert result.exit_code == 0, result.output


def test_failures_are_counted_and_fail_the_command(live_url: str, engine: ScriptedEngine) -> None:
    engine.max_model_len = 100
    result = bench(live_url, "-w", "random", "-n", 3, "--input-tokens", 200)

    assert "3 (3 failed)" in result.output
    assert "output included" in result.output
    assert result.exit_code == 1


def test_no_server() -> None:
    result = bench("http://127.0.0.1:9", "-n", 1)

    assert result.exit_code == 1
    assert "lists no model" in str(result.exception)


def test_summary_of_known_times() -> None:
    def record(number: int, start: float, times: list[float]) -> Record:
        answer = StreamedAnswer(start, "x", times[0], times[-1], times, 10, len(times), 4)
        return Record(number, 0, answer)

    records = [record(0, 0.0, [1.0, 1.5, 2.0]), record(1, 1.0, [1.5]), Record(2, 0, None, "lost")]
    summary = summarize(records, 2.0)

    assert summary.ttft_ms is not None
    assert (summary.ttft_ms.mean, summary.ttft_ms.p50, summary.ttft_ms.p99) == (750.0, 500.0, 1000.0)
    assert summary.tpot_ms is not None
    assert summary.tpot_ms.mean == 500.0
    assert (summary.num_requests, summary.num_failed, summary.num_generated_tokens) == (3, 1, 4)
    assert summary.cached_share == 0.4
    assert summary.output_tokens_per_s == 2.0
    assert summary.requests_per_s == 1.0


def test_summary_of_a_server_that_says_nothing() -> None:
    summary = summarize([Record(0, 0, StreamedAnswer(0.0, "x", 1.0, 1.0, [1.0]))], 1.0)

    assert summary.cached_share is None
    assert summary.tpot_ms is None


def test_a_bench_that_is_interrupted_shows_what_it_has(live_url: str) -> None:
    with terminal(["bench", live_url, "-n", "2000", "-c", "1", "--input-tokens", "5"]) as bench:
        bench.wait_for("/2000")
        time.sleep(1.0)
        bench.type("\x03")
        bench.wait_for("interrupted after")
        bench.wait_for("prompt tokens from cache")
        assert bench.wait(20) == 130

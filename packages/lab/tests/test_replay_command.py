"""`stemma replay` from the command line."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from stemma.cli import make_app
from stemma.engine.trace_log import FinishedRequest, TraceHeader, TraceLog
from stemma.errors import ConfigError
from stemma.prefix.keys import DEFAULT_NAMESPACE
from stemma.types import Tier
from stemma_lab.commands.replay import parse_capacities, parse_policies

SAMPLE = Path(__file__).parent / "data" / "mooncake_conversation_head.jsonl"


def run(*arguments: object):
    return CliRunner().invoke(make_app(), ["replay", *map(str, arguments)])


def test_rows_and_report(tmp_path):
    rows_path, report_path = tmp_path / "rows.json", tmp_path / "report.html"
    sizes = "100,500,unlimited"
    options = ("--policy", "lru,min", "--capacity", sizes, "--json", rows_path, "--html", report_path)
    result = run(SAMPLE, *options)
    assert result.exit_code == 0, result.output
    rows = json.loads(rows_path.read_text())
    assert [(row["policy"], row["capacity_blocks"]) for row in rows] == [
        (policy, size) for policy in ("lru", "min") for size in (100, 500, None)
    ]
    by_key = {(row["policy"], row["capacity_blocks"]): row["block_hit_ratio"] for row in rows}
    assert by_key["lru", 100] <= by_key["min", 100] <= by_key["min", None] == by_key["lru", None]
    assert all(0 <= row["token_hit_ratio"] <= 1 for row in rows)
    digest = hashlib.sha256(SAMPLE.read_bytes()).hexdigest()
    version = {"name": SAMPLE.name, "sha256": digest, "num_requests": len(SAMPLE.read_text().splitlines())}
    assert all(row["trace"] == version for row in rows)
    assert f"sha256 {digest[:8]}" in result.output
    report = report_path.read_text()
    assert "Plotly.newPlot" in report
    assert 'src="http' not in report


def test_lengths_alone_are_refused(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n")
    result = run(path)
    assert isinstance(result.exception, ConfigError)
    assert "lengths only" in str(result.exception)


def test_skip_bad(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"{\n" + SAMPLE.read_bytes())
    result = run(path, "--policy", "lru", "--capacity", "10", "--skip-bad")
    assert result.exit_code == 0, result.output
    assert "1 bad lines skipped" in result.output


def test_prefill_time_is_a_cost():
    assert run(SAMPLE, "--policy", "lru", "--capacity", "50", "--cost", "prefill-time").exit_code == 0
    assert isinstance(run(SAMPLE, "--cost", "gold").exception, ConfigError)


def test_bad_arguments():
    with pytest.raises(ConfigError, match="unknown eviction policy 'x'"):
        parse_policies("lru,x")
    with pytest.raises(ConfigError, match="not a capacity"):
        parse_capacities("10,-3")
    assert parse_capacities("1_000,unlimited,1000") == [1000, None]


def test_tiers_below(tmp_path):
    rows_path = tmp_path / "rows.json"
    options = ("--policy", "lru", "--capacity", "100,200", "--below", "300,400", "--json", rows_path)
    result = run(SAMPLE, *options)
    assert result.exit_code == 0, result.output
    rows = json.loads(rows_path.read_text())
    assert [row["tier_capacities"] for row in rows] == [[100, 300, 400], [200, 300, 400]]
    assert all(abs(sum(row["tier_hit_ratios"]) - row["block_hit_ratio"]) < 1e-9 for row in rows)
    assert isinstance(run(SAMPLE, "--below", "unlimited").exception, ConfigError)
    assert isinstance(run(SAMPLE, "--below", "10", "--sharing", "none").exception, ConfigError)


def test_orders(tmp_path):
    path = tmp_path / "orders.json"
    arguments = ["order", str(SAMPLE), "--capacity", "300", "--time-scale", "0.1", "--json", str(path)]
    result = CliRunner().invoke(make_app(), arguments)
    assert result.exit_code == 0, result.output
    assert [row["order"] for row in json.loads(path.read_text())] == [
        "fcfs",
        "longest-prefix",
        "dfs-weight",
        "ageing",
    ]


def test_a_closed_loop(tmp_path):
    path = tmp_path / "loop.json"
    arguments = ["order", str(SAMPLE), "--closed-loop", "--capacity", "300", "--json", str(path)]
    result = CliRunner().invoke(make_app(), arguments)
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())
    assert [row["order"] for row in rows] == ["fcfs", "longest-prefix", "ageing", "resident"]
    assert all(row["trace"]["name"] == SAMPLE.name and row["turn_p50_s"] > 0 for row in rows)
    assert isinstance(CliRunner().invoke(make_app(), [*arguments, "--orders", "x"]).exception, ConfigError)


def test_replicas_behind_routers(tmp_path):
    rows_path = tmp_path / "rows.json"
    options = (
        "--replicas",
        "1,3",
        "--router",
        "cache-aware,round-robin",
        "--event-lag-s",
        2,
        "--policy",
        "lru",
    )
    result = run(SAMPLE, "--capacity", 200, *options, "--json", rows_path)
    assert result.exit_code == 0, result.output
    rows = json.loads(rows_path.read_text())
    assert [(row["num_replicas"], row["capacity_blocks"]) for row in rows] == [
        (1, 200), (1, 200), (1, 200), (1, 600), (3, 200), (3, 200),
    ]  # fmt: skip
    assert "all memory" in result.output
    for wrong in (("--replicas", "0"), ("--replicas", "2", "--router", "nearest")):
        assert isinstance(run(SAMPLE, *wrong).exception, ConfigError)


def test_its_error_beside_the_server_is_told(tmp_path):
    """The second prompt comes while the first, which it begins with, still holds its blocks."""
    path, tokens = tmp_path / "t", np.arange(32, dtype=np.int32)
    with TraceLog(path, TraceHeader(4, 8, capacity_blocks=8, eviction="lru")) as log:
        for number, (prompt, hits) in enumerate(((tokens[:16], 0), (tokens[:24], 16), (tokens[:24], 23))):
            cached = {Tier.DEVICE: hits} if hits else {}
            log.record(
                FinishedRequest(float(number), DEFAULT_NAMESPACE, prompt, tokens[:1], cached, service_s=1.5)
            )
    result = run(path, "--policy", "lru", "--capacity", 8)
    assert result.exit_code == 0, result.output
    told = " ".join(result.output.split())
    assert "found 60.9% of prompt tokens on its device" in told
    assert "60.9%, an error of +0.0 points." in told

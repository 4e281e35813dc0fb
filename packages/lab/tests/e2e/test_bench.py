"""`stemma bench` against a real server."""

from __future__ import annotations

from pathlib import Path

import orjson
from tests.e2e.conftest import Served
from typer.testing import CliRunner

from stemma.cli import make_app


def test_bench_against_the_real_server(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    arguments = ["-w", "multi-turn", "--num-sessions", 2, "--num-turns", 3, "--input-tokens", 12]
    arguments += ["--prefix-tokens", 30, "--output-tokens", 6, "--endpoint", "chat", "-c", 2, "--json", file]
    result = CliRunner().invoke(make_app(), ["bench", served.url, *map(str, arguments)])

    assert result.exit_code == 0, result.output
    report = orjson.loads(file.read_bytes())
    assert report["summary"]["num_failed"] == 0
    assert report["summary"]["cached_share"] > 0.5
    assert report["summary"]["num_generated_tokens"] == 6 * 6

